"""Regression on images that are degraded as they are needed."""

import cv2
import numpy as np
import pytest
import torch
from blind import DEGRADATION, blind, recipe_rows
from golden import recipe as inputs
from runs import checkpoint, differences, log_text, rows

from basicsr.data.recipes import draw_recipe
from basicsr.models import build_model
from basicsr.models.realesrnet_model import TrainingPairPool
from basicsr.models.sr_model import SRModel


@pytest.fixture
def model(train_opt):
    """A small RealESRNetModel without a run around it."""

    def make(**overrides):
        opt = blind(train_opt())
        opt['datasets']['train'].update(overrides.pop('train_set', {}))
        opt |= overrides
        return build_model(opt | {'dist': False, 'is_train': True})

    return make


def batch(count=2, size=24, channels=3):
    """A batch as upstream's dataset gives it."""
    images = [inputs.det_image(f'gt/{i}', size, size, channels) for i in range(count)]
    kernel = torch.zeros(count, 21, 21)
    kernel[:, 10, 10] = 1
    return {
        'gt': torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255,
        'kernel1': kernel,
        'kernel2': kernel,
        'sinc_kernel': kernel,
        'gt_path': [f'{i}.png' for i in range(count)],
    }


def final_state(folder):
    """All that a run of six iterations ends with."""
    return [checkpoint(folder, name) for name in ('net_g_latest.pth', '6.state')] + rows(folder)


class Interrupted(BaseException):
    pass


def interrupt_after(monkeypatch, iteration):
    step = SRModel.optimize_parameters

    def dying_step(self, current_iter):
        step(self, current_iter)
        if current_iter == iteration:
            raise Interrupted

    monkeypatch.setattr(SRModel, 'optimize_parameters', dying_step)


# options


