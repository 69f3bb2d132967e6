"""Crops and batches that change in stages, from the options to whole runs."""

import itertools
import re

import pytest
import torch
from blind import adversarial, blind
from runs import checkpoint, differences, log_text, rows
from torch.utils.data import IterableDataset

from basicsr.data import build_dataloader, build_dataset
from basicsr.data.data_sampler import BatchStream, EnlargedSampler
from basicsr.data.progressive import Schedule, crop_sizes
from basicsr.models.base_model import BaseModel
from basicsr.utils.registry import DATASET_REGISTRY

STAGES = [
    {'iters': 2, 'gt_size': 8, 'batch_size_per_gpu': 3},
    {'iters': 3, 'gt_size': [16, 12]},
    {'gt_size': 24, 'batch_size_per_gpu': 1},
]


def schedule(stages=STAGES, **options):
    return Schedule({'batch_size_per_gpu': 2, 'gt_size': 16, 'progressive': stages}, **options)


def first(count, batches):
    return list(itertools.islice(batches, count))


# which sizes when


def test_every_iteration_has_the_sizes_of_its_stage():
    sizes = first(8, schedule())
    assert [batch for batch, _ in sizes] == [3, 3, 2, 2, 2, 1, 1, 1]
    assert [size for _, size in sizes[:2] + sizes[5:]] == [8, 8, 24, 24, 24]
    assert {size for _, size in sizes[2:5]} <= {12, 16}


def test_what_a_stage_leaves_out_is_that_of_the_set():
    assert first(3, schedule([{'iters': 1}, {'batch_size_per_gpu': 5}])) == [
        (2, 16),
        (5, 16),
        (5, 16),
    ]


def test_samples_are_the_sum_of_the_batches():
    for gpus in (1, 3):
        plan = schedule(gpus=gpus)
        batches = [batch for batch, _ in first(9, plan)]
        assert [plan.samples(n) for n in range(10)] == [sum(batches[:n]) for n in range(10)]
    assert Schedule({'batch_size_per_gpu': 4}, gpus=2).samples(5) == 40


def test_the_size_of_a_batch_follows_from_seed_and_iteration():
    stages = [{'gt_size': [8, 16, 24]}]
    sizes = [size for _, size in first(3000, schedule(stages, seed=5))]
    later = [size for _, size in first(2000, schedule(stages, seed=5, start_iter=1000))]
    assert later == sizes[1000:]
    assert [size for _, size in first(3000, schedule(stages, seed=6))] != sizes
    assert all(900 < sizes.count(size) < 1100 for size in (8, 16, 24))


def test_crop_sizes_are_all_that_occur():
    assert crop_sizes({'batch_size_per_gpu': 1, 'gt_size': 99, 'progressive': STAGES}) == [
        *(8, 12, 16, 24)
    ]
    assert crop_sizes({'gt_size': 99}) == [99] and crop_sizes({}) == []


# which samples


def stream(start_iter=0, ranks=1, rank=0):
    plan = schedule(seed=3, gpus=1, start_iter=start_iter)
    sampler = EnlargedSampler(range(5), ranks, rank, seed=4)
    return BatchStream(sampler, 2, ranks, rank, ranks * plan.samples(start_iter), plan)


def test_samples_follow_each_other_without_gap_or_repeat_across_stages():
    batches = first(9, stream())
    assert [len(batch) for batch in batches] == [3, 3, 2, 2, 2, 1, 1, 1, 1]
    samples = [sample for batch in batches for sample in batch]
    assert [number for number, _, _ in samples] == list(range(16))
    plain = first(8, BatchStream(EnlargedSampler(range(5), 1, 0, seed=4), 2))
    assert [sample[:2] for sample in samples] == [pair for batch in plain for pair in batch]
    assert [batch[0][2] for batch in batches] == [size for _, size in first(9, schedule(seed=3))]


