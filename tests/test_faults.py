"""Processes of a run that fail, hang or differ: the run ends in time and says why."""

import json
import re

import pytest
from runs import checkpoint, differences, rows

pytestmark = pytest.mark.slow

TIMEOUT = 3  # dist_params.timeout, in seconds


@pytest.fixture
def fork(run_program, repository, tmp_path):
    """Train in forked processes, see faults_program.py."""

    def train(*cases):
        (tmp_path / 'plan.json').write_text(json.dumps({'cases': cases, 'together': 3}))
        program = repository / 'tests/faults_program.py'
        result = run_program(program, tmp_path / 'plan.json')
        assert result.returncode == 0, result.stderr
        return json.loads((tmp_path / 'answers.json').read_text())

    return train


@pytest.fixture
def case(tmp_path):
    """A case for ``fork``: the options of each rank, what goes wrong, flags."""

    def make(ranks, fault=None, *flags, after=None):
        argv = []
        for rank, opt in enumerate(ranks):
            file = tmp_path / f'{opt["name"]}_{rank}.yml'
            file.write_text(json.dumps(opt))
            argv.append(['-opt', str(file), *flags])
        world_size = {'world_size': len(ranks), 'limit': 60}
        return {'argv': argv, 'fault': fault, 'after': after, **world_size}

    return make


def fault(kind, place, rank=1, at=3, at_end=False):
    return {'kind': kind, 'place': place, 'rank': rank, 'at': at, 'at_end': at_end}


def test_a_rank_that_hangs_or_dies_ends_all_and_is_named(fork, case, train_opt, tmp_path):
    """And after a rank was lost, a run that goes on equals one that lost none."""
    kinds = {
        'hang': fault('hang', 'data'),
        'hang_0': fault('hang', 'step', rank=0),
        'stop': fault('stop', 'validation'),
        'stop_0': fault('stop', 'data', rank=0),
        'collective': fault('collective', 'step'),
        'exit': fault('exit', 'step'),
        'kill_0': fault('kill', 'step', rank=0),
        'error': fault('error', 'saving'),
        'error_0': fault('error', 'validation', rank=0),
    }
    short = {'dist_params': {'timeout': TIMEOUT}}
    cases = [case([train_opt(name=name, **short)] * 2, kind) for name, kind in kinds.items()]
    lost = list(kinds).index('exit')
    cases.append(case([train_opt(name='whole')] * 2))
    cases.append(case([train_opt(name='exit')] * 2, None, '--auto_resume', after=lost))
    *answers, whole, goes_on = fork(*cases)
    for (name, kind), answer in zip(kinds.items(), answers, strict=True):
        guilty, other = kind['rank'], 1 - kind['rank']
        statuses, texts = answer['statuses'], answer['texts']
        both = ''.join(texts)
        where = rf'rank {guilty} \(\S+, pid \d+\): last seen in iteration \d \(phase: \w+\), at '
        assert answer['seconds'] < TIMEOUT + 20, name
        if kind['kind'] in ('hang', 'stop'):
            assert statuses[other] == 3, both
            stalled = rf'ERROR: rank {guilty} has not made progress for 3 s'
            if name == 'stop_0':  # with it, the store has stopped
                stalled = r'the store at 127.0.0.1:\d+ has not answered for 3 s'
            assert len(re.findall(stalled, both)) == 1, both
            assert re.search(where, both), both
        if kind['kind'] == 'hang':
            assert statuses[guilty] == 3, both
            assert f'Stacks of rank {guilty}' in texts[guilty]
            assert 'in never_again' in texts[guilty].partition('Stacks of')[2]
            assert 'Stacks' not in texts[other]
        if kind['kind'] in ('exit', 'kill', 'collective'):
            assert statuses[other] == 1, both
            assert both.count('It has ended without a message') == 1, both
            assert re.search(where, both), both
            assert 'Traceback' not in texts[other]
        if kind['kind'] == 'error':
            assert statuses == [1, 1], both
            assert f'ERROR: rank {guilty}: on purpose' in texts[guilty]
            assert both.count('Traceback') == 1, both
    text = next((tmp_path / 'experiments/error').glob('*.log')).read_text()
    assert re.search(r'The run ends: rank 1 \(.*\) has failed: RuntimeError: on purpose', text)

    assert (whole['statuses'], goes_on['statuses']) == ([0, 0], [0, 0])
    assert 'resuming from' in goes_on['texts'][0]
    whole, cut = tmp_path / 'experiments/whole', tmp_path / 'experiments/exit'
    for name in ('net_g_latest.pth', 'net_g_6.pth', '6.state'):
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == []
    assert rows(whole) == rows(cut)