def test_whether_the_target_is_sharpened_has_to_be_said(model, train_opt):
    with pytest.raises(ValueError, match='gt_usm: required by RealESRNetModel'):
        model(gt_usm=None)
    opt = blind(train_opt()) | {'dist': False, 'is_train': True}
    del opt['gt_usm']
    with pytest.raises(ValueError, match='gt_usm: required by RealESRNetModel'):
        build_model(opt)


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        ({'gt_size': 32}, r'gt_size is 32, but datasets\.train\.gt_size 16'),
        (
            {'share_degradation': True, 'train_set': {'degrade_on': 'worker'}},
            'share_degradation needs whole batches',
        ),
        (
            {'queue_size': 'many'},
            "queue_size must be a number of pairs, or 0 for no pool, got 'many'",
        ),
        ({'queue_size': -1}, 'queue_size must be a number of pairs'),
        ({'gt_usm': 'yes'}, "gt_usm must be true or false, got 'yes'"),
        ({'log_recipes': 'no'}, "log_recipes must be true or false, got 'no'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(model, overrides, message):
    with pytest.raises(ValueError, match=message):
        model(**overrides)


@pytest.mark.parametrize('name', ['jpeg_range2', 'scale', 'gt_size'])
def test_an_option_of_the_degradation_that_lacks_is_named_at_the_start(train_opt, name):
    opt = blind(train_opt()) | {'dist': False, 'is_train': True}
    for section in (opt, opt['datasets']['train']):
        section.pop(name, None)
    with pytest.raises(ValueError, match=rf"RealESRNetModel needs the option '{name}'"):
        build_model(opt)


# batches


@pytest.mark.parametrize('gt_usm', [True, False])
def test_the_target_is_sharpened_if_the_option_says_so(model, gt_usm):
    net, data = model(gt_usm=gt_usm, gt_size=24, train_set={'gt_size': 24}), batch()
    net.feed_data(data)
    expected = net.usm_sharpener(data['gt']) if gt_usm else data['gt']
    assert torch.equal(net.gt, expected)
    assert not torch.equal(net.usm_sharpener(data['gt']), data['gt'])
    assert net.lq.shape == (2, 3, 12, 12) and net.target('pix') is net.gt


def test_batches_of_a_dataset_without_recipes_are_degraded_too(model):
    """By what the random numbers of the iteration give."""
    from basicsr.utils.rng import seed_all

    net, found = model(), []
    for iteration in (1, 1, 2):
        seed_all(7, 0, iteration)
        net.feed_data(batch())
        found.append(net.lq)
    assert net.gt.shape == (2, 3, 16, 16)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_images_smaller_than_the_patches_are_refused_with_both_sizes(model):
    net = model(train_set={'gt_size': 32})
    with pytest.raises(ValueError, match='gt_size 32 is larger than the GT, 24x24'):
        net.feed_data(batch())


def test_batches_with_lq_are_taken_as_they_are(model):
    net = model(queue_size=2)
    pair = {'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)}
    net.feed_data(pair)
    assert net.lq is pair['lq'] and net.gt is pair['gt'] and net.pool.lq is None
    net.feed_data({'lq': pair['lq']})
    assert not hasattr(net, 'gt')


def test_pairs_are_needed_without_the_degradation(model):
    with pytest.raises(ValueError, match='use RealESRGANPairedDataset'):
        model(high_order_degradation=False).feed_data(batch())


# the pool


def numbered(first, count):
    gt = torch.arange(first, first + count).float().view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    return gt[..., :2, :2] + 0.5, gt


def numbers(tensor):
    return tensor[:, 0, 0, 0].int().tolist()


@pytest.mark.parametrize(
    ('size', 'batches', 'held'),
    [
        (12, [4] * 8, 12),
        (10, [4] * 8, 8),
        (5, [2] * 8, 4),
        (2, [4] * 5, 4),
        (8, [4, 4, 4, 3, 4, 1, 4], 8),
        (4, [2, 3, 3], 2),
        (1, [1, 1, 1], 1),
    ],
)
def test_outputs_and_content_of_a_pool_are_its_inputs(size, batches, held):
    """Every pair comes out once or is still in it, and LQ and GT stay together."""
    pool, given, returned, first = TrainingPairPool(size), [], [], 0
    for count in batches:
        lq, gt = numbered(first, count)
        before = [] if pool.gt is None else numbers(pool.gt)
        out = pool.exchange(lq, gt)
        assert len(out[0]) == len(out[1]) == count
        assert numbers(out[0]) == numbers(out[1])
        assert numbers(pool.lq) == numbers(pool.gt)
        if len(before) + count > size and before:
            arrived, left = numbers(gt), numbers(out[1]) + numbers(pool.gt)
            assert sorted(left) == sorted(before + arrived)
            returned += numbers(out[1])
        else:  # it is being filled
            assert numbers(out[1]) == numbers(gt)
        given += numbers(gt)
        first += count
    assert len(pool.gt) == held
    assert len(set(returned)) == len(returned)


def test_a_full_pool_mixes_batches():
    pool, mixed = TrainingPairPool(12), 0
    for first in range(0, 400, 4):
        out = numbers(pool.exchange(*numbered(first, 4))[1])
        mixed += max(out) - min(out) > 3
    assert mixed > 80


def test_a_pool_is_saved_as_bytes_where_that_is_exact_and_comes_back_with_its_bits():
    levels = torch.arange(256).float().view(2, 2, 8, 8) / 255
    pool = TrainingPairPool(2)
    pool.exchange(levels, levels.sqrt())
    state = pool.state_dict()
    assert (state['lq'].dtype, state['gt'].dtype) == (torch.uint8, torch.float32)
    other = TrainingPairPool(2)
    assert other.load_state_dict(state, gt_size=8)
    assert torch.equal(other.lq, levels) and torch.equal(other.gt, levels.sqrt())
    assert not TrainingPairPool(1).load_state_dict(state, gt_size=8), 'it holds less'
    assert not TrainingPairPool(2).load_state_dict(state, gt_size=16), 'other patches'


def test_trying_a_batch_leaves_pool_and_recipes_alone(model):
    net = model(queue_size=4, log_recipes=True)
    from basicsr.run.data_checks import try_batch

    try_batch(net, batch())
    assert net.pool.lq is None and net.log_recipes
    assert not hasattr(net, 'lq')


def test_what_a_pool_holds_is_not_changed_from_outside():
    pool, (lq, gt) = TrainingPairPool(4), numbered(0, 2)
    lq, gt = lq.clone(), gt.clone()
    pool.exchange(lq, gt)
    lq.zero_(), gt.zero_()
    assert numbers(pool.gt) == [0, 1] and pool.lq[1, 0, 0, 0] == 1.5


@pytest.mark.parametrize(
    ('options', 'size'),
    [
        ({}, None),
        ({'queue_size': 6}, 6),
        ({'share_degradation': True}, 180),
        ({'share_degradation': True, 'queue_size': 7}, 6),
        ({'share_degradation': True, 'queue_size': 0}, None),
    ],
)
def test_a_pool_is_made_for_shared_degradations_or_on_request(model, options, size, caplog):
    caplog.set_level('INFO')
    net = model(**options)
    assert (net.pool is None) == (size is None)
    assert (f'Pool of {size} training pairs' in caplog.text) == (size is not None)


# runs


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'degrade_on': 'worker'},
        {'degrade_on': 'worker', 'queue_size': 5},
        {'share_degradation': True, 'queue_size': 5},
    ],
)
def test_a_run_interrupted_after_an_iteration_resumes_bit_for_bit(
    run, train_opt, monkeypatch, options
):
    def make(name):
        opt = blind(train_opt(name=name)) | {'log_recipes': True} | options
        if where := opt.pop('degrade_on', None):
            opt['datasets']['train']['degrade_on'] = where
        return opt

    whole = run(make('whole'))
    state = checkpoint(whole, '6.state')
    assert [len(pool['lq']) for pool in state.get('pools', [])] == [4] * ('queue_size' in options)
    cut = make('cut')
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(patch, 5)
        run(cut)
    resumed = run(cut, '--auto_resume')
    assert differences(final_state(whole), final_state(resumed)) == []
    # The steps that were lost with the process are made, and logged, again.
    again = {row['sample']: row for row in recipe_rows(resumed)}
    assert again == {row['sample']: row for row in recipe_rows(whole)}