@pytest.mark.parametrize('start_iter', range(8))
def test_a_stream_started_in_any_stage_goes_on_as_if_never_stopped(start_iter):
    for ranks in (1, 2):
        for rank in range(ranks):
            later = first(4, stream(start_iter, ranks, rank))
            assert later == first(12, stream(0, ranks, rank))[start_iter : start_iter + 4]


def test_two_ranks_see_together_what_one_sees_with_twice_the_batch():
    def batches(ranks, rank, gpus):
        sampler = EnlargedSampler(range(6), ranks, rank, seed=4)
        return first(9, BatchStream(sampler, 2, ranks, rank, 0, schedule(seed=3, gpus=gpus)))

    ranks = zip(batches(2, 0, 1), batches(2, 1, 1), strict=True)
    assert [sorted(one + other) for one, other in ranks] == batches(1, 0, 2)


# crops


@pytest.fixture
def options(image_pairs):
    gt, lq = image_pairs(size=(32, 40))
    opt = {'type': 'PairedImageDataset', 'phase': 'train', 'scale': 2, 'gt_size': 16}
    opt |= {'dataroot_gt': gt, 'dataroot_lq': lq, 'batch_size_per_gpu': 2}
    return opt | {'progressive': STAGES}


def load(opt, count=7, start=0, **more):
    opt = opt | more
    return first(count, build_dataloader(build_dataset(opt), opt, 0, seed=3, start=start))


