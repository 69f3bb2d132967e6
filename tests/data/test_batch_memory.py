import itertools

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from basicsr.data import batch_memory, build_dataloader, build_dataset
from basicsr.data.batch_memory import BatchMemory
from basicsr.data.data_sampler import EnlargedSampler
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.data.prefetch_dataloader import PrefetchDataLoader, images_to_float


class Samples(Dataset):
    """Samples of every kind of value; the size of ``gt`` follows from ``size(index)``."""

    def __init__(self, size=lambda index: 4):
        self.size = size

    def __getitem__(self, index):
        size = self.size(index)
        return {
            'lq_path': f'{index}.png',
            'gt': torch.full((3, size, size), index, dtype=torch.uint8),
            'lq': torch.full((3, 2, 2), index + 0.5),
            'half': torch.full((2,), index, dtype=torch.bfloat16),
            'number': index,
            'nested': {'strength': torch.tensor(float(index))},
        }

    def __len__(self):
        return 64


def equal(a, b):
    """Whether two batches have the same keys, in order, types and values."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b


def as_default(loader, batches):
    """Whether kept batches equal those of a plain loader: no slot was filled too early."""
    return all(equal(a, b) for a, b in zip(batches, loader, strict=True))


@pytest.mark.parametrize('workers', [1, 3])
@pytest.mark.parametrize('queue', [1, 5])
def test_batches_that_are_kept_equal_those_of_a_plain_loader(workers, queue):
    options = {'dataset': Samples(), 'batch_size': 2, 'num_workers': workers}
    reusing = list(PrefetchDataLoader(queue, collate_fn=BatchMemory(), **options))
    assert as_default(DataLoader(**options), reusing)


def test_a_slow_reader_gets_each_batch_as_it_was_made():
    loader = PrefetchDataLoader(
        1, dataset=Samples(), batch_size=4, num_workers=2, collate_fn=BatchMemory()
    )
    for number, batch in enumerate(loader):
        torch.zeros(500, 500) @ torch.zeros(500, 500)  # meanwhile the workers go on
        assert batch['number'].tolist() == list(range(4 * number, 4 * number + 4))
        assert batch['gt'][:, 0, 0, 0].tolist() == batch['number'].tolist()


def test_batches_of_varying_shapes_and_lengths_are_right():
    options = {'dataset': Samples(lambda i: 4 + i // 16), 'batch_size': 5, 'num_workers': 2}
    sampler = [i for i in range(64) if i % 16 < 15]  # 15 per size, three batches
    reusing = PrefetchDataLoader(1, collate_fn=BatchMemory(), sampler=sampler, **options)
    assert as_default(DataLoader(sampler=sampler, **options), list(reusing))


def test_samples_of_different_shapes_fail_as_they_do_in_a_plain_loader():
    loader = PrefetchDataLoader(
        1,
        dataset=Samples(lambda i: 5 if i == 9 else 4),
        batch_size=2,
        num_workers=1,
        collate_fn=BatchMemory(),
    )
    with pytest.raises(RuntimeError, match='stack expects each tensor to be equal size'):
        list(loader)


def test_a_worker_fills_as_many_slots_as_can_be_on_their_way_and_one():
    loader = DataLoader(Samples(), 2, num_workers=1, prefetch_factor=3, collate_fn=BatchMemory(3))
    parcels = list(loader)
    assert [parcel.slot for parcel in parcels[:6]] == [0, 1, 2, 3, 0, 1]
    # Only the first use of a slot sends its memory; later ones fill that again.
    assert [parcel.tensors is not None for parcel in parcels] == [True] * 4 + [False] * 28
    assert parcels[0].tensors['lq'][0, 0, 0, 0] == 56.5, 'the 28th batch lies where the first did'


def test_without_workers_and_for_other_samples_it_is_the_default():
    samples = [Samples()[i] for i in range(3)]
    assert equal(BatchMemory()(samples), default_collate(samples))
    loader = PrefetchDataLoader(
        1, dataset=list(range(6)), batch_size=3, num_workers=1, collate_fn=BatchMemory()
    )
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


class Unstacked(Dataset):
    """Samples whose values become tensors in the batch alone."""

    def __getitem__(self, index):
        image = np.full((2, 2), index, np.float32)
        return {'image': image, 'number': index}

    def __len__(self):
        return 8


def test_samples_without_plain_tensors_are_as_in_a_plain_loader():
    options = {'dataset': Unstacked(), 'batch_size': 2, 'num_workers': 1}
    ours = list(PrefetchDataLoader(1, collate_fn=BatchMemory(), **options))
    assert [list(batch) for batch in ours] == [['image', 'number']] * 4
    assert [batch['image'][:, 1, 1].tolist() for batch in ours] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.skipif(torch.cuda.is_available(), reason='for machines without GPU')
def test_page_locked_memory_without_a_gpu_is_usual_memory():
    options = {'dataset': Samples(), 'batch_size': 2, 'num_workers': 1, 'pin_memory': True}
    assert len(list(PrefetchDataLoader(1, collate_fn=BatchMemory(), **options))) == 32


def test_an_endless_loader_that_is_begun_anew_gives_the_same_batches():
    opt = {
        'phase': 'train',
        'batch_size_per_gpu': 4,
        'num_worker_per_gpu': 1,
        'prefetch_mode': 'cpu',
        'persistent_workers': True,
    }
    sampler = EnlargedSampler(Samples(), 1, 0)
    loader = build_dataloader(Samples(), opt, num_gpu=0, sampler=sampler, seed=1, start=0)
    first, again = (list(itertools.islice(loader, 6)) for _ in range(2))
    assert as_default(first, again)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Samples()[i] for i in range(8)])


@pytest.mark.parametrize('dataset', [Samples(), Stream()], ids=['map', 'stream'])
@pytest.mark.parametrize('mode', ['cpu', 'cuda', None])
def test_the_loader_of_a_training_gives_plain_batches(dataset, mode):
    opt = {
        'phase': 'train',
        'batch_size_per_gpu': 4,
        'num_worker_per_gpu': 1,
        'prefetch_mode': mode,
    }
    sampler = None if isinstance(dataset, Stream) else EnlargedSampler(dataset, 1, 0)
    loader = build_dataloader(dataset, opt, num_gpu=0, sampler=sampler, seed=1, start=0)
    assert isinstance(loader.collate_fn, BatchMemory) == (mode is not None)
    batches = iter(loader)
    kept = [next(batches) for _ in range(20)]
    for batch in kept:
        numbers = batch['number'].tolist()
        assert list(batch) == ['lq_path', 'gt', 'lq', 'half', 'number', 'nested']
        assert batch['lq_path'] == [f'{n}.png' for n in numbers]
        assert batch['gt'][:, 2, 3, 3].tolist() == numbers
        assert batch['half'][:, 1].tolist() == numbers
        assert batch['nested']['strength'].tolist() == numbers
    assert len({tuple(batch['number'].tolist()) for batch in kept}) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='page-locked memory needs a GPU')
def test_copies_are_page_locked_if_asked_for():
    loader = PrefetchDataLoader(
        1,
        dataset=Samples(),
        batch_size=2,
        num_workers=1,
        pin_memory=True,
        collate_fn=BatchMemory(),
    )
    assert all(batch['lq'].is_pinned() for batch in loader)


@pytest.mark.parametrize(
    ('batch', 'workers', 'options', 'expected'),
    [
        (50_000, 2, {}, '50000 samples with gt_size 64 takes 2.9 GB, and 10 of them'),
        (50_000, 0, {}, '2 of them are in memory at a time, more than its 4.0 GB'),
        (50_000, 0, {'uint8_batch': True}, None),
        (64, 2, {}, None),
        (50_000, 2, {'gt_size': None}, None),
        (64, 2, {'progressive': [{'gt_size': 4096, 'iters': None}]}, 'gt_size 4096 takes 15.0 GB'),
    ],
)
def test_batches_that_the_memory_does_not_hold_are_warned_of(
    batch, workers, options, expected, monkeypatch, caplog
):
    monkeypatch.setattr(batch_memory, '_memory', lambda: 4 * 2**30)
    opt = {'batch_size_per_gpu': batch, 'gt_size': 64, 'scale': 2, 'num_prefetch_queue': 1}
    batch_memory.warn_of_large_batches(opt | options, 1, workers)
    assert (expected in caplog.text) if expected else not caplog.text


def test_the_memory_of_the_machine_is_known():
    assert 2**27 < batch_memory._memory() < 2**50


def first_batches(dataset, count=4, **options):
    """The first batches of a training loader, and the loader."""
    opt = {'phase': 'train', 'batch_size_per_gpu': 4, 'num_worker_per_gpu': 0, **options}
    sampler = EnlargedSampler(dataset, 1, 0, ratio=10)
    loader = build_dataloader(dataset, opt, num_gpu=0, sampler=sampler, seed=3, start=0)
    return list(itertools.islice(loader, count)), loader


@pytest.mark.parametrize('depth', [np.uint8, np.uint16, 'mixed'])
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'color': 'gray'},
        {'color': 'y'},
        {'mean': [0.5] * 3, 'std': [0.1] * 3},
        {'use_rot': False, 'pad_small': True, 'gt_size': 48},
        {'uint8_batch': True},
        {'gt_size': 128},
    ],
    ids=str,
)
def test_crops_handed_over_as_bytes_give_the_batches_of_the_dataset(tmp_path, depth, options):
    for kind, (height, width) in {'gt': (140, 152), 'lq': (35, 38)}.items():
        (tmp_path / kind).mkdir()
        for number in range(6):
            is_deep = depth is np.uint16 or (depth == 'mixed' and number == 2)
            is_deep = is_deep and not options.get('uint8_batch')
            dtype = np.uint16 if is_deep else np.uint8
            values = np.random.default_rng(number).integers(
                0, np.iinfo(dtype).max, (height, width, 3)
            )
            cv2.imwrite(str(tmp_path / kind / f'{number}.png'), values.astype(dtype))
    opt = {'type': 'PairedImageDataset', 'phase': 'train', 'scale': 4, 'gt_size': 32, **options}
    opt |= {f'dataroot_{kind}': str(tmp_path / kind) for kind in ('gt', 'lq')}
    dataset = build_dataset(opt | {'cache': str(tmp_path / 'cache')})
    plain, _ = first_batches(dataset)
    delivered, loader = first_batches(dataset, num_worker_per_gpu=1, prefetch_mode='cpu')
    assert loader.dataset.takes_stored
    assert as_default(plain, delivered)


def test_samples_that_a_subclass_changes_are_taken_from_it(tmp_path):
    class Darker(PairedImageDataset):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return sample | {'lq': sample['lq'] / 2 + np.random.rand() / 100}

    for kind, size in {'gt': 64, 'lq': 32}.items():
        (tmp_path / kind).mkdir()
        cv2.imwrite(str(tmp_path / kind / '0.png'), np.full((size, size, 3), 200, np.uint8))
    opt = {f'dataroot_{kind}': str(tmp_path / kind) for kind in ('gt', 'lq')}
    dataset = Darker(opt | {'scale': 2, 'gt_size': 32})
    plain, _ = first_batches(dataset)
    delivered, loader = first_batches(dataset, num_worker_per_gpu=1, prefetch_mode='cpu')
    assert not loader.dataset.takes_stored
    assert as_default(plain, delivered)
    assert 0.39 < delivered[0]['lq'].mean() < 0.41


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='compares values of a GPU')
def test_a_gpu_makes_the_same_floats_of_bytes():
    values = torch.arange(256, dtype=torch.uint8)
    on_gpu = images_to_float({'lq': values.cuda()})['lq'].cpu()
    assert torch.equal(on_gpu, images_to_float({'lq': values})['lq'])
