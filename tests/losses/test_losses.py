import logging
import traceback

import pytest
import torch

import basicsr.losses
from basicsr.losses import build_loss
from basicsr.losses.basic_loss import L1Loss
from basicsr.utils.registry import LOSS_REGISTRY


def test_a_loss_is_built_from_options_that_stay_as_they_are(caplog):
    opt = {'type': 'CharbonnierLoss', 'loss_weight': 0.5, 'eps': 1e-3}
    with caplog.at_level(logging.INFO, 'basicsr.losses'):
        first, second = build_loss(opt), build_loss(opt)
    assert opt == {'type': 'CharbonnierLoss', 'loss_weight': 0.5, 'eps': 1e-3}
    assert (first.loss_weight, second.eps) == (0.5, 1e-3)
    assert caplog.messages == ['Loss [CharbonnierLoss] is created.'] * 2


def test_a_wrong_argument_names_the_loss_and_its_options():
    with pytest.raises(TypeError, match='loss_wieght') as info:
        build_loss({'type': 'L1Loss', 'loss_wieght': 2})
    message = ''.join(traceback.format_exception(info.value))
    assert "while building loss 'L1Loss' from {'type': 'L1Loss', 'loss_wieght': 2}" in message


def test_an_unknown_name_or_none_is_an_error_that_says_so():
    with pytest.raises(KeyError, match='Did you mean L1Loss'):
        build_loss({'type': 'L1Los'})
    with pytest.raises(KeyError, match="have no 'type', the name of the loss"):
        build_loss({'loss_weight': 1})


def test_losses_can_be_imported_from_the_package_and_from_the_old_module():
    from basicsr.losses import losses

    for name in losses.__all__:
        assert getattr(basicsr.losses, name) is getattr(losses, name)
        if name[0].isupper():
            assert getattr(losses, name) is LOSS_REGISTRY.get(name)
    assert len(losses.__all__) == 11
    with pytest.raises(ImportError, match='NoLoss'):
        from basicsr.losses import NoLoss  # noqa: F401 (the import is the test)


def test_a_user_loss_is_built_by_its_name(monkeypatch):
    monkeypatch.setattr(LOSS_REGISTRY, '_obj_map', LOSS_REGISTRY._obj_map.copy())

    @LOSS_REGISTRY.register()
    class HalvedL1Loss(L1Loss):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) / 2

    loss = build_loss({'type': 'HalvedL1Loss'})
    assert loss(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)) == 0.5
