"""Mixed precision, loss scaling and clipping of a model's steps."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from basicsr.utils.errors import UserError

from .nonfinite import NumberWatch, gradient_norm, whole

logger = logging.getLogger(__name__)

_DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
# A loss scale that has been halved so often says that the network itself overflows.
_SMALLEST_SCALE = 1.0


class Precision:
    """How the steps of a model compute: ``train.amp``, ``clip_grad_norm``, ``clip_grad_value``.

    Args:
        train_opt: The options.
        device: Where the steps are made.

    Attributes:
        amp: 'bf16', 'fp16', or None for float32.
        watch: Notes losses and gradients that are not finite, but for those of fp16: its scaler
            leaves out such steps anyway.
    """

    def __init__(self, train_opt: Mapping[str, Any], device: torch.device):
        self.amp = train_opt.get('amp')
        self.device = device
        self.clip_norm = train_opt.get('clip_grad_norm')
        self.clip_value = train_opt.get('clip_grad_value')
        self.watch = NumberWatch(train_opt.get('on_nonfinite', 'stop'))
        self._scalers: dict[str, torch.amp.GradScaler] = {}

    def autocast(self) -> torch.autocast:
        """The context in which networks and losses are computed."""
        dtype = _DTYPES[self.amp] if self.amp else None
        return torch.autocast(self.device.type, dtype, enabled=self.amp is not None)

    def backward(self, loss: Tensor, label: str) -> None:
        """Add the gradients of a loss of the network ``label`` ('g' or 'd')."""
        self._scaler(label).scale(loss).backward()

    def step(
        self, optimizer: Optimizer, label: str, loss: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Clip the gradients and make the step, unless they overflowed.

        Args:
            loss: What the gradients are of, to be watched.

        Returns:
            ``grad_norm_<label>``, before clipping, if gradients are clipped by their norm.
        """
        scaler, norms = self._scaler(label), {}
        parameters = [p for group in optimizer.param_groups for p in group['params']]
        if self.clip_norm is not None or self.clip_value is not None:
            scaler.unscale_(optimizer)
        if self.clip_norm is not None:
            norms[f'grad_norm_{label}'] = whole(
                nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            )
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
            return norms
        norm = norms.get(f'grad_norm_{label}')
        found = self.watch.note(label, loss, gradient_norm(optimizer) if norm is None else norm)
        self.watch.step(optimizer, found)
        return norms

    def step_of_several(
        self, optimizer: Optimizer, label: str, gradients: Callable[[], Tensor]
    ) -> None:
        """Make a step of an optimizer that asks for loss and gradients several times (LBFGS)."""
        if self.amp == 'fp16' or self.clip_norm is not None or self.clip_value is not None:
            raise UserError(
                f'{type(optimizer).__name__} compares gradients with each other: it goes neither '
                'with train.amp: fp16, which scales them, nor with train.clip_grad_norm or '
                'clip_grad_value. Leave these out, or take bf16.'
            )
        loss: Any = optimizer.step(gradients)  # pyright: ignore (a tensor will do)
        self.watch.note(label, loss, gradient_norm(optimizer))

    def check(self) -> None:
        """Go on in bf16 if fp16 overflows again and again; waits for the device."""
        scales = {label: scaler.get_scale() for label, scaler in self._scalers.items()}
        if self.amp == 'fp16' and scales and min(scales.values()) < _SMALLEST_SCALE:
            logger.warning(
                'train.amp: fp16 overflows in every step (loss scale %s); going on in bf16.', scales
            )
            self.amp = 'bf16'
            self._scalers = {}

    def state_dict(self) -> dict[str, Any]:
        scalers = {label: scaler.state_dict() for label, scaler in self._scalers.items()}
        state = {'amp': self.amp, 'scalers': scalers}
        if self.watch.policy == 'skip':
            state['watch'] = self.watch.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state['amp'] != self.amp:
            logger.warning(
                'Resume: train.amp goes on as %s of the training state; %s of the option file is '
                'not used.',
                state['amp'],
                self.amp,
            )
        self.amp = state['amp']
        for label, scale in state['scalers'].items():
            self._scaler(label).load_state_dict(scale)
        if 'watch' in state:
            self.watch.load_state_dict(state['watch'])

    def _scaler(self, label: str) -> torch.amp.GradScaler:
        if label not in self._scalers:
            enabled = self.amp == 'fp16'
            self._scalers[label] = torch.amp.GradScaler(self.device.type, enabled=enabled)
        return self._scalers[label]
