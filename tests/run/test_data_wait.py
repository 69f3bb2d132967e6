"""The line that names the data_wait: when it is said, and what it advises."""

import logging
import re

import pytest
from runs import log_text

from basicsr.run import data_wait
from basicsr.run.data_wait import DataWait, advice


@pytest.mark.parametrize(
    ('situation', 'part'),
    [
        ((2, 1, 8, True, None, False), 'switch datasets.train.cache on'),
        ((8, 1, 8, True, None, False), 'switch datasets.train.cache on'),
        ((2, 1, 8, False, (3, 20), True), 'images are still being decoded (cache: 3 of 20)'),
        ((2, 1, 8, False, (3, 20), False), 'num_worker_per_gpu (2 now; 8 cores)'),
        ((2, 1, 8, False, (20, 20), False), 'num_worker_per_gpu (2 now; 8 cores)'),
        ((0, 1, 1, False, None, False), 'num_worker_per_gpu (0 now; 1 cores)'),
        ((1, 4, 8, False, None, False), '(1 now for each of 4; 8 cores)'),
        ((2, 4, 8, False, None, False), 'smaller images, or sub-images'),
        ((8, 1, 8, False, None, False), 'smaller images, or sub-images'),
        ((8, 1, 8, False, (3, 20), False), 'more space in datasets.train.cache'),
        ((9, 1, 8, False, (20, 20), False), 'datasets.train.uint8_batch'),
    ],
)
def test_the_advice_fits_the_situation(situation, part):
    assert part in advice(*situation)


@pytest.fixture
def lines(monkeypatch, caplog):
    """The lines said in intervals of 100 iterations with these shares of waiting."""
    monkeypatch.setattr(data_wait, 'usable_cores', lambda: set(range(8)))
    monkeypatch.setattr(logging.getLogger('basicsr'), 'propagate', True)
    caplog.set_level(logging.INFO, logger='basicsr')

    def call(*shares, decoded=(20,), length=100, count=20):
        option = {'num_worker_per_gpu': 2, 'cache': 'auto'}
        there = iter([*decoded, *[decoded[-1]] * len(shares)])
        wait, said = DataWait(option, 1, lambda: (next(there), count)), {}
        for interval, share in enumerate(shares, 1):
            caplog.clear()
            for _ in range(length):
                wait.record(share * 0.5, 0.5)
            wait.report(interval * length)
            if caplog.records:
                said[interval * length] = caplog.records[0].getMessage()
        return said

    return call


def test_the_share_is_that_of_the_interval_and_the_first_one_does_not_count(lines):
    advised = 'raise datasets.train.num_worker_per_gpu (2 now; 8 cores)'
    assert lines(0.9, 0.05, 0.38, 0.5) == {300: f'Waiting for data 38 % of the time: {advised}'}


def test_the_same_advice_is_repeated_after_a_thousand_iterations(lines):
    assert list(lines(*[0.5] * 25)) == [200, 1200, 2200]


def test_another_advice_is_given_at_once(lines):
    said = lines(*[0.5] * 6, decoded=(3, 7, 12, 20))
    assert list(said) == [200, 400]
    assert said[200].endswith('images are still being decoded (cache: 7 of 20)')
    assert 'raise datasets.train.num_worker_per_gpu' in said[400]


def test_a_cache_that_grows_no_further_is_not_called_filling(lines):
    assert 'raise datasets.train.num_worker_per_gpu' in lines(0.5, 0.5, decoded=(7, 7))[200]


def test_a_handful_of_iterations_says_nothing(lines):
    assert lines(*[0.5] * 9, length=1) == {}
    assert list(lines(*[0.5] * 40, length=1)) == [20]


SLOW_DATASET = """
import time
import torch
from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class SlowDataset(torch.utils.data.Dataset):
    def __init__(self, opt):
        self.delay = opt['delay']

    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(self.delay)
        return {'lq': torch.zeros(3, 8, 8), 'gt': torch.zeros(3, 16, 16)}
"""


def test_a_run_that_waits_for_its_data_says_so(run, train_opt, tmp_path, monkeypatch):
    monkeypatch.setattr(data_wait, 'usable_cores', lambda: set(range(64)))
    (tmp_path / 'slow_dataset.py').write_text(SLOW_DATASET)
    data = {'type': 'SlowDataset', 'delay': 0.05, 'batch_size_per_gpu': 1, 'num_worker_per_gpu': 0}
    opt = train_opt(plugins=['.'], train__total_iter=20, datasets={'train': data}, val=None)
    opt['logger'].update(print_freq=10, save_checkpoint_freq=100)
    [(share, text)] = re.findall(r'Waiting for data (\d+) %.*?: (.*)', log_text(run(opt)))
    assert 50 < int(share) <= 100
    assert text == 'raise datasets.train.num_worker_per_gpu (0 now; 64 cores)'
