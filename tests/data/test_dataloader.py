import gc
import itertools
import logging
import os
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import basicsr.data
from basicsr.data import (
    build_dataloader,
    build_dataset,
    decoded_images,
    gpus_per_process,
    shard,
    worker_init_fn,
)
from basicsr.data.data_sampler import EnlargedSampler
from basicsr.data.prefetch_dataloader import PrefetchDataLoader
from basicsr.utils.registry import DATASET_REGISTRY, import_plugins
from basicsr.utils.rng import mix

# A third party's dataset, which draws from every generator there is.
DICE = """
import os
import random

import numpy as np
import torch
from torch.utils.data import Dataset

from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class DiceDataset(Dataset):
    def __init__(self, opt):
        self.opt = opt

    def __getitem__(self, index):
        drawn = [index, random.random(), np.random.rand(), torch.rand(1).item()]
        return {'drawn': torch.tensor(drawn, dtype=torch.float64), 'worker': os.getpid()}

    def __len__(self):
        return 10
"""


@pytest.fixture
def dice(tmp_path):
    (tmp_path / 'dice_dataset.py').write_text(DICE)
    import_plugins([tmp_path])
    return build_dataset({'type': 'DiceDataset', 'name': 'dice', 'phase': 'train'})


def endless(dataset, workers=0, batch=2, seed=3, start=0, ranks=1, rank=0, context=None, **options):
    """The training loader of a rank, as a run builds it."""
    opt = {'phase': 'train', 'batch_size_per_gpu': batch, 'num_worker_per_gpu': workers, **options}
    sampler = EnlargedSampler(dataset, ranks, rank, seed=seed)
    loader = build_dataloader(dataset, opt, 0, ranks > 1, sampler, seed, start)
    if workers:
        loader.multiprocessing_context = context
    return loader


def drawn(loader, count):
    """What was drawn for the samples of the first batches, one row each."""
    return torch.cat([batch['drawn'] for batch in itertools.islice(loader, count)]).tolist()


