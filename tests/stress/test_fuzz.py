"""A small part of what ``python tests/stress fuzz`` tries, and that it finds what it looks for."""

import importlib.util
import random
import time
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location('fuzz', Path(__file__).with_name('fuzz.py'))
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


@pytest.fixture
def attempts(tmp_path):
    def make(kind, count):
        sources, case = tmp_path / 'sources', tmp_path / 'case'
        sources.mkdir()
        make_sources, attempt = fuzz._KINDS[kind]
        make_sources(sources)
        for number in range(count):
            case.mkdir()
            rng = random.Random(f'{kind} {number}')
            yield number, fuzz._problem_of(attempt, sources, case, rng)
            fuzz.shutil.rmtree(case)

    return make


@pytest.mark.parametrize(('kind', 'count'), [('images', 60), ('lists', 40), ('lmdb', 25)])
def test_damaged_inputs_are_read_or_refused_with_a_message(attempts, kind, count):
    assert [found for found in attempts(kind, count) if found[1]] == []


def test_damaged_checkpoints_are_read_or_refused_with_a_message(attempts):
    assert [found for found in attempts('checkpoints', 40) if found[1]] == []


@pytest.mark.slow
def test_changed_option_files_are_read_or_refused_with_a_message(tmp_path):
    tally = fuzz.try_kind('options', tmp_path, fuzz.Budget(time.monotonic() + 600), 25)
    assert tally.cases == 25 and tally.failures == []


def test_a_case_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, 'SECONDS', 0)
    tally = fuzz.try_kind('images', tmp_path, fuzz.Budget(time.monotonic() + 600), 1)
    assert tally.failures == ['fuzz.py images, case 0: no answer within 0 s']


def test_a_traceback_is_a_finding_and_a_message_is_none(tmp_path):
    def fail(error):
        def attempt(guarded, case, rng):
            raise error

        return fuzz._problem_of(attempt, tmp_path, tmp_path, random.Random(0))

    assert fail(FileNotFoundError('no file x')) == ''
    assert fail(IndexError('list index out of range')).startswith('IndexError: list index')


def test_a_changed_file_outside_the_case_is_seen(tmp_path):
    (tmp_path / 'case').mkdir()
    (tmp_path / 'kept').write_text('a')
    before = fuzz._state_of(tmp_path)
    (tmp_path / 'case' / 'x').write_text('b')
    assert fuzz._state_of(tmp_path) == before
    (tmp_path / 'kept').write_text('bc')
    assert fuzz._state_of(tmp_path) != before
