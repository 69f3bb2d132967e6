import numpy as np
import pytest
import torch
from golden import params, recipe

from basicsr.data import build_dataset

RNG = np.random.default_rng(0)


def image(height=6, width=8):
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def build(**options):
    return build_dataset({'type': 'SingleImageDataset', 'dataroot_lq': 'lq', **options})


@pytest.mark.parametrize(
    'case',
    params('data', lambda c: c.get('opt', {}).get('type') == 'SingleImageDataset'),
)
def test_items_equal_the_reference(case, dataset_output):
    assert recipe.compare(case, dataset_output(case)) is None


def test_luma_is_made_of_blue_green_red_images(in_folder):
    """The weights of red and blue were exchanged."""
    blue = np.zeros((2, 2, 3), np.uint8)
    blue[..., 0] = 255
    in_folder({'lq/blue.png': blue})
    assert build(color='y')[0]['lq'].unique().item() == pytest.approx(0.16065, abs=1e-5)
    assert build()[0]['lq'][:, 0, 0].tolist() == [0, 0, 1]
    assert build(color='gray')[0]['lq'].shape == (1, 2, 2)


def test_images_come_in_order_from_nested_folders_and_lists(in_folder):
    in_folder({f'{name}.png': image() for name in ('lq/b', 'lq/a', 'lq/sub/a', 'more/z')})
    paths = [item['lq_path'] for item in build(dataroot_lq=['more', 'lq'], recursive=True)]
    assert paths == ['more/z.png', 'lq/a.png', 'lq/b.png', 'lq/sub/a.png']
    assert list(build().paths) == ['lq/a.png', 'lq/b.png']


def test_a_list_names_the_images_and_the_options_stay_as_they_are(in_folder):
    in_folder(
        {'lq/a.png': image(), 'lq/sub/b.png': image(), 'lq/c.png': image()},
        {'list.txt': 'sub/b.png (6,8,3)\n\na.png\n'},
    )
    opt = {'dataroot_lq': 'lq', 'meta_info_file': 'list.txt', 'io_backend': {'type': 'disk'}}
    for _ in range(2):
        assert [item['lq_path'] for item in build(**opt)] == ['lq/sub/b.png', 'lq/a.png']
    assert opt['io_backend'] == {'type': 'disk'}


def test_items_are_normalised(in_folder):
    in_folder({'lq/a.png': image()})
    plain, scaled = build()[0]['lq'], build(mean=[0.5, 0, 0], std=[0.5, 1, 2])[0]['lq']
    assert torch.allclose(scaled[0], plain[0] * 2 - 1)
    assert torch.allclose(scaled[2], plain[2] / 2)


def test_a_folder_without_images_is_an_error_that_names_it(in_folder):
    in_folder({'lq/sub/a.png': image()})
    with pytest.raises(ValueError, match='no images in lq'):
        build()
    with pytest.raises(FileNotFoundError, match='no folder nowhere'):
        build(dataroot_lq='nowhere')
    with pytest.raises(ValueError, match='meta_info_file'):
        build(meta_info='list.txt')


def test_a_broken_image_is_named(in_folder, tmp_path):
    in_folder({'lq/a.png': image()})
    (tmp_path / 'lq/a.png').write_bytes((tmp_path / 'lq/a.png').read_bytes()[:70])
    with pytest.raises(ValueError, match=r'cannot read lq/a\.png'):
        build()[0]