def test_where_and_by_how_many_images_are_degraded_changes_nothing(run, train_opt):
    def final(name, workers, **options):
        opt = blind(train_opt(name=name)) | {'log_recipes': True}
        opt['datasets']['train'].update(options, num_worker_per_gpu=workers)
        folder = run(opt)
        return [*final_state(folder), recipe_rows(folder)]

    device = final('device', 0)
    for name, workers, options in (
        ('device2', 2, {}),
        ('worker', 0, {'degrade_on': 'worker'}),
        ('worker2', 2, {'degrade_on': 'worker'}),
        ('bytes', 0, {'uint8_batch': True}),
        ('cached', 0, {'cache': 'off'}),
    ):
        assert differences(device, final(name, workers, **options)) == []


def test_every_recipe_is_logged_and_can_be_followed_again(run, train_opt):
    opt = blind(train_opt()) | {'log_recipes': True}
    logged = recipe_rows(run(opt))
    assert [row['sample'] for row in logged] == list(range(12))
    assert len({row['seed'] for row in logged}) == 12
    for row in logged:
        recipe = draw_recipe(opt, row['seed'])
        assert {name: row[name] for name in recipe} == recipe
        assert row.keys() - recipe == {'sample', 'gt_path', 'kernel1', 'kernel2', 'sinc_kernel'}
        assert row['gt_path'].startswith(opt['datasets']['train']['dataroot_gt'])
    assert len({row['resize_factor'] for row in logged}) > 6


def test_samples_of_a_batch_share_what_upstream_shares_if_asked_to(run, train_opt):
    opt = blind(train_opt(train__total_iter=8))
    opt |= {'share_degradation': True, 'queue_size': 4, 'log_recipes': True}
    shared = {'second_blur', 'final_resize_mode', 'jpeg_last'}
    shared |= {f'{n}{s}' for n in ('resize_factor', 'resize_mode', 'noise') for s in ('', '2')}
    logged = recipe_rows(run(opt))
    assert len(logged) == 16
    for first, second in zip(logged[::2], logged[1::2], strict=True):
        assert all(first[name] == second[name] for name in shared)
        assert first['noise_level'] != second['noise_level']
        own = draw_recipe(opt, first['seed'])
        assert {name: first[name] for name in own} == own
    assert len({row['resize_factor'] for row in logged}) > 4


def test_a_pool_that_is_not_in_the_state_begins_empty_and_that_is_said(run, train_opt):
    run(blind(train_opt(train__total_iter=2)))
    opt = blind(train_opt()) | {'queue_size': 4}
    text = log_text(run(opt, '--auto_resume'))
    assert 'The pool of training pairs starts empty' in text


def test_pairs_are_trained_on_without_options_of_a_degradation(run, train_opt):
    opt = train_opt(model_type='RealESRNetModel', high_order_degradation=False)
    opt['datasets']['train']['type'] = 'RealESRGANPairedDataset'
    paired, plain = run(opt), run(train_opt(name='plain'))
    same = [checkpoint(folder, 'net_g_latest.pth') for folder in (paired, plain)]
    assert differences(*same) == []


def test_images_to_degrade_are_refused_without_the_degradation(run, train_opt):
    opt = blind(train_opt()) | {'high_order_degradation': False}
    with pytest.raises(ValueError, match='use RealESRGANPairedDataset'):
        run(opt)


def test_gray_images_are_degraded_trained_and_saved_with_one_channel(run, train_opt, image_pairs):
    gt, lq = image_pairs('gray', 4, (24, 28), channels=1)
    opt = blind(train_opt(train__total_iter=3, val__save_img=True))
    opt['network_g'].update(num_in_ch=1, num_out_ch=1)
    opt['datasets']['train'].update(dataroot_gt=gt, color='gray')
    opt['datasets']['val'].update(dataroot_gt=gt, dataroot_lq=lq, color='gray')
    folder = run(opt)
    saved = cv2.imread(str(folder / 'visualization/0000/0000_3.png'), cv2.IMREAD_UNCHANGED)
    assert saved.shape == (24, 28)


