"""What `basicsr tune` tries and takes, given made-up measurements."""

import math
from dataclasses import replace

import pytest

from basicsr.commands.tuning import ACCEPTED, KEYS, Failure, Report, difference, judge, search

GIB = 2**30
WORKERS = 'num_worker_per_gpu'
ON_GPU = Report(
    speed=100.0,
    noise=0.0,
    waiting=0.0,
    memory=4 * GIB,
    losses=[{'l_pix': 0.5}, {'l_pix': 0.4}],
    settings={
        'cache': 'auto',
        'num_worker_per_gpu': 4,
        'prefetch_mode': 'cuda',
        'amp': None,
        'channels_last': False,
        'compile': False,
        'batch_size_per_gpu': 16,
    },
    device='a GPU',
    total_memory=20 * GIB,
    half='bf16',
    cores=16,
    seed=0,
)
ON_CPU = replace(
    ON_GPU, device='the CPU', half=None, settings={**ON_GPU.settings, 'prefetch_mode': 'cpu'}
)


def tuned(plain, outcome, names=tuple(KEYS), tolerance=0.05, memory=0.9):
    """The settings that are accepted, and all (new setting, verdict), of trials with an outcome.

    ``outcome(settings)`` gives what changes in the plain report, or a Failure.
    """

    def measure(settings):
        found = outcome(settings)
        if isinstance(found, Failure):
            return found
        return replace(plain, settings={**plain.settings, **settings}, **found)

    accepted, rows = {}, []
    for settings, name, _, verdict in search(measure, plain, names, tolerance, memory):
        accepted = settings if verdict == ACCEPTED else accepted
        rows.append((f'{name}={settings[name]}', verdict))
    return accepted, rows


def faster(**gains):
    """Settings multiply the speed by these factors, others leave it."""

    def outcome(settings):
        return {'speed': 100.0 * math.prod(gains.get(name, 1.0) for name in settings)}

    return outcome


@pytest.mark.parametrize(
    ('speed', 'noise', 'verdict'),
    [
        (103.1, 0.0, ACCEPTED),
        (102.9, 0.0, 'not 3% faster (+2.9%)'),
        (90.0, 0.0, 'not 3% faster (-10.0%)'),
        (109.0, 0.05, 'not 10% faster (+9.0%)'),
        (111.0, 0.05, ACCEPTED),
    ],
)
def test_a_setting_must_be_faster_than_the_margin_and_twice_the_noise(speed, noise, verdict):
    trial = replace(ON_GPU, speed=speed, noise=noise)
    assert judge('compile', trial, ON_GPU, ON_GPU, 0.05) == verdict


def test_the_losses_of_every_iteration_are_bounded_relative_to_the_plain_ones():
    plain = [{'l_pix': 0.5, 'l_gan': -0.3}, {'l_pix': 0.4, 'l_gan': 0.0}]
    other = [{'l_pix': 0.5, 'l_gan': -0.34}, {'l_pix': 0.41, 'l_gan': 0.01}]
    assert difference(other, plain) == pytest.approx(0.05)
    assert difference(plain, plain) == 0
    for loss, verdict in ((0.419, ACCEPTED), (0.421, 'losses differ by more than 5.0%')):
        trial = replace(ON_GPU, speed=200.0, losses=[{'l_pix': 0.5}, {'l_pix': loss}])
        assert judge('amp', trial, ON_GPU, ON_GPU, 0.05) == verdict


def test_losses_that_are_not_finite_are_never_accepted():
    for value in (math.nan, math.inf):
        trial = replace(ON_GPU, speed=200.0, losses=[{'l_pix': value}, {'l_pix': 0.4}])
        assert judge('amp', trial, ON_GPU, ON_GPU, 0.05) == 'losses differ by more than 5.0%'


def test_the_losses_are_compared_with_the_file_as_it_is_not_with_the_best_so_far():
    def outcome(settings):
        loss = 0.4 * (1 + 0.03 * len(settings))
        return {'speed': 100.0 * 2 ** len(settings), 'losses': [{'l_pix': 0.5}, {'l_pix': loss}]}

    accepted, rows = tuned(ON_GPU, outcome, ('amp', 'channels_last'))
    assert accepted == {'amp': 'bf16'}
    assert rows[-1] == ('channels_last=True', 'losses differ by more than 5.0%')


def test_each_setting_is_tried_on_top_of_those_accepted():
    accepted, rows = tuned(ON_GPU, faster(amp=1.5, compile=1.2))
    assert accepted == {'amp': 'bf16', 'compile': True}
    assert rows == [
        ('amp=bf16', ACCEPTED),
        ('channels_last=True', 'not 3% faster (+0.0%)'),
        ('compile=True', ACCEPTED),
        ('batch_size_per_gpu=32', 'not 3% faster (+0.0%)'),
    ]


