import itertools
import os
import signal
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from runs import log_text
from torch.utils.data import DataLoader, Dataset

from basicsr.data.data_util import image_tensor
from basicsr.data.prefetch_dataloader import (
    CPUPrefetcher,
    CUDAPrefetcher,
    PrefetchDataLoader,
    PrefetchGenerator,
    images_to_float,
)
from basicsr.run.failures import why_worker_died
from basicsr.utils.dead_worker import note_signals


class Numbers(Dataset):
    """The samples 0 ... 6; one may be broken."""

    def __init__(self, broken=None):
        self.broken = broken

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError(f'sample {index} is broken')
        return {'lq': torch.tensor([float(index)]), 'lq_path': f'{index}.png'}

    def __len__(self):
        return 7


class Item(NamedTuple):
    image: torch.Tensor
    name: str


def make(mode, dataset, **options):
    """The batches of a loader in one of the three modes of ``prefetch_mode``."""
    options = {'dataset': dataset, 'batch_size': 2} | options
    if mode == 'cpu':
        return CPUPrefetcher(PrefetchDataLoader(2, **options))
    if mode == 'cuda':
        return CUDAPrefetcher(DataLoader(**options), {'num_gpu': 0})
    return CPUPrefetcher(DataLoader(**options))


def taken(prefetcher):
    """The paths of all batches, taken one by one as third-party loops do."""
    prefetcher.reset()
    batches = iter(prefetcher.next, None)
    return [batch['lq_path'] for batch in batches]


def producers():
    return [t for t in threading.enumerate() if isinstance(t, PrefetchGenerator)]


every_mode = pytest.mark.parametrize('mode', ['none', 'cpu', 'cuda'])
PATHS = [['0.png', '1.png'], ['2.png', '3.png'], ['4.png', '5.png'], ['6.png']]


@every_mode
@pytest.mark.parametrize('workers', [0, 2])
def test_every_mode_gives_the_same_batches_in_every_pass(mode, workers):
    prefetcher = make(mode, Numbers(), num_workers=workers)
    assert [taken(prefetcher) for _ in range(3)] == [PATHS] * 3
    assert [batch['lq_path'] for batch in prefetcher] == PATHS
    assert prefetcher.next() is None


@every_mode
def test_next_begins_the_first_pass_and_none_ends_it_for_good(mode):
    prefetcher = make(mode, Numbers(), drop_last=True)
    values = [prefetcher.next() for _ in range(6)]
    assert [batch['lq'].flatten().tolist() for batch in values[:3]] == [[0, 1], [2, 3], [4, 5]]
    assert values[3:] == [None] * 3


@every_mode
def test_the_first_batch_is_made_once(mode):
    """It was made, thrown away by reset, and made again."""
    asked = []

    class Counting(Numbers):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    prefetcher = make(mode, Counting())
    assert asked == []
    assert taken(prefetcher) == PATHS
    assert asked == list(range(7))


@every_mode
@pytest.mark.parametrize('workers', [0, 1])
def test_a_broken_sample_is_reported_in_its_place(mode, workers):
    prefetcher = make(mode, Numbers(broken=5), num_workers=workers)
    names = []
    with pytest.raises(ValueError, match='sample 5 is broken') as info:
        for batch in prefetcher:
            names.append(batch['lq_path'])
    assert names == PATHS[:2]
    # The frames of the error would keep the workers, until the garbage collector waits for them.
    info.value.__traceback__ = None
    del info, prefetcher


@pytest.mark.parametrize('mode', ['cpu', 'cuda'])
def test_after_an_error_no_batch_is_given_twice(mode):
    prefetcher = make(mode, Numbers(broken=2))
    assert prefetcher.next()['lq_path'] == PATHS[0]
    with pytest.raises(ValueError, match='sample 2 is broken'):
        prefetcher.next()
    prefetcher.reset()
    assert prefetcher.next()['lq_path'] == PATHS[0]


@every_mode
def test_nested_batches_pass(mode):
    item = {'clip': [torch.zeros(2), torch.ones(3)], 'pair': Item(torch.ones(1), 'a'), 'key': 'k'}
    prefetcher = make(mode, [item, item])
    batch = prefetcher.next()
    assert [tuple(frame.shape) for frame in batch['clip']] == [(2, 2), (2, 3)]
    assert list(batch['pair'].name) == ['a', 'a'] and batch['key'] == ['k', 'k']


# threads


def test_the_thread_works_ahead_of_the_consumer_but_not_further_than_the_queue():
    made = []

    def items():
        for number in range(10):
            made.append(number)
            yield number

    generator = PrefetchGenerator(items(), 3)
    assert next(generator) == 0
    deadline = time.monotonic() + 120
    while len(made) < 5 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert made == list(range(5))  # one taken, three in the queue, one waiting for room
    assert list(generator) == list(range(1, 10))
    with pytest.raises(StopIteration):
        next(generator)


