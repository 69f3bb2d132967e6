import itertools
import random

import numpy as np
import pytest
import torch
from golden import call, params, recipe

from basicsr.data.transforms import (
    augment,
    mod_crop,
    normalize,
    paired_random_crop,
    turn,
    turned_planes,
)


def upstream_image(height, width):
    """The image on which upstream's numbers below were taken."""
    y, x, c = np.ogrid[:height, :width, :3]
    return np.uint8((7 * y + 3 * x + 41 * c + (x * y) % 17 * 5) % 256)


def summary(img):
    flat = img.ravel().astype(float)
    samples = flat[[j * (flat.size - 1) // 6 for j in range(7)]]
    return [flat.sum(), round(float((flat**2).mean()), 8), *samples]


@pytest.mark.parametrize('case', params('data', lambda c: 'transforms' in c.get('target', '')))
def test_transform_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


# cropping


def test_a_crop_of_a_pair_shows_the_same_place():
    gt = np.arange(40 * 48).reshape(40, 48)
    lq = gt[::4, ::4]
    for _ in range(20):
        gt_crop, lq_crop = paired_random_crop(gt, lq, 16, 4)
        assert gt_crop.shape == (16, 16)
        assert np.array_equal(gt_crop[::4, ::4], lq_crop)


def test_every_place_is_cropped_and_none_outside():
    img = np.arange(5 * 4).reshape(5, 4)
    corners = {int(paired_random_crop(img, img, 3, 1)[0][0, 0]) for _ in range(200)}
    assert corners == {0, 1, 4, 5, 8, 9}


def test_lists_and_single_images_come_back_as_they_were_given():
    gt, lq = np.zeros((8, 8, 3)), np.zeros((4, 4, 3))
    gts, lqs = paired_random_crop([gt, gt], [lq, lq, lq], 4, 2)
    assert (len(gts), len(lqs)) == (2, 3)
    gts, lq_crop = paired_random_crop([gt, gt], lq, 4, 2)
    assert (len(gts), lq_crop.shape) == (2, (2, 2, 3))


def test_tensors_are_cropped_in_their_last_two_dimensions():
    gt = torch.arange(2 * 1 * 12 * 16).view(2, 1, 12, 16)
    gt_crop, lq_crop = paired_random_crop(gt, gt[..., ::2, ::2], 8, 2)
    assert gt_crop.shape == (2, 1, 8, 8)
    assert torch.equal(gt_crop[..., ::2, ::2], lq_crop)


def test_an_image_of_exactly_the_patch_size_is_cropped_to_itself():
    gt, lq = np.ones((128, 128, 3)), np.ones((32, 32, 3))
    gt_crop, lq_crop = paired_random_crop(gt, lq, 128, 4)
    assert gt_crop.shape == gt.shape and lq_crop.shape == lq.shape


def test_sizes_that_do_not_fit_are_refused_with_both_sizes_and_the_path():
    def crop(gt_size, lq_size, patch):
        paired_random_crop(np.zeros(gt_size), np.zeros(lq_size), patch, 4, 'photos/a.png')

    with pytest.raises(ValueError, match=r'97x96 .* 4 times LQ 24x24: photos/a\.png'):
        crop((97, 96), (24, 24), 32)
    with pytest.raises(ValueError, match=r'40x40 .* gt_size 128.*10x10 .* 32: photos/a\.png'):
        crop((40, 40), (10, 10), 128)
    with pytest.raises(ValueError, match=r'128x124'):
        crop((128, 124), (32, 31), 128)


def test_mod_crop_gives_a_copy_and_refuses_what_is_no_image():
    img = np.zeros((7, 9, 3))
    cropped = mod_crop(img, 4)
    cropped += 1
    assert cropped.shape == (4, 8, 3) and not img.any()
    with pytest.raises(ValueError, match=r'\(2, 2, 2, 2\)'):
        mod_crop(np.zeros((2, 2, 2, 2)), 2)


# flips and rotations


def test_upstream_draws_the_same_crop_and_the_same_turn():
    gt, lq = upstream_image(64, 64), upstream_image(16, 16)
    random.seed(11)
    gt, lq = paired_random_crop(gt, lq, 32, 4)
    assert summary(gt) == [384875, 21519.76009115, 96, 187, 209, 90, 3, 55, 227]
    assert summary(lq) == [32055, 31734.24479167, 98, 187, 177, 11, 160, 210, 255]
    (turned, _), status = augment([gt, lq], return_status=True)
    assert status == (False, False, True)
    assert summary(turned) == [384875, 21519.76009115, 96, 222, 218, 134, 250, 20, 227]


def test_all_eight_orientations_occur_and_the_caller_keeps_his_array():
    img = np.arange(6).reshape(2, 3)
    before = img.copy()
    turned = [augment(img) for _ in range(300)]
    assert len({(result.shape, result.tobytes()) for result in turned}) == 8
    assert np.array_equal(img, before)


@pytest.mark.parametrize('shape', [(4, 6), (4, 6, 1), (4, 6, 3), (4, 6, 4)])
def test_images_of_any_channels_and_transposed_views_are_turned(shape):
    img = np.arange(np.prod(shape)).reshape(shape)
    views = [img, img.swapaxes(0, 1), img[::-1, ::-1]]
    for view in views:
        before = view.copy()
        turned, (hflip, vflip, rot90) = augment(view, return_status=True)
        wanted = view[:, ::-1] if hflip else view
        wanted = wanted[::-1] if vflip else wanted
        assert np.array_equal(turned, wanted.swapaxes(0, 1) if rot90 else wanted)
        assert turned.flags.c_contiguous
        assert np.array_equal(view, before)


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('planar', [False, True])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('size', [(9, 14), (70, 80)])
def test_planes_are_turned_as_the_image_is(channels, planar, dtype, size):
    """Whether it lies in memory pixel by pixel or plane by plane, and is read-only."""
    img = np.random.default_rng(0).integers(0, 256, (*size, channels)).astype(dtype)
    if planar:
        img = np.ascontiguousarray(img.transpose(2, 0, 1)).transpose(1, 2, 0)
    img.flags.writeable = False
    view = img[1:-1, 2:-1]
    for orientation in itertools.product([False, True], repeat=3):
        expected = turn(view, orientation).transpose(2, 0, 1)[::-1]
        planes = turned_planes(view, orientation)
        assert np.array_equal(planes, expected) and planes.flags.c_contiguous
    assert np.array_equal(turned_planes(view), view.transpose(2, 0, 1)[::-1])


def test_disabled_turns_are_not_drawn():
    img = np.arange(6).reshape(2, 3)
    statuses = {augment(img, hflip=False, return_status=True)[1] for _ in range(50)}
    assert len(statuses) == 4 and not any(hflip for hflip, _, _ in statuses)
    random.seed(0)
    state = random.getstate()
    assert augment(img, hflip=False, rotation=False, return_status=True)[1] == (False,) * 3
    assert random.getstate() == state


def test_flow_still_leads_to_the_same_pixel_after_a_turn():
    """A pixel and the one its flow points to stay a pair."""
    index = np.arange(30).reshape(5, 6)
    y, x = np.mgrid[:5, :6]
    target = np.random.default_rng(0).permutation(30).reshape(5, 6)
    flow = np.stack([target % 6 - x, target // 6 - y], axis=-1).astype(np.float32)
    for _ in range(20):
        turned, turned_flow = augment(index, flows=flow)
        y, x = np.mgrid[: turned.shape[0], : turned.shape[1]]
        dx, dy = turned_flow[..., 0].astype(int), turned_flow[..., 1].astype(int)
        assert np.array_equal(turned[y + dy, x + dx], target.ravel()[turned])


def test_several_flows_and_the_status_come_back_in_order():
    img, flow = np.zeros((2, 3)), np.zeros((2, 3, 2))
    imgs, flows, status = augment([img, img], flows=[flow, flow, flow], return_status=True)
    assert (len(imgs), len(flows), len(status)) == (2, 3, 3)


def test_normalisation_is_per_channel():
    img = torch.ones(2, 3, 4, 4)
    out = normalize(img, [0.5, 0, 1], [0.5, 2, 1])
    assert out[1, :, 2, 3].tolist() == [1, 0.5, 0]
    assert img.eq(1).all()
