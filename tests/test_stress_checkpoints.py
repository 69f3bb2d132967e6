"""Some cases of the stress programs on checkpoints."""

import importlib
import time

import pytest


@pytest.mark.parametrize('kind', ['damage', 'disk'])
def test_a_few_cases_end_well(kind, repository, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(repository / 'tests/stress'))
    budget = importlib.import_module('tally').Budget(time.monotonic() + 600, share=0.03)
    rows = importlib.import_module(kind).run(tmp_path, budget)
    assert sum(row.cases for row in rows) >= 5
    assert [failure for row in rows for failure in row.failures] == []