def test_images_smaller_than_the_patches_are_trained_on(run, train_opt, image_pairs):
    gt, _ = image_pairs('small', 3, (10, 40))
    opt = blind(train_opt(train__total_iter=2))
    opt['datasets']['train']['dataroot_gt'] = gt
    assert np.isfinite(rows(run(opt))[0]['losses/l_pix'])


def test_a_test_run_needs_no_options_of_the_degradation(run, train_opt):
    opt = blind(train_opt(train__total_iter=1))
    folder = run(opt)
    test_opt = {key: opt[key] for key in ('name', 'model_type', 'scale', 'num_gpu', 'network_g')}
    test_opt |= {
        'datasets': {'val': opt['datasets']['val']},
        'path': {'pretrain_network_g': str(folder / 'models/net_g_latest.pth')},
        'val': opt['val'],
    }
    assert (run(test_opt, pipeline='test') / 'results.json').is_file()


# the user's own


OWN_DATASET = """
import torch
from torch.utils.data import Dataset
from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class RealESRGANDataset(Dataset):
    def __init__(self, opt):
        self.opt = opt

    def __getitem__(self, index):
        kernel = torch.zeros(21, 21)
        kernel[10, 10] = 1
        kernels = {name: kernel for name in ('kernel1', 'kernel2', 'sinc_kernel')}
        return {'gt': torch.rand(3, 24, 24), 'gt_path': f'own/{index}', **kernels}

    def __len__(self):
        return 5
"""

OWN_MODEL = """
from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class RealESRNetModel(SRModel):
    def feed_data(self, data):
        if 'lq' not in data:
            data = {'lq': data['gt'][..., :8, :8], 'gt': data['gt'][..., :16, :16]}
        super().feed_data(data)

    def update_averages(self, current_iter):
        self.log_dict['l_own'] = 1.0
        super().update_averages(current_iter)
"""


def test_a_dataset_of_the_users_with_our_name_wins_and_trains(run, train_opt, tmp_path):
    (tmp_path / 'own_dataset.py').write_text(OWN_DATASET)
    opt = blind(train_opt(plugins=['.'])) | {'log_recipes': True}
    logged = recipe_rows(run(opt))
    assert len(logged) == 12
    assert {row['gt_path'] for row in logged} == {f'own/{i}' for i in range(5)}
    from basicsr.utils.registry import DATASET_REGISTRY

    assert DATASET_REGISTRY.get('RealESRGANDataset').__module__ == 'own_dataset'
    ours = DATASET_REGISTRY.get('RealESRGANDataset_basicsr')
    assert ours.__module__ == 'basicsr.data.realesrgan_dataset'


def test_a_model_of_the_users_with_our_name_wins_and_trains(run, train_opt, tmp_path):
    (tmp_path / 'own_model.py').write_text(OWN_MODEL)
    row = rows(run(blind(train_opt(plugins=['.']))))[0]
    assert row['losses/l_own'] == 1
    from basicsr.utils.registry import MODEL_REGISTRY

    assert MODEL_REGISTRY.get('RealESRNetModel').__module__ == 'own_model'
    assert MODEL_REGISTRY.get('RealESRNetModel_basicsr').__name__ == 'RealESRNetModel'


@pytest.mark.parametrize('degrade_on', ['device', 'worker'])
def test_options_of_the_degradation_may_stand_in_the_training_set(run, train_opt, degrade_on):
    """As well as at top level."""
    above, below = blind(train_opt(name='above')), blind(train_opt(name='below'))
    for name in DEGRADATION:
        below['datasets']['train'][name] = below.pop(name)
    for opt in (above, below):
        opt['datasets']['train']['degrade_on'] = degrade_on
    assert differences(final_state(run(above)), final_state(run(below))) == []


def test_recipes_of_all_ranks_that_there_were_are_cut_when_a_run_goes_on(model, tmp_path):
    """Also of a rank that the resumed run has no more."""
    folders = {name: str(tmp_path / name) for name in ('models', 'training_states')}
    net = model(path={'experiments_root': str(tmp_path), **folders})
    for rank, samples in ((0, (0, 2, 4)), (1, (1, 3, 5))):
        lines = (f'{{"sample": {sample}}}\n' for sample in samples)
        (tmp_path / f'recipes_{rank}.jsonl').write_text(''.join([*lines, '{"sam']))
    net.samples_seen = 3
    net.drop_later_files(1)
    assert [row['sample'] for rank in (0, 1) for row in recipe_rows(tmp_path, rank)] == [0, 2, 1]
