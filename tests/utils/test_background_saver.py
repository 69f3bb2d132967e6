import os
import threading
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
from runs import differences

from basicsr.utils.background_saver import BackgroundSaver, copy_to_cpu
from basicsr.utils.checkpoint import load_checkpoint


def test_what_was_handed_over_is_written_not_what_it_became(tmp_path):
    weights = torch.ones(3)
    content = {'params': {'w': weights}, 'milestones': Counter([2, 2]), 'groups': [(1, weights)]}
    saver = BackgroundSaver()
    saver.save(content, tmp_path / 'x.pth')
    weights.zero_()
    content['milestones'][2] = 0
    saver.close()
    written = load_checkpoint(tmp_path / 'x.pth')
    ones = torch.ones(3)
    expected = {'params': {'w': ones}, 'milestones': Counter([2, 2]), 'groups': [(1, ones)]}
    assert differences(written, expected) == []
    assert type(written['milestones']) is Counter


def test_files_keep_their_order_and_few_wait(tmp_path, monkeypatch):
    written, may_write = [], threading.Semaphore(0)

    def write(content, path):
        may_write.acquire()
        written.append(path)

    monkeypatch.setattr('basicsr.utils.background_saver.save_checkpoint', write)
    saver = BackgroundSaver()
    for number in range(4):  # none of them waits for a write
        saver.save({}, number)
    assert written == []
    may_write.release()
    saver.save({}, 4)
    assert written[:1] == [0]
    may_write.release(4)
    saver.close()
    assert written == [0, 1, 2, 3, 4]


def test_an_error_is_raised_by_the_next_call_and_nothing_follows_it(tmp_path):
    """A state whose networks are not there would be resumed from."""
    saver = BackgroundSaver()
    saver.save({}, tmp_path / 'none' / 'net_g_4.pth')
    with pytest.raises(OSError, match='cannot write .*net_g_4.pth'):
        saver.save({}, tmp_path / '4.state')
        saver.close()
    with suppress(OSError):
        saver.close()
    assert os.listdir(tmp_path) == []


def test_a_failed_write_is_said_at_once_and_raised_when_asked(tmp_path, caplog):
    saver = BackgroundSaver()
    saver.check()
    saver.save({}, tmp_path / 'none' / 'net_g_4.pth')
    with pytest.raises(OSError, match='cannot write'):
        for _ in range(1000):
            saver.check()
            time.sleep(0.01)
    assert 'net_g_4.pth' in caplog.text


def test_numbers_of_numpy_become_plain_ones():
    copied = copy_to_cpu({'best': [np.float64(1.5), np.int64(2)]})
    assert copied == {'best': [1.5, 2]} and [*map(type, copied['best'])] == [float, int]
