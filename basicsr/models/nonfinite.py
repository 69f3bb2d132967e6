"""Noticing in a step that a loss or a gradient is not finite, without waiting for the device."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from basicsr.utils.dist_util import get_dist_info


class NumberWatch:
    """Notes of each optimizer's step whether its numbers are finite: ``train.on_nonfinite``.

    What it finds stays on the device until the training loop looks at it, see ``incidents``.

    Args:
        policy: 'stop', 'skip' or 'rollback'.

    Attributes:
        skipped, in_a_row: With 'skip', iterations of which a step has been left out, and how many
            of these were the last ones.
    """

    def __init__(self, policy: str = 'stop'):
        self.policy = policy
        self.skipped = 0
        self.in_a_row = 0
        self._found: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self, networks: Callable[[], Mapping[str, nn.Module]]) -> None:
        """Keep the running statistics before an iteration: a batch that is left out enters none."""
        if self.policy == 'skip':
            self._buffers = [(b, b.clone()) for net in networks().values() for b in net.buffers()]

    def note(self, label: str, loss: Tensor | None, norm: Tensor) -> Tensor:
        """Note the numbers of a step; every rank has to call it.

        Args:
            label: Of the network.
            loss: Of this rank, a scalar.
            norm: Of the gradient. One whose square overflows counts as not finite, too: it would
                spoil the moments of an optimizer.

        Returns:
            1 on all ranks if a number of any of them is not finite, else 0.
        """
        own = norm if loss is None else loss.to(norm).reshape(())
        values = torch.stack([own, norm]).detach()
        bad = values.isfinite().logical_not_().float()
        if get_dist_info()[1] > 1:  # losses differ, and what follows must not
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        self._found[label] = torch.cat([bad, values[1:].float()])
        return bad.amax()

    def take(self) -> dict[str, Tensor]:
        """What has been noted since the last time, by label: (3,), whether a loss of any rank or
        the gradient is not finite, and the gradient's norm.
        """
        found, self._found = self._found, {}
        return found

    def step(self, optimizer: Optimizer, found: Tensor) -> None:
        """Make a step; with 'skip' only if nothing was found.

        A fused optimizer decides that on the device; for others, and where momentum begins, which
        fused ones would leave unset, the host has to wait.
        """
        if self.policy != 'skip':
            optimizer.step()
            return
        begins = not optimizer.state and any(g.get('momentum') for g in optimizer.param_groups)
        # As GradScaler asks for it.
        if getattr(optimizer, '_step_supports_amp_scaling', False) and not begins:
            scaled: Any = optimizer
            scaled.found_inf, scaled.grad_scale = found, None
            try:
                optimizer.step()
            finally:
                del scaled.found_inf, scaled.grad_scale
        elif not found.item():
            optimizer.step()
        for buffer, before in self._buffers:
            buffer.copy_(torch.where(found > 0, before, buffer))

    def state_dict(self) -> dict[str, int]:
        return {'skipped': self.skipped, 'in_a_row': self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.skipped, self.in_a_row = state['skipped'], state['in_a_row']


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """The norm of all gradients of an optimizer, a scalar."""
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return parameters[0].new_zeros(())
    return whole(nn.utils.get_total_norm(gradients))


def whole(norm: Any) -> Tensor:
    """A norm as a plain tensor, also of a network that is split over the processes."""
    return norm.full_tensor() if hasattr(norm, 'full_tensor') else norm
