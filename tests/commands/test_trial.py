"""What a trial of `basicsr tune` counts, and on which images."""

import itertools

import pytest

from basicsr.commands.trial import FewImages, steady, train_shortly
from basicsr.utils.yaml_util import OptionError


def test_the_time_of_an_iteration_is_right_where_batches_come_in_bursts():
    seconds, noise = steady([0.9, 0.1, 0.1, 0.1] * 25)
    assert seconds == pytest.approx(0.3)
    assert noise == pytest.approx(0, abs=1e-9)


def test_a_short_disturbance_does_not_count_but_shows_as_noise():
    seconds, noise = steady([0.1] * 49 + [5.0])
    assert seconds == pytest.approx(0.1)
    assert noise > 0.2
    assert steady([0.2, 0.1, 0.3, 0.1, 0.2])[0] == pytest.approx(0.2)


def test_few_images_come_again_and_again():
    order = list(itertools.islice(FewImages(range(100), seed=3, count=8).stream(0, 1), 24))
    assert len(set(order)) == 8
    assert sorted(order[:8]) == sorted(order[8:16]) == sorted(order[16:])
    small = itertools.islice(FewImages(range(5), seed=3, count=8).stream(0, 1), 5)
    assert sorted(small) == list(range(5))


def test_a_run_that_is_shorter_than_a_trial_is_refused():
    for opt, needed in (({'total_iter': 12}, 13), ({'total_iter': 20, 'net_d_init_iters': 9}, 22)):
        with pytest.raises(OptionError, match=f'total_iter: tuning needs {needed} at least'):
            train_shortly({'train': opt}, 1.0)