def test_ranks_that_are_late_interrupted_or_do_not_end_are_told_for_what_they_are(
    fork, case, train_opt, tmp_path
):
    kinds = {
        'late in building': fault('late', 'building', at=0),
        'late with the first batch': fault('late', 'data', rank=0, at=1),
        'interrupted at the start': fault('interrupt', 'building', at=0),
        'interrupted': fault('interrupt', 'step'),
        'asked to stop': fault('ask to stop', 'validation', rank=0),
        'left': fault('leave', 'step', at_end=True),
        'failed': fault('error', 'step', at_end=True),
        'does not end': fault('hang', 'step', at=99, at_end=True),
    }
    short = {'dist_params': {'timeout': TIMEOUT}}
    answers = fork(
        *(case([train_opt(name=name, **short)] * 2, kind) for name, kind in kinds.items())
    )
    expected = [[0, 0], [0, 0], [1, 130], [130, 130], [75, 75], [1, 1], [1, 1], [0, 3]]
    texts = dict(zip(kinds, (''.join(answer['texts']) for answer in answers), strict=True))
    for name, answer, statuses in zip(kinds, answers, expected, strict=True):
        assert answer['statuses'] == statuses, name + texts[name]
        assert answer['seconds'] < TIMEOUT + 25, name
        assert 'killed, crashed or out of memory' not in texts[name], texts[name]
    who = r'rank 1 \(\S+, pid \d+\)'
    for name, told in {
        'interrupted at the start': f'{who} was interrupted \\(SIGINT\\)',
        'interrupted': 'WARNING: Interrupted: the state of iteration 3 is saved',
        'asked to stop': 'WARNING: Asked to stop: the state of iteration 3 is saved',
        'left': f'{who} has left the program: sys.exit\\(0\\)',
        'failed': f'{who} has failed: RuntimeError: on purpose',
        'does not end': f'{who}: last seen .* at .* in never_again. Its training is over',
    }.items():
        assert len(re.findall(told, texts[name])) == 1, texts[name]


def test_ranks_have_to_mean_the_same_run_and_score_alike(
    fork, case, train_opt, two_val_opt, image_pairs, tmp_path
):
    """Other options or data end all at once, and one says why; one, two and three processes score
    three images of one set, and one of another, alike.
    """
    other = train_opt(name='options', train__total_iter=8)
    other['train']['optim_g']['lr'] = 1e-4
    gt, lq = image_pairs('more', count=6)
    more = {'datasets__train__dataroot_gt': gt, 'datasets__train__dataroot_lq': lq}
    still = {'train__optim_g__lr': 0.0, 'train__total_iter': 1}
    names = {count: f'of_{count}' for count in (1, 2, 3)}
    first, second, *scored = fork(
        case([train_opt(name='options'), other]),
        case([train_opt(name='data'), train_opt(name='data', **more)]),
        *(case([two_val_opt(name=n, **still)] * count) for count, n in names.items()),
    )
    assert first['statuses'] == [2, 2]
    text = ''.join(first['texts'])
    assert text.count('train.total_iter:') == 1
    assert 'train.total_iter: rank 0: 6; rank 1: 8\n' in text
    assert 'train.optim_g.lr: rank 0: 0.001; rank 1: 0.0001\n' in text
    assert second['statuses'] == [1, 1]
    text = ''.join(second['texts'])
    assert text.count('ERROR: rank') == 1
    assert 'rank 0: 5; rank 1: 6' in text

    assert [set(answer['statuses']) for answer in scored] == [{0}] * 3, scored
    folders = [tmp_path / 'experiments' / name for name in names.values()]
    scores = [[row for row in rows(f) if 'metrics/val/psnr' in row] for f in folders]
    assert scores[0]
    assert scores[0] == scores[1] == scores[2]
    images = [{p.relative_to(f): p.read_bytes() for p in f.rglob('*.png')} for f in folders]
    assert len(images[0]) == 3 + 1
    assert images[0] == images[1] == images[2]
