"""Errors that users of BasicSR 1.x catch by the type of its assert or look-up."""

import pytest
import torch
from blind import blind

from basicsr.archs.discriminator_arch import VGGStyleDiscriminator
from basicsr.data.data_util import generate_frame_indices, paired_paths_from_folder
from basicsr.models import build_model
from basicsr.models.lr_scheduler import CosineAnnealingRestartLR, MultiStepRestartLR
from basicsr.utils.errors import UserError
from basicsr.utils.file_client import FileClient, LmdbBackend
from basicsr.utils.registry import Registry


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)


def register_twice():
    registry = Registry('thing')
    for number in range(2):
        made = type('Net', (), {'__module__': f'made_{number}'})
        registry.register(made)


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (lambda: VGGStyleDiscriminator(3, 4, 64), 'input_size 64'),
        (lambda: VGGStyleDiscriminator(3, 4)(torch.zeros(1, 3, 128, 64)), '128x64'),
        (lambda: generate_frame_indices(0, 5, 4), 'num_frames must be odd'),
        (lambda: generate_frame_indices(0, 5, 3, 'mirror'), "padding is 'mirror'"),
        (lambda: LmdbBackend(['a', 'b'], 'lq'), '2 db_paths'),
        (lambda: MultiStepRestartLR(optimizer(), [2], restarts=[0, 1]), 'restart_weights'),
        (lambda: CosineAnnealingRestartLR(optimizer(), [2, 2], (1,)), 'restart_weights'),
        (register_twice, 'already registered'),
    ],
)
def test_what_is_an_assertion_upstream_is_one_and_an_error_for_users(wrong, message):
    with pytest.raises(AssertionError, match=message) as caught:
        wrong()
    assert isinstance(caught.value, UserError)


def test_folders_that_do_not_pair_up_are_an_assertion(image_pairs, tmp_path):
    gt, lq = image_pairs()
    (tmp_path / 'data/lq/0001.png').unlink()
    with pytest.raises(AssertionError, match='do not pair up'):
        paired_paths_from_folder([lq, gt], ['lq', 'gt'], '{}')


@pytest.mark.parametrize(
    ('model_type', 'key'),
    [('SRModel', 'network_g'), ('RealESRGANModel', 'network_d'), ('RealESRNetModel', 'gt_usm')],
)
def test_a_required_option_that_is_missing_is_a_key_error(train_opt, model_type, key):
    opt = train_opt() if model_type == 'SRModel' else blind(train_opt(), model_type)
    del opt[key]
    opt |= {'model_type': model_type, 'dist': False, 'is_train': True}
    with pytest.raises(KeyError, match=key) as caught:
        build_model(opt)
    assert isinstance(caught.value, UserError)


def test_unknown_names_are_key_errors_and_unknown_backends_value_errors():
    with pytest.raises(KeyError, match='No object named'):
        Registry('thing').get('Nothing')
    with pytest.raises(ValueError, match="'disc' is unknown"):
        FileClient('disc')