@pytest.mark.parametrize('workers', [1, 3])
def test_batches_have_their_sizes_and_do_not_depend_on_the_workers(options, workers):
    plain = load(options)
    plan = first(7, schedule(seed=3))
    assert [tuple(batch['gt'].shape) for batch in plain] == [(b, 3, s, s) for b, s in plan]
    assert [tuple(batch['lq'].shape) for batch in plain] == [
        (b, 3, s // 2, s // 2) for b, s in plan
    ]
    for mode in (None, 'cpu'):
        ours = load(options, num_worker_per_gpu=workers, prefetch_mode=mode)
        assert differences(plain, ours) == []


def test_parts_of_a_mixture_and_degraded_images_are_cropped_alike(options):
    folders = {key: options[key] for key in ('dataroot_gt', 'dataroot_lq')}
    part = {'type': 'PairedImageDataset', **folders}
    sizes = [size for _, size in first(7, schedule(seed=3))]
    mixed = load(options, type='ConcatDataset', parts=[part, dict(part)])
    assert [batch['gt'].shape[-1] for batch in mixed] == sizes

    opt = blind({'datasets': {'train': dict(options)}})
    for degrade_on in ('worker', 'device'):
        made = load(opt['datasets']['train'] | opt, degrade_on=degrade_on)
        if degrade_on == 'device':  # what is degraded is larger, and the model cuts the patches
            sizes = [-(-size * 25 // 32) * 2 for size in sizes]
        assert [batch['gt'].shape[-1] for batch in made] == sizes


class Uncut(torch.utils.data.Dataset):
    def __init__(self, opt):
        self.opt = opt

    def __len__(self):
        return 3


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


def test_datasets_without_a_crop_size_are_refused_and_named(options, monkeypatch):
    monkeypatch.setitem(DATASET_REGISTRY._obj_map, 'Uncut', Uncut)
    with pytest.raises(ValueError, match=r'progressive: Uncut has no crop size.*set_gt_size'):
        load(options, type='Uncut')
    with pytest.raises(ValueError, match='Uncut has no crop size'):
        load(options, type='ConcatDataset', parts=[{'type': 'Uncut'}])
    with pytest.raises(ValueError, match='Endless is an IterableDataset'):
        build_dataloader(Endless(), options, start=0)
    with pytest.raises(ValueError, match='follows the iterations of a run'):
        load(options, start=None)


def test_sizes_that_a_dataset_cannot_crop_to_are_refused_before_the_first_batch(options):
    with pytest.raises(ValueError, match='progressive: gt_size 15 is not a multiple of scale 2'):
        load(options, count=0, progressive=[{'gt_size': [16, 15]}])
    opt = blind({'datasets': {'train': options | {'crop_size': 20}}})
    with pytest.raises(ValueError, match='progressive: gt_size 24 and crop_size 20'):
        load(opt['datasets']['train'], count=0, degrade_on='device')
    with pytest.raises(ValueError, match=r'progressive\.1: gt_size is neither'):
        Schedule({'batch_size_per_gpu': 1, 'progressive': [{'gt_size': 8, 'iters': 1}, {}]})


def test_an_image_without_room_for_a_later_stage_is_named_when_it_is_first_seen(options):
    stages = [{'iters': 1000, 'gt_size': 8}, {'gt_size': 36}]
    with pytest.raises(ValueError, match=r'32x40.*smaller than gt_size 36 of .*progressive.*png'):
        load(options, count=1, progressive=stages)
    assert load(options, count=1, progressive=stages, pad_small=True)[0]['gt'].shape[-1] == 8
    assert load(options, count=1, progressive=stages[:1], gt_size=36)[0]['gt'].shape[-1] == 8


# runs


class Interrupted(BaseException):
    pass


def interrupted(run, opt, monkeypatch, iteration):
    """Let a run die between the iteration and the next one."""
    begin = BaseModel.update_learning_rate

    def dying_begin(self, current_iter, *args):
        if current_iter > iteration:
            raise Interrupted
        begin(self, current_iter, *args)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(BaseModel, 'update_learning_rate', dying_begin)
        run(opt)


def results(folder):
    return [checkpoint(folder, name) for name in ('net_g_latest.pth', '6.state')] + rows(folder)


def short(train_opt, name, **overrides):
    opt = train_opt(name=name, val=None, **overrides)
    del opt['datasets']['val']
    return opt


def test_one_stage_of_the_same_sizes_is_the_plain_run(run, train_opt):
    plain = results(run(short(train_opt, 'plain')))
    opt = short(train_opt, 'staged', datasets__train__progressive=[{'iters': 1}, {}])
    assert differences(plain, results(run(opt))) == []


@pytest.mark.parametrize('workers', [0, 2])
def test_a_run_interrupted_in_any_stage_resumes_bit_for_bit(run, train_opt, monkeypatch, workers):
    options = {
        'datasets__train__progressive': STAGES,
        'datasets__train__num_worker_per_gpu': workers,
        'logger__save_checkpoint_freq': 1,
    }
    folder = run(short(train_opt, 'whole', **options))
    whole = results(folder)
    assert whole[1]['samples'] == 3 + 3 + 2 + 2 + 2 + 1
    assert re.findall(r'\[epoch: +(\d)', log_text(folder)) == ['0', '0', '1', '1', '2', '2']
    for iteration in range(1, 6) if workers == 0 else (4,):
        opt = short(train_opt, f'cut{iteration}', **options)
        interrupted(run, opt, monkeypatch, iteration)
        assert differences(whole, results(run(opt, '--auto_resume'))) == []


def test_the_first_stage_is_that_of_a_run_without_others_and_then_it_differs(run, train_opt):
    size = {'datasets__train__gt_size': 8, 'datasets__train__batch_size_per_gpu': 3}
    plain = rows(run(short(train_opt, 'plain', **size)))
    staged = rows(run(short(train_opt, 'staged', datasets__train__progressive=STAGES)))
    losses = [[row['losses/l_pix'] for row in found] for found in (plain, staged)]
    assert [a == b for a, b in zip(*losses, strict=True)] == [True, True] + 4 * [False]


def test_the_log_tells_each_change_and_the_sizes_of_all_stages(run, train_opt, monkeypatch):
    opt = short(train_opt, 'told', datasets__train__progressive=STAGES)
    text = log_text(run(opt, '--force_yml', 'train:total_iter=4'))
    assert text.count('From iteration') == 2
    assert 'From iteration 1 on: crops of 8, 3 per GPU.' in text
    assert 'From iteration 3 on: crops of 16 or 12, 2 per GPU.' in text
    assert '2 of 3 stages begin, as the run ends after iteration 4.' in text
    resumed = log_text(run(opt, '--auto_resume'))
    assert 'stages begin' not in resumed
    assert 'From iteration 3 on: crops of 16 or 12' in resumed, 'the stage that it goes on in'
    assert 'From iteration 6 on: crops of 24, 1 per GPU.' in resumed
    assert 'From iteration' not in log_text(run(short(train_opt, 'plain')))


def test_a_state_that_counts_no_samples_is_taken_to_be_of_the_same_stages(run, train_opt):
    opt = short(train_opt, 'whole', datasets__train__progressive=STAGES)
    whole = results(run(opt))
    file = run(dict(opt, name='cut')) / 'training_states' / '4.state'
    state = torch.load(file, weights_only=True)
    assert state.pop('samples') == 3 + 3 + 2 + 2
    torch.save(state, file)
    resumed = dict(opt, name='cut', path={'resume_state': str(file)})
    assert differences(whole, results(run(resumed))) == []


def test_learning_rates_are_scaled_by_the_batch_of_the_first_stage(run, train_opt):
    opt = short(train_opt, 'scaled', datasets__train__progressive=STAGES, train__scheduler=None)
    opt['train']['scale_lr'] = {'batch': 1}
    assert [row['lr'] for row in rows(run(opt))] == pytest.approx(6 * [3e-3])


def test_batches_in_parts_make_the_steps_of_whole_ones_in_every_stage(run, train_opt):
    losses = []
    for parts in (1, 2):
        opt = short(train_opt, f'parts{parts}', datasets__train__progressive=STAGES)
        opt['train']['accumulate'] = parts
        losses.append([row['losses/l_pix'] for row in rows(run(opt))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_images_are_degraded_for_every_stage_alike_wherever_and_after_a_stop(
    run, train_opt, monkeypatch
):
    found = {}
    for degrade_on in ('device', 'worker'):
        options = {'datasets__train__progressive': STAGES}
        options |= {'datasets__train__degrade_on': degrade_on, 'log_recipes': True}
        opt = blind(short(train_opt, degrade_on, **options), 'RealESRGANModel')
        found[degrade_on] = results(run(opt))
    assert differences(*found.values()) == []
    cut = dict(opt, name='cut')
    interrupted(run, cut, monkeypatch, 5)
    assert differences(found['worker'], results(run(cut, '--auto_resume'))) == []


def test_what_works_with_one_size_alone_is_refused(run, train_opt):
    opt = blind(short(train_opt, 'pool', datasets__train__progressive=STAGES)) | {'queue_size': 4}
    with pytest.raises(ValueError, match=r'crops of \[8, 12, 16, 24\]: set queue_size: 0'):
        run(opt)
    opt = adversarial(short(train_opt, 'vgg', datasets__train__gt_size=128))
    opt['network_d'] = {'type': 'VGGStyleDiscriminator', 'num_in_ch': 3, 'num_feat': 1}
    opt['datasets']['train']['pad_small'] = True
    opt['datasets']['train']['progressive'] = [{'iters': 3}, {'gt_size': [128, 160]}]
    with pytest.raises(ValueError, match='input_size is 128, but gt_size is 160'):
        run(opt)


def test_a_pool_of_one_size_that_is_not_that_of_the_set_resumes(run, train_opt, monkeypatch):
    options = {'datasets__train__progressive': [{'gt_size': 12}], 'queue_size': 5}
    whole = results(run(blind(short(train_opt, 'whole', **options))))
    cut = blind(short(train_opt, 'cut', **options))
    interrupted(run, cut, monkeypatch, 5)
    assert differences(whole, results(run(cut, '--auto_resume'))) == []
