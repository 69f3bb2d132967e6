import math

import cv2
import numpy as np
import pytest
import torch
from golden import call, params, recipe, resolve, target

from basicsr.utils.diffjpeg import (
    BlockMerging,
    BlockSplitting,
    ChromaSubsampling,
    ChromaUpsampling,
    CompressJpeg,
    DCT8x8,
    DiffJPEG,
    RGB2YCbCrJpeg,
    YCbCr2RGBJpeg,
    c_table,
    diff_round,
    iDCT8x8,
    quality_to_factor,
    y_table,
)


@pytest.mark.parametrize('case', params('degradations', lambda c: 'diffjpeg' in c['target']))
def test_result_equals_the_reference(case):
    if case['kind'] == 'call':
        out = call(case)
    else:
        out = target(case)(**case['init'])(*resolve(case['args']), **resolve(case['kwargs']))
    assert recipe.compare(case, out) is None


def waves(*shape):
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(0.37 * index)).view(shape).float()


def photo(height=48, width=40):
    img = recipe.det_image('jpeg', height, width)
    return torch.from_numpy(img).permute(2, 0, 1)[None].float() / 255


@pytest.mark.parametrize(
    ('differentiable', 'quality', 'total', 'mean_square'),
    [
        (True, 20, 5893.699961, 0.335208),
        (True, 75, 5881.891163, 0.34938),
        (True, torch.tensor([30.0, 80.0]), 5881.755846, 0.35231),
        (False, 20, 5893.754554, 0.335535),
        (False, 75, 5881.350794, 0.349369),
        (False, torch.tensor([30, 80]), 5880.66513, 0.352876),
    ],
)
def test_compression_gives_the_numbers_measured_on_upstream(
    differentiable, quality, total, mean_square
):
    out = DiffJPEG(differentiable)(waves(2, 3, 37, 53), quality).double()
    assert out.shape == (2, 3, 37, 53)
    assert out.sum().item() == pytest.approx(total, abs=1e-2)
    assert out.square().mean().item() == pytest.approx(mean_square, abs=2e-6)


def test_the_loss_is_that_of_a_jpeg_file():
    # The luma table is transposed, so the image is made symmetric for the comparison.
    img = photo(48, 48)
    img = (img + img.transpose(2, 3)) / 2
    ours = DiffJPEG(differentiable=False)(img, 60)
    pixels = (img[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)[..., ::-1]
    _, content = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 60])
    theirs = cv2.imdecode(content, cv2.IMREAD_COLOR)[..., ::-1].astype(np.float32) / 255
    theirs = torch.from_numpy(theirs).permute(2, 0, 1)[None]
    assert (ours - theirs).abs().mean() < 0.5 * (img - theirs).abs().mean()


# quality


def test_a_tensor_of_qualities_is_left_as_it_is():
    quality = torch.tensor([30.0, 80.0])
    img = waves(2, 3, 16, 16)
    before = img.clone()
    DiffJPEG()(img, quality)
    assert quality.tolist() == [30, 80] and torch.equal(img, before)


def test_each_image_has_its_own_quality():
    img, jpeg = photo(), DiffJPEG(differentiable=False)
    both = jpeg(torch.cat([img, img]), torch.tensor([10, 90]))
    torch.testing.assert_close(both, torch.cat([jpeg(img, 10), jpeg(img, 90)]))


def test_tensors_and_numbers_give_the_same_factor():
    qualities = [1, 10, 49, 50, 51, 75, 100]
    factors = [quality_to_factor(quality) for quality in qualities]
    assert factors == pytest.approx([50, 5, 50 / 49, 1, 0.98, 0.5, 0])
    assert quality_to_factor(torch.tensor(qualities)).tolist() == pytest.approx(factors, abs=1e-6)


@pytest.mark.parametrize('differentiable', [True, False])
@pytest.mark.parametrize('quality', [1, 100, torch.tensor([1.0, 100.0])])
def test_the_lowest_and_the_highest_quality_give_finite_images_and_gradients(
    differentiable, quality
):
    img = photo().repeat(2, 1, 1, 1).requires_grad_()
    out = DiffJPEG(differentiable)(img, quality)
    out.sum().backward()
    assert out.isfinite().all() and img.grad.isfinite().all()


def test_quality_100_changes_nothing_but_the_resolution_of_the_colours():
    gray = photo().mean(1, keepdim=True)
    for differentiable in (True, False):
        out = DiffJPEG(differentiable)(gray.repeat(1, 3, 1, 1), 100)
        torch.testing.assert_close(out, gray.repeat(1, 3, 1, 1), rtol=0, atol=1e-3)


