import itertools

import pytest
import torch
from runs import checkpoint, differences
from torch.utils.data import IterableDataset

from basicsr.data import build_dataloader
from basicsr.data.sample_stream import SampleStream


class Countdown(IterableDataset):
    """The numbers from ``count - 1`` to 0, each beside something random."""

    def __init__(self, count=7, is_lazy=False):
        self.count = count
        self.is_lazy = is_lazy
        self.decoded = []
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for value in reversed(range(self.count)):
            yield (lambda value=value: self.decode(value)) if self.is_lazy else self.decode(value)

    def decode(self, value):
        self.decoded.append(value)
        return torch.tensor([value, torch.rand(()).item()], dtype=torch.float64)


def batches(count, dataset=None, workers=0, batch=2, start=0, **options):
    opt = {'phase': 'train', 'batch_size_per_gpu': batch, 'num_worker_per_gpu': workers}
    loader = build_dataloader(dataset or Countdown(), opt | options, seed=3, start=start)
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def test_the_set_is_read_again_and_again_with_new_randomness():
    dataset = Countdown(3)
    samples = [sample for batch in batches(6, dataset) for sample in batch]
    assert [value for value, _ in samples] == 4 * [2, 1, 0]
    assert len({number for _, number in samples}) == 12
    assert dataset.epochs == [0, 1, 2, 3]


@pytest.mark.parametrize('is_lazy', [False, True])
@pytest.mark.parametrize('workers', [1, 3])
def test_batches_do_not_depend_on_the_workers(workers, is_lazy):
    ours = batches(8, Countdown(is_lazy=is_lazy), workers)
    assert ours == batches(8, Countdown(is_lazy=is_lazy))


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('start', [2, 6, 8, 20])
def test_a_resumed_run_goes_on_as_if_never_stopped(workers, start):
    assert batches(3, workers=workers, start=start) == batches(14)[start // 2 : start // 2 + 3]


def test_ranks_share_the_order_of_one():
    alone = list(itertools.islice(SampleStream(Countdown(), 3, 4, start=8), 12))
    ranks = [SampleStream(Countdown(), 3, 2, 3, rank, start=8) for rank in range(3)]
    shares = zip(*(itertools.islice(rank, 4) for rank in ranks), strict=True)
    assert torch.equal(torch.stack(alone), torch.stack([s for row in shares for s in row]))


def test_what_is_skipped_or_of_another_rank_is_not_decoded():
    dataset = Countdown(100, is_lazy=True)
    next(iter(SampleStream(dataset, 3, 1, num_replicas=4, rank=2, start=40)))
    assert dataset.decoded == [99 - 42]


def test_the_generators_of_the_process_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches(3)
    assert torch.equal(torch.rand(3), expected)


def test_without_a_start_one_pass_is_made():
    assert len(batches(99, start=None)) == 3


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match='its iterator yields nothing'):
        batches(1, Countdown(0))


def test_a_stream_cannot_be_validated_on():
    with pytest.raises(ValueError, match=r'Countdown .* not used in datasets\.val'):
        batches(1, phase='val')


def test_the_length_of_an_epoch_is_that_of_the_set_if_it_has_one():
    assert SampleStream(Countdown(), 3, 2).total_size > 2**60
    dataset = type('Sized', (Countdown,), {'__len__': lambda self: self.count})()
    assert SampleStream(dataset, 3, 2).total_size == 7


STREAM = """
import torch
from torch.utils.data import IterableDataset

from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class NoiseStream(IterableDataset):
    def __init__(self, opt):
        self.opt = opt

    def __iter__(self):
        for _ in range(5):
            lq = torch.rand(3, 16, 16)
            yield {'lq': lq, 'gt': lq.repeat(1, 2, 2), 'lq_path': '', 'gt_path': ''}
"""
COLLATE = """
from torch.utils.data import default_collate


def reverse(samples):
    return default_collate(samples[::-1])
"""


@pytest.mark.parametrize('length', [None, 5])
def test_a_run_on_a_stream_resumes_bit_for_bit(tmp_path, run, train_opt, length):
    text = (
        STREAM if length is None else f'{STREAM}\n    def __len__(self):\n        return {length}\n'
    )
    (tmp_path / 'noise_dataset.py').write_text(text)
    (tmp_path / 'batching.py').write_text(COLLATE)

    def options(name, total_iter):
        opt = train_opt(name=name, plugins=['.'], train__total_iter=total_iter)
        opt['datasets']['train'] |= {'type': 'NoiseStream', 'collate_fn': 'batching:reverse'}
        return opt

    run(options('cut', 2))
    cut = run(options('cut', 6), '--auto_resume')
    whole = run(options('whole', 6))
    assert differences(*(checkpoint(folder, 'net_g_6.pth') for folder in (whole, cut))) == []
    assert checkpoint(whole, '6.state')['epoch'] == (2 if length else 0)


def test_a_stream_takes_no_sampler(tmp_path, run, train_opt):
    (tmp_path / 'noise_dataset.py').write_text(STREAM)
    opt = train_opt(plugins=['.'])
    opt['datasets']['train'] |= {'type': 'NoiseStream', 'sampler': {'type': 'random'}}
    with pytest.raises(ValueError, match='an IterableDataset has its own order'):
        run(opt)


def test_a_set_that_can_skip_is_not_read_up_to_the_start():
    class Skipping(Countdown):
        skipped = 0

        def __len__(self):
            return self.count

        def skip(self, count):
            self.skipped = count

        def __iter__(self):
            first, self.skipped = self.skipped, 0
            yield from map(self.decode, range(first, self.count))

    whole = list(itertools.islice(SampleStream(Skipping(), 3, 1, start=0), 30))
    for start in (2, 7, 24):
        dataset = Skipping()
        samples = list(itertools.islice(SampleStream(dataset, 3, 1, start=start), 6))
        assert torch.equal(torch.stack(samples), torch.stack(whole[start : start + 6]))
        assert dataset.epochs[0] == start // 7