def test_what_an_iterable_raises_arrives_even_if_it_is_no_error():
    def items():
        yield 1
        raise SystemExit('enough')

    generator = PrefetchGenerator(items(), 1)
    assert next(generator) == 1
    for _ in range(2):
        with pytest.raises(SystemExit, match='enough'):
            next(generator)


def test_a_long_wait_for_data_is_logged_less_and_less_often(caplog, monkeypatch):
    monkeypatch.setattr(PrefetchGenerator, 'patience', 1e-3)
    caplog.set_level('INFO')
    told = threading.Event()

    def items():
        while len(caplog.records) < 3:
            told.wait(1e-3)
        yield 5

    assert next(PrefetchGenerator(items(), 1, '2 loader processes make batches')) == 5
    assert [record.getMessage() for record in caplog.records[:3]] == [
        f'Still waiting for data after {seconds} s: 2 loader processes make batches.'
        for seconds in (0.001, 0.002, 0.004)
    ]


class Mortal(Numbers):
    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_the_signal_of_a_worker_is_told_where_the_thread_sees_its_end_first(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, '_SIGCHLD_handler_set', True)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    get = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(
        *(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, '_try_get_data'),
        lambda self: get(self, timeout=0.05),
    )
    try:
        with pytest.raises((RuntimeError, OSError, EOFError)) as error:
            list(PrefetchDataLoader(1, dataset=Mortal(), num_workers=1))
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert 'was killed (signal 9)' in str(why_worker_died(error.value))


@pytest.mark.parametrize('workers', [0, 1])
def test_the_thread_ends_when_the_consumer_stops(workers):
    loader = PrefetchDataLoader(1, dataset=Numbers(), num_workers=workers)
    for _ in itertools.islice(loader, 2):
        pass
    assert producers() == []
    prefetcher = CPUPrefetcher(loader)
    prefetcher.next()
    assert len(producers()) == 1
    prefetcher.reset()
    prefetcher.next()
    assert len(producers()) == 1
    del prefetcher
    assert producers() == []


def test_the_thread_ends_with_the_last_batch():
    assert len(list(PrefetchDataLoader(4, dataset=Numbers()))) == 7
    assert producers() == []


# devices


def test_images_become_floats_late_with_the_same_bits():
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    image = image_tensor(levels, keep_uint8=True)
    assert image.dtype == torch.uint8
    batch = {'lq': image, 'gt': torch.ones(2), 'mask': image, 'lq_path': ['a']}
    floats = images_to_float(batch)
    assert torch.equal(floats['lq'], image_tensor(levels))
    assert floats['gt'] is batch['gt'] and floats['mask'] is image and floats['lq_path'] == ['a']
    assert batch['lq'] is image and image.dtype == torch.uint8


def test_a_batch_of_bytes_takes_no_image_of_16_bits():
    """Stacked with bytes, its values would be those of another range."""
    with pytest.raises(ValueError, match='uint8_batch is for images of 8 bits, and one has uint16'):
        image_tensor(np.zeros((4, 4, 3), np.uint16), keep_uint8=True)


def test_only_plain_colours_may_stay_bytes():
    levels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for img, color, mean in (
        (levels, 'y', None),
        (levels, None, [0.5] * 3),
    ):
        late = image_tensor(img, color, mean, mean, keep_uint8=True)
        assert late.dtype == torch.float32
        assert torch.equal(late, image_tensor(img, color, mean, mean))


def test_without_a_gpu_prefetching_to_it_is_noted_and_has_no_effect(run, train_opt):
    opt = train_opt(train__total_iter=2, datasets__train__prefetch_mode='cuda')
    assert 'prefetch_mode cuda has no effect on the CPU' in log_text(run(opt))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_batches_are_copied_to_the_gpu_unchanged():
    data = [
        {'lq': torch.randn(3, 256, 256), 'clip': [torch.full((4,), float(i))]} for i in range(8)
    ]
    loader = DataLoader(data, batch_size=2, pin_memory=True)
    prefetcher = CUDAPrefetcher(loader, {'num_gpu': 1})
    for _ in range(2):
        for batch, wanted in zip(prefetcher, loader, strict=True):
            assert batch['lq'].is_cuda and batch['clip'][0].is_cuda
            torch.cuda._sleep(10_000_000)  # the next copy must not reach this batch's memory
            assert torch.equal(batch['lq'].cpu(), wanted['lq'])
            assert torch.equal(batch['clip'][0].cpu(), wanted['clip'][0])


def test_a_status_that_another_thread_is_storing_is_waited_for():
    class Ended:
        """A process that has ended, whose status is there at the third look."""

        pid, looks = 7, 0

        def __init__(self):
            reader, writer = os.pipe()
            os.close(writer)
            self.sentinel = reader

        @property
        def exitcode(self):
            self.looks += 1
            return -signal.SIGKILL if self.looks >= 3 else None

    error = ConnectionResetError()
    note_signals(error, [Ended()])
    assert error.__notes__ == ['DataLoader worker (pid 7) is killed by signal: Killed.']