def test_what_is_on_already_is_not_tried():
    settings = {**ON_GPU.settings, 'amp': 'fp16', 'channels_last': True, 'compile': {'mode': 'x'}}
    _, rows = tuned(replace(ON_GPU, settings=settings), faster())
    assert [row for row, _ in rows] == ['batch_size_per_gpu=32']


def test_without_a_gpu_its_settings_are_not_tried():
    _, rows = tuned(replace(ON_CPU, memory=9 * GIB), faster())
    assert [row for row, _ in rows] == ['compile=True', 'batch_size_per_gpu=32']


def test_workers_are_doubled_up_to_the_cores_while_data_are_waited_for():
    def outcome(settings):
        workers = settings['num_worker_per_gpu']
        return {'speed': 25.0 * workers, 'waiting': 1 - workers / 32}

    names = ['num_worker_per_gpu']
    waiting = replace(ON_GPU, waiting=0.8, cores=12)
    assert tuned(waiting, outcome, names)[1] == [
        ('num_worker_per_gpu=8', ACCEPTED),
        ('num_worker_per_gpu=12', ACCEPTED),
    ]
    assert tuned(replace(waiting, waiting=0.01), outcome, names)[1] == []
    assert tuned(replace(waiting, cores=4), outcome, names)[1] == []


def test_workers_are_tried_again_when_a_faster_step_waits_for_data():
    def outcome(settings):
        step, data = 150.0 if 'amp' in settings else 100.0, 30 * settings.get(WORKERS, 4)
        return {'speed': min(step, data), 'waiting': max(1 - data / step, 0.0)}

    accepted, rows = tuned(ON_GPU, outcome, ['num_worker_per_gpu', 'amp'])
    assert rows == [('amp=bf16', ACCEPTED), ('num_worker_per_gpu=8', ACCEPTED)]
    assert accepted == {'amp': 'bf16', 'num_worker_per_gpu': 8}


def test_a_trial_is_not_made_twice():
    _, rows = tuned(replace(ON_GPU, waiting=0.5), lambda _: {'waiting': 0.5}, [WORKERS, 'compile'])
    assert [row for row, _ in rows] == ['num_worker_per_gpu=8', 'compile=True']


def test_a_cache_and_a_prefetching_mode_are_tried_where_there_is_none():
    off = {'cache': False, 'prefetch_mode': None}
    for plain, mode in ((ON_GPU, 'cuda'), (ON_CPU, 'cpu')):
        plain = replace(plain, settings={**plain.settings, **off})
        accepted, _ = tuned(plain, faster(cache=2.0, prefetch_mode=2.0), off)
        assert accepted == {'cache': 'auto', 'prefetch_mode': mode}


def test_a_batch_is_doubled_until_samples_come_no_faster():
    def outcome(settings):
        return {'speed': 100.0 * min(settings['batch_size_per_gpu'] / 16, 4) ** 0.5}

    accepted, rows = tuned(ON_GPU, outcome, ['batch_size_per_gpu'])
    assert accepted == {'batch_size_per_gpu': 64}
    assert rows[-1] == ('batch_size_per_gpu=128', 'not 3% faster (+0.0%)')


def test_a_batch_may_have_other_losses():
    outcome = {'speed': 200.0, 'losses': [{'l_pix': 5.0}, {'l_pix': 5.0}]}
    _, rows = tuned(ON_GPU, lambda _: outcome, ['amp', 'batch_size_per_gpu'])
    assert rows[0][1].startswith('losses differ')
    assert rows[1] == ('batch_size_per_gpu=32', ACCEPTED)


def test_a_gpu_that_is_full_ends_the_doubling_and_nothing_else():
    def outcome(settings):
        batch = settings.get('batch_size_per_gpu', 16)
        if batch > 64:
            return Failure(1, 'out of memory')
        return {'speed': 10.0 * batch}

    accepted, rows = tuned(ON_GPU, outcome, ['batch_size_per_gpu'])
    assert accepted == {'batch_size_per_gpu': 64}
    assert rows[-1] == ('batch_size_per_gpu=128', 'failed: out of memory')


def test_a_failure_leaves_the_other_settings_to_be_tried():
    def outcome(settings):
        return Failure(1, 'no compiler') if 'compile' in settings else faster(amp=2.0)(settings)

    accepted, rows = tuned(ON_GPU, outcome)
    assert accepted == {'amp': 'bf16'}
    assert ('compile=True', 'failed: no compiler') in rows
    assert rows[-1][0] == 'batch_size_per_gpu=32'


def test_a_batch_that_a_computer_may_have_no_room_for_is_not_tried():
    def outcome(settings):
        batch = settings['batch_size_per_gpu']
        return {'speed': 10.0 * batch, 'memory': batch * GIB // 4}

    accepted, _ = tuned(ON_CPU, outcome, ['batch_size_per_gpu'])
    assert accepted == {'batch_size_per_gpu': 64}
    assert tuned(ON_CPU, outcome, ['batch_size_per_gpu'], memory=0.3) == ({}, [])