def samples(count, seed=3, start=0):
    """What the dice show in the samples from ``start`` on: seeded by the seed and the number."""
    sampler, rows = EnlargedSampler(range(10), 1, 0, seed=seed), []
    for number in range(start, start + count):
        sampler.set_epoch(number // 10)
        value = mix(seed, number)
        drawn_by_numpy = np.random.RandomState([value >> 32, value % 2**32]).rand()
        drawn_by_torch = torch.rand(1, generator=torch.Generator().manual_seed(value)).item()
        drawn_by_python = random.Random(value).random()
        rows.append([list(sampler)[number % 10], drawn_by_python, drawn_by_numpy, drawn_by_torch])
    return rows


def generator_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


# randomness


@pytest.mark.parametrize(
    ('workers', 'context'),
    [(0, None), (1, 'fork'), (3, 'fork'), (1, 'spawn'), (1, 'forkserver')],
)
def test_what_is_drawn_for_a_sample_follows_from_seed_and_number(dice, workers, context):
    assert drawn(endless(dice, workers, context=context), 7) == samples(14)


@pytest.mark.parametrize('mode', ['cpu', 'cuda'])
def test_what_is_drawn_for_a_sample_does_not_depend_on_prefetching(dice, mode):
    loader = endless(dice, prefetch_mode=mode, num_prefetch_queue=3)
    assert drawn(loader, 6) == samples(12)


@pytest.mark.parametrize('start', [2, 14])
@pytest.mark.parametrize('workers', [0, 2])
def test_a_loader_started_in_the_middle_goes_on_as_if_never_stopped(dice, workers, start):
    assert drawn(endless(dice, workers, start=start), 5) == samples(10, start=start)


def test_every_pass_draws_anew_from_every_generator(dice):
    """Workers drew the same numbers in every epoch."""
    for workers in (0, 2):
        rows = np.array(sorted(drawn(endless(dice, workers), 15)))  # three passes, by index
        assert rows[:, 0].tolist() == sorted(3 * list(range(10)))
        assert all(len(set(column)) == 30 for column in rows[:, 1:].T)


def test_another_seed_draws_other_numbers_in_another_order(dice):
    first, second = (np.array(drawn(endless(dice, seed=seed), 5)) for seed in (3, 4))
    assert not set(first[:, 1:].ravel()) & set(second[:, 1:].ravel())
    assert first[:, 0].tolist() != second[:, 0].tolist()
    assert second.tolist() == samples(10, seed=4)


def test_two_ranks_draw_together_what_one_draws_with_twice_the_batch(dice, monkeypatch):
    shares = []
    for rank in range(2):
        monkeypatch.setattr(basicsr.data, 'get_dist_info', lambda rank=rank: (rank, 2))
        shares += drawn(endless(dice, ranks=2, rank=rank), 8)
    monkeypatch.undo()
    assert sorted(shares) == sorted(samples(32))
    assert drawn(endless(dice, batch=4), 8) == samples(32)


@pytest.mark.parametrize('workers', [0, 2])
def test_the_generators_of_the_process_are_left_alone(dice, workers):
    before = generator_states()
    opt = {'phase': 'train', 'batch_size_per_gpu': 2, 'num_worker_per_gpu': workers}
    drawn(endless(dice, workers), 5)
    drawn(build_dataloader(dice, opt, 0), 5)
    drawn(build_dataloader(dice, {'phase': 'val', 'num_worker_per_gpu': 1}), 5)
    assert generator_states() == before


@pytest.mark.parametrize('workers', [0, 2])
def test_loops_over_epochs_as_third_parties_write_them_draw_anew_as_well(dice, workers):
    opt = {'phase': 'train', 'batch_size_per_gpu': 3, 'num_worker_per_gpu': workers}
    sampler = EnlargedSampler(dice, 1, 0)
    loader = build_dataloader(dice, opt, num_gpu=0, dist=False, sampler=sampler, seed=5)
    assert len(loader) == 3
    passes = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        passes.append(drawn(loader, 2))  # a pass may be broken off
    numbers = np.array(passes)[..., 1:].ravel()
    assert len(set(numbers)) == len(numbers)
    if workers:
        alone = build_dataloader(dice, opt | {'num_worker_per_gpu': 0}, 0, False, sampler, 5)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert drawn(alone, 2) == passes[epoch]


def test_without_a_sampler_training_is_shuffled_by_the_seed(dice):
    opt = {'phase': 'train', 'batch_size_per_gpu': 10}
    orders = [
        [row[0] for row in drawn(build_dataloader(dice, opt, 0, seed=seed), 1)]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(10))


# workers


def test_workers_live_through_all_passes(dice):
    batches = itertools.islice(endless(dice, workers=2), 60)  # twelve passes
    assert len({pid for batch in batches for pid in batch['worker'].tolist()}) == 2


def test_memory_of_the_process_does_not_grow_with_the_iterations(in_folder):
    in_folder({f'lq/{i}.png': np.zeros((8, 8, 3), np.uint8) for i in range(4)})
    dataset = build_dataset(
        {
            'type': 'PairedImageDataset',
            'dataroot_gt': 'lq',
            'dataroot_lq': 'lq',
            'scale': 1,
            'gt_size': 4,
        }
    )
    batches, blocks = iter(endless(dataset)), []
    for _ in range(5):
        for _ in range(100):
            next(batches)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    # Other threads allocate now and then; a leak shows in each hundred.
    assert min(after - before for before, after in itertools.pairwise(blocks)) < 50


@pytest.mark.parametrize(
    ('num_gpu', 'dist', 'factor'), [(0, False, 1), (3, False, 3), (3, True, 1)]
)
def test_without_processes_of_their_own_gpus_share_one_loader(dice, num_gpu, dist, factor):
    opt = {'phase': 'train', 'batch_size_per_gpu': 2, 'num_worker_per_gpu': 1}
    loader = build_dataloader(dice, opt, num_gpu, dist)
    assert (loader.batch_size, loader.num_workers) == (2 * factor, factor)
    assert gpus_per_process(num_gpu, dist) == factor


@pytest.mark.parametrize('workers', [0, 1])
def test_batches_are_read_ahead_only_where_there_are_loader_processes(dice, workers):
    options = {'prefetch_mode': 'cpu', 'num_prefetch_queue': 2, 'num_worker_per_gpu': workers}
    loader = endless(dice, **options)
    assert isinstance(loader, PrefetchDataLoader) == (workers > 0)
    assert loader.num_workers == workers
    (reader,) = {pid for batch in itertools.islice(loader, 4) for pid in batch['worker'].tolist()}
    assert (reader == os.getpid()) == (workers == 0)


def test_a_worker_is_seeded_from_its_rank_and_number(monkeypatch):
    heeds = []
    monkeypatch.setattr(basicsr.data.workers, 'heed_parent_alone', lambda: heeds.append(True))
    worker_init_fn(1, 4, 2, 100)
    values = random.random(), np.random.rand()
    random.seed(109)
    np.random.seed(109)
    assert values == (random.random(), np.random.rand())
    assert heeds == [True]


def test_a_dataset_is_reached_through_the_one_that_seeds(dice):
    dataset = endless(dice).dataset
    assert dataset.opt['name'] == 'dice' and len(dataset) == 10
    assert not hasattr(dataset, 'missing')
    assert pickle.loads(pickle.dumps(dataset)).opt == dataset.opt


# validation and test


@pytest.mark.parametrize('phase', ['val', 'test'])
def test_other_phases_take_single_images_in_order(dice, phase):
    for workers in (0, 2):
        opt = {'phase': phase, 'num_worker_per_gpu': workers, 'persistent_workers': True}
        loader = build_dataloader(dice, opt, num_gpu=4, sampler=None, seed=1)
        assert [row[0] for row in drawn(loader, None)] == list(range(10))
        assert loader.num_workers == workers


def test_ranks_validate_disjoint_shares_that_cover_the_set(dice):
    loader = build_dataloader(dice, {'phase': 'val'})
    shares = [[row[0] for row in drawn(shard(loader, rank, 3), None)] for rank in range(3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_an_unknown_phase_is_refused(dice):
    with pytest.raises(ValueError, match="'training'; it must be 'train', 'val' or 'test'"):
        build_dataloader(dice, {'phase': 'training'})


# building


def test_a_dataset_is_built_from_options_that_stay_as_they_are(dice, caplog):
    opt = {'type': 'DiceDataset', 'name': 'Set5', 'phase': 'val', 'list': [1]}
    with caplog.at_level(logging.INFO):
        dataset = build_dataset(opt)
    dataset.opt['list'].append(2)
    assert opt == {'type': 'DiceDataset', 'name': 'Set5', 'phase': 'val', 'list': [1]}
    assert caplog.messages == ['Dataset [DiceDataset] - Set5 is built.']
    with pytest.raises(KeyError, match='Did you mean DiceDataset'):
        build_dataset({'type': 'DicesDataset'})


@pytest.mark.parametrize(
    ('error', 'raised', 'message'),
    [
        (ValueError('odd'), ValueError, r'datasets\.val \(Set5\): odd'),
        (FileNotFoundError(2, 'gone', 'x.png'), FileNotFoundError, r'datasets\.val .*x\.png'),
        (UnicodeDecodeError('utf-8', b'\xff', 0, 1, 'bad'), ValueError, r'datasets\.val .*0xff'),
        (KeyError('scale'), KeyError, r"datasets\.val .*BrokenDataset needs the option 'scale'"),
    ],
)
def test_what_keeps_a_dataset_from_being_built_is_told_with_its_section(
    monkeypatch, error, raised, message
):
    monkeypatch.setattr(DATASET_REGISTRY, '_obj_map', DATASET_REGISTRY._obj_map.copy())

    @DATASET_REGISTRY.register()
    class BrokenDataset(Dataset):
        def __init__(self, opt):
            raise error

    with pytest.raises(raised, match=message):
        build_dataset({'type': 'BrokenDataset', 'name': 'Set5', 'phase': 'val'})


def test_decoded_images_are_counted_in_all_parts_of_a_set(image_pairs, tmp_path):
    parts = []
    for name, count in (('photos', 3), ('drawings', 4)):
        gt, lq = image_pairs(name, count)
        parts.append({'type': 'PairedImageDataset', 'dataroot_gt': gt, 'dataroot_lq': lq})
    opt = {'type': 'ConcatDataset', 'phase': 'train', 'scale': 2, 'gt_size': 16, 'parts': parts}
    loader = endless(build_dataset({**opt, 'cache': str(tmp_path / 'cache')}))
    assert decoded_images(loader.dataset) == (0, 14)
    loader.dataset[0, 0], loader.dataset[1, 6]
    assert decoded_images(loader.dataset) == (4, 14)
    assert decoded_images(endless(build_dataset({**opt, 'cache': 'off'})).dataset) is None


def test_a_set_without_a_cache_of_ours_has_no_decoded_images(dice):
    dice.owner = dice
    assert decoded_images(endless(dice).dataset) is None