def test_a_higher_quality_is_nearer_to_the_image():
    img, jpeg = photo(), DiffJPEG(differentiable=False)
    errors = [(jpeg(img, quality) - img).abs().mean().item() for quality in (1, 10, 50, 90, 100)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize('quality', [0, -5, 101])
def test_a_quality_that_does_not_exist_is_an_error(quality):
    with pytest.raises(ValueError, match=f'quality is {quality}'):
        DiffJPEG()(photo(), quality)


# images


def test_gray_images_are_compressed_as_gray_colour_images_are():
    gray, jpeg = photo(29, 43)[:, :1], DiffJPEG(differentiable=False)
    out = jpeg(gray, 40)
    assert out.shape == gray.shape
    torch.testing.assert_close(out.repeat(1, 3, 1, 1), jpeg(gray.repeat(1, 3, 1, 1), 40))


def test_two_channels_are_an_error():
    with pytest.raises(ValueError, match='1 or 3 channels'):
        DiffJPEG()(torch.rand(1, 2, 16, 16), 50)


@pytest.mark.parametrize('size', [(1, 1), (15, 17), (33, 16)])
def test_any_size_can_be_compressed(size):
    assert DiffJPEG()(torch.rand(1, 3, *size), 75).shape == (1, 3, *size)


def test_doubles_are_computed_as_doubles_and_halves_in_single_precision():
    img, jpeg = photo(), DiffJPEG()
    exact = jpeg(img.double(), 50)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(jpeg(img, 50).double(), exact, rtol=0, atol=1e-4)
    for dtype in (torch.float16, torch.bfloat16):
        out = jpeg(img.to(dtype), 50)
        assert out.dtype == dtype
        torch.testing.assert_close(out, jpeg(img.to(dtype).float(), 50).to(dtype))


def test_autocast_does_not_reach_the_transform():
    img, jpeg = photo(), DiffJPEG(differentiable=False)
    with torch.autocast('cpu', torch.bfloat16):
        out = jpeg(img, 90)
    assert torch.equal(out, jpeg(img, 90))


# gradients


def test_gradients_are_right_with_soft_rounding():
    img = (0.2 + 0.6 * torch.rand(1, 3, 16, 16, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: DiffJPEG()(x, 75), img, fast_mode=True)


def test_only_soft_rounding_lets_gradients_pass():
    x = torch.tensor([0.2, 1.6, -2.4], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(diff_round(x).detach(), x.new_tensor([0.008, 1.936, -2.064]))
    assert torch.autograd.gradcheck(diff_round, x)
    for differentiable, flows in ((True, True), (False, False)):
        img = photo().requires_grad_()
        DiffJPEG(differentiable)(img, 50).square().sum().backward()
        assert bool(img.grad.abs().sum() > 0) is flows


# the module


def test_there_is_nothing_to_train_and_nothing_to_store():
    jpeg = DiffJPEG()
    assert list(jpeg.parameters()) == [] and jpeg.state_dict() == {}


def test_instances_share_nothing():
    first, second = DiffJPEG(), DiffJPEG()
    first.double()
    for buffer in first.buffers():
        buffer.zero_()
    assert {buffer.dtype for buffer in second.buffers()} == {torch.float32}
    assert second(photo(), 50).std() > 0.1
    assert y_table.dtype == c_table.dtype == torch.float32 and y_table.min() == 10


def test_all_constants_move_with_the_module():
    assert {buffer.device.type for buffer in DiffJPEG().to('meta').buffers()} == {'meta'}


def test_luma_has_the_step_12_sideways_and_11_downwards_as_in_upstream():
    assert (y_table[0, 1], y_table[1, 0]) == (12, 11)
    assert torch.equal(c_table, c_table.T) and c_table[7, 7] == 99


# its steps


def test_the_steps_before_quantisation_are_undone_by_those_after_it():
    img = photo(32, 48) * 255
    ycbcr = RGB2YCbCrJpeg()(img)
    assert ycbcr.shape == (1, 32, 48, 3)
    torch.testing.assert_close(YCbCr2RGBJpeg()(ycbcr), img, rtol=0, atol=2e-3)
    y, cb, cr = ChromaSubsampling()(ycbcr)
    assert (y.shape, cb.shape, cr.shape) == ((1, 32, 48), (1, 16, 24), (1, 16, 24))
    blocks = BlockSplitting()(y)
    assert blocks.shape == (1, 24, 8, 8) and torch.equal(blocks[0, 1], y[0, :8, 8:16])
    torch.testing.assert_close(iDCT8x8()(DCT8x8()(blocks)), blocks, rtol=0, atol=1e-3)
    assert torch.equal(BlockMerging()(blocks, 32, 48), y)
    full = ChromaUpsampling()(y, cb, cr)
    assert torch.equal(full[..., 0], y) and torch.equal(full[:, ::2, 1::2, 1], cb)


def test_the_transform_is_that_of_opencv():
    block = torch.rand(1, 1, 8, 8) * 255
    expected = cv2.dct(block[0, 0].numpy() - 128)
    np.testing.assert_allclose(DCT8x8()(block)[0, 0].numpy(), expected, atol=1e-3)


def test_gray_has_no_chroma_coefficients():
    _, cb, cr = CompressJpeg()(torch.full((1, 3, 16, 16), 0.4))
    assert not cb.any() and not cr.any()


@pytest.mark.slow
def test_a_compiled_one_gives_the_same_values_for_any_size_and_number_of_images():
    """As one graph, which is traced again for no size: the numbers are a backend's affair."""
    plain, compiled = DiffJPEG(differentiable=False), DiffJPEG(differentiable=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled.compile(backend=backend, fullgraph=True)
    for count, height, width in ((4, 64, 48), (3, 37, 53), (2, 128, 32)):
        images = waves(count, 3, height, width).float()
        quality = torch.linspace(30, 90, count)
        assert torch.equal(compiled(images, quality), plain(images, quality))
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_a_compiled_one_is_close_on_a_gpu():
    plain, compiled = (DiffJPEG(differentiable=False).cuda() for _ in range(2))
    compiled.compile()
    for size in (64, 100):
        images, quality = waves(4, 3, size, size).float().cuda(), torch.full((4,), 60.0)
        difference = (compiled(images, quality) - plain(images, quality)).abs()
        # A coefficient that lies between two steps may be rounded to the other one.
        assert difference.mean() < 1e-3
