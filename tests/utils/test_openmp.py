import os

import pytest

from basicsr.utils.openmp import spin_briefly


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ({}, '2000'),
        ({'GOMP_SPINCOUNT': '7'}, '7'),
        ({'OMP_WAIT_POLICY': 'active'}, None),
    ],
)
def test_waiting_threads_sleep_soon_unless_the_environment_says_otherwise(
    monkeypatch, given, expected
):
    for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'):
        monkeypatch.setenv(name, '')  # restored afterwards, also if it is not set now
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert os.environ.get('GOMP_SPINCOUNT') == expected
