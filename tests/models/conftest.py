"""Fixtures: options of a model without a run around it."""

import pytest


@pytest.fixture
def base_opt(tmp_path):
    for name in ('models', 'training_states'):
        (tmp_path / name).mkdir()
    return {
        'num_gpu': 0,
        'is_train': True,
        'dist': False,
        'path': {
            'models': str(tmp_path / 'models'),
            'training_states': str(tmp_path / 'training_states'),
        },
        'train': {},
        'val': {},
    }
