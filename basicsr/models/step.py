"""One step of an optimizer: micro-batches, mixed precision, clipping, and non-finite values."""

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.errors import UserError

logger = logging.getLogger(__name__)

# The objective of a step: losses by name. Mappings from a generator are computed one at a time,
# each after the previous one has been backpropagated and its graph freed.
Losses = Callable[[], Mapping[str, Tensor] | Iterator[Mapping[str, Tensor]]]

_DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
# Once the loss scale has been halved down to this, the network itself overflows.
_SMALLEST_SCALE = 1.0


class _Taken(Exception):
    """Aborts a forward pass and carries the inputs of a network out of it."""


class Stepper:
    """Performs the optimizer steps of a model according to the options of ``train``.

    It reads ``accumulate``, ``amp``, ``clip_grad_norm``, ``clip_grad_value``, ``freeze`` and
    ``on_nonfinite``. Non-finite values are flagged on the device, without synchronizing, until the
    training loop checks them; in fp16 the gradient scaler skips those steps instead.

    Args:
        train_opt: The options of ``train``.
        device: Where the steps are computed.

    Attributes:
        amp: 'bf16', 'fp16', or None for float32.
        policy: 'stop', 'skip' or 'rollback', of ``on_nonfinite``.
        skipped, in_a_row: With 'skip', the number of iterations with a skipped step, and how many
            of them are the most recent in a row.
    """

    def __init__(self, train_opt: Mapping[str, Any], device: torch.device):
        self.accumulate = train_opt.get('accumulate', 1)
        self.amp = train_opt.get('amp')
        self.device = device
        self.clip_norm = train_opt.get('clip_grad_norm')
        self.clip_value = train_opt.get('clip_grad_value')
        self.freeze = train_opt.get('freeze') or []
        self.policy = train_opt.get('on_nonfinite', 'stop')
        self.skipped = self.in_a_row = 0
        self._scalers: dict[str, torch.amp.GradScaler] = {}
        self._found: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self, networks: Iterable[nn.Module]) -> None:
        """Back up running statistics, so that a skipped batch does not contribute to them."""
        if self.policy == 'skip':
            self._buffers = [(b, b.clone()) for net in networks for b in net.buffers()]

    def autocast(self) -> torch.autocast:
        """The autocast context for networks and losses."""
        dtype = _DTYPES[self.amp] if self.amp else None
        return torch.autocast(self.device.type, dtype, enabled=self.amp is not None)

    def step(
        self, model: Any, label: str, nets: list[nn.Module], optimizer: Optimizer, losses: Losses
    ) -> OrderedDict[str, Tensor]:
        """Perform a step; see ``BaseModel.step``.

        Args:
            nets: The networks that ``optimizer`` trains.
        """
        totals: OrderedDict[str, Tensor] = OrderedDict()

        def gradients() -> Tensor:
            optimizer.zero_grad()
            totals.clear()
            objective: Any = 0
            for share in self.micro_batches(model, nets):
                for values in self._computed(losses):
                    loss: Any = sum(value for value in values.values() if value.requires_grad)
                    self._scaler(label).scale(share * loss).backward()
                    objective += share * loss.detach()
                    for name, value in values.items():
                        totals[name] = totals.get(name, 0) + share * value.detach()
            self._drop_frozen(nets, model.current_iter)
            return objective

        if isinstance(optimizer, torch.optim.LBFGS):
            self._step_of_several(optimizer, label, gradients)
            return totals
        loss, scaler = gradients(), self._scaler(label)
        norms = self._clip(optimizer, label)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
            return OrderedDict(totals, **norms)
        norm = norms.get(f'grad_norm_{label}')
        found = self._note(label, loss, gradient_norm(optimizer) if norm is None else norm)
        if self.policy == 'skip':
            self._step_unless(optimizer, found)
        else:
            optimizer.step()
        return OrderedDict(totals, **norms)

    def _computed(self, losses: Losses) -> Iterator[Mapping[str, Tensor]]:
        with self.autocast():
            computed = losses()
        if isinstance(computed, Mapping):
            yield computed
            return
        while True:
            with self.autocast():
                values = next(computed, None)
            if values is None:
                return
            yield values

    def micro_batches(self, model: Any, nets: list[nn.Module]) -> Generator[float]:
        """Split the batch into ``accumulate`` micro-batches; gradients of ``nets`` accumulate.

        In the loop the batch attributes of the model hold one micro-batch; the value yielded is
        its share of the batch, by which its losses have to be multiplied. Tensors computed in the
        loop, such as ``output``, are concatenated at the end and then treated as batch tensors.
        Gradients are averaged over the ranks in the last micro-batch only.
        """
        values = {name: getattr(model, name, None) for name in model.batch_tensors}
        whole = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if self.accumulate == 1 or not whole:
            yield 1.0
            return
        size = len(next(iter(whole.values())))
        chunks = {name: value.chunk(min(self.accumulate, size)) for name, value in whole.items()}
        sizes = [len(chunk) for chunk in next(iter(chunks.values()))]
        made: dict[str, list[Tensor]] = {}
        try:
            for number, length in enumerate(sizes):
                vars(model).update((name, parts[number]) for name, parts in chunks.items())
                before = dict(vars(model))
                with ExitStack() as contexts:
                    for net in nets:
                        contexts.enter_context(_synchronised(net, number == len(sizes) - 1))
                    yield length / size
                for name, value in vars(model).items():
                    is_new = isinstance(value, Tensor) and value is not before.get(name)
                    if is_new and value.ndim and len(value) == length:
                        made.setdefault(name, []).append(value.detach())
        finally:
            vars(model).update(whole)
        for name, parts in made.items():
            if len(parts) == len(sizes):
                setattr(model, name, torch.cat(parts))
                model.batch_tensors = (*dict.fromkeys((*model.batch_tensors, name)),)

    def first_inputs(self, model: Any, net: nn.Module, losses: Losses) -> tuple[Any, ...]:
        """The inputs of a network's first call when the losses of a micro-batch are computed."""

        def take(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            raise _Taken(inputs)

        bare = getattr(net, 'module', net)
        hook = bare.register_forward_pre_hook(take)
        batches = self.micro_batches(model, [])
        try:
            next(batches)
            next(self._computed(losses))
        except _Taken as taken:
            return tuple(v.detach() if isinstance(v, Tensor) else v for v in taken.args[0])
        finally:
            hook.remove()
            batches.close()
        raise UserError(f'train.channels_last: auto: no loss computes {type(bare).__name__}.')

    def _drop_frozen(self, nets: list[nn.Module], iteration: int) -> None:
        """Drop the gradients of frozen parameters (``freeze``); their moments stay unchanged.

        Clearing ``requires_grad`` would not work: DistributedDataParallel waits for the gradient
        of every parameter that it was built with.
        """
        patterns = [rule['pattern'] for rule in self.freeze if iteration <= rule['until']]
        for net in nets if patterns else ():
            for name, parameter in net.named_parameters():
                if any(re.search(pattern, name) for pattern in patterns):
                    parameter.grad = None

    def _clip(self, optimizer: Optimizer, label: str) -> dict[str, Tensor]:
        """Clip the gradients.

        Returns:
            ``grad_norm_<label>`` before clipping, if gradients are clipped by norm.
        """
        scaler, norms = self._scaler(label), {}
        parameters = [p for group in optimizer.param_groups for p in group['params']]
        if self.clip_norm is not None or self.clip_value is not None:
            scaler.unscale_(optimizer)
        if self.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            norms[f'grad_norm_{label}'] = _whole(norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        return norms

    def _step_of_several(
        self, optimizer: Optimizer, label: str, gradients: Callable[[], Tensor]
    ) -> None:
        """Perform a step of an optimizer that evaluates loss and gradients repeatedly (LBFGS)."""
        if self.amp == 'fp16' or self.clip_norm is not None or self.clip_value is not None:
            raise UserError(
                f'{type(optimizer).__name__} compares gradients with each other, so it cannot be '
                'combined with train.amp: fp16, which scales them, nor with train.clip_grad_norm '
                'or clip_grad_value. Leave these out, or use bf16.'
            )

        def gradients_and_loss() -> Tensor:
            loss, world_size = gradients(), get_dist_info()[1]
            if world_size > 1:  # with different losses, weights would diverge between ranks
                dist.all_reduce(loss)
                loss /= world_size
            return loss

        loss: Any = optimizer.step(gradients_and_loss)  # pyright: ignore (a tensor will do)
        self._note(label, loss, gradient_norm(optimizer))

    def _note(self, label: str, loss: Tensor, norm: Tensor) -> Tensor:
        """Flag a non-finite loss or gradient; every rank has to call it.

        Args:
            label: Label of the network.
            loss: The loss of this rank, a scalar.
            norm: The gradient norm. It counts as non-finite if its square overflows, since that
                would corrupt the second moments of an optimizer.

        Returns:
            1 on all ranks if a loss or gradient of any rank is non-finite, else 0.
        """
        values = torch.stack([loss.to(norm).reshape(()), norm]).detach()
        bad = values.isfinite().logical_not_().float()
        if get_dist_info()[1] > 1:  # losses differ between ranks, but the decision must not
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        found = torch.cat([bad, values[1:].float()])
        if label in self._found:  # of an earlier step of the iteration
            found = torch.stack([found, self._found[label]]).amax(0)
        self._found[label] = found
        return bad.amax()

    def take(self) -> dict[str, Tensor]:
        """Flags and norms since the last call, by label, shape (3,): non-finite loss on any rank,
        non-finite gradient, and gradient norm (the largest of several steps).
        """
        found, self._found = self._found, {}
        return found

    def _step_unless(self, optimizer: Optimizer, found: Tensor) -> None:
        """Step unless non-finite values were found (``on_nonfinite: skip``).

        Fused optimizers decide that on the device. The host has to synchronize for other
        optimizers and for the first step of momentum, whose buffers fused ones would leave unset.
        """
        begins = not optimizer.state and any(g.get('momentum') for g in optimizer.param_groups)
        # The attribute by which GradScaler recognises such optimizers.
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

    def check(self) -> None:
        """Switch to bf16 if fp16 keeps overflowing; synchronizes with the device."""
        scales = {label: scaler.get_scale() for label, scaler in self._scalers.items()}
        if self.amp == 'fp16' and scales and min(scales.values()) < _SMALLEST_SCALE:
            logger.warning(
                'train.amp: fp16 overflows in every step (loss scale %s); continuing in bf16.',
                scales,
            )
            self.amp = 'bf16'
            self._scalers = {}

    def state_dict(self) -> dict[str, Any]:
        scalers = {label: scaler.state_dict() for label, scaler in self._scalers.items()}
        state = {'amp': self.amp, 'scalers': scalers}
        if self.policy == 'skip':
            state['watch'] = {'skipped': self.skipped, 'in_a_row': self.in_a_row}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state['amp'] != self.amp:
            logger.warning(
                'Resume: train.amp stays %s, as in the training state; %s of the option file is '
                'not used.',
                *(state['amp'], self.amp),
            )
        self.amp = state['amp']
        for label, scale in state['scalers'].items():
            self._scaler(label).load_state_dict(scale)
        if 'watch' in state:
            self.skipped, self.in_a_row = state['watch']['skipped'], state['watch']['in_a_row']

    def _scaler(self, label: str) -> torch.amp.GradScaler:
        if label not in self._scalers:
            enabled = self.amp == 'fp16'
            self._scalers[label] = torch.amp.GradScaler(self.device.type, enabled=enabled)
        return self._scalers[label]


def _synchronised(net: nn.Module, is_last: bool) -> AbstractContextManager:
    """The context of a micro-batch: gradients are averaged over the ranks only in the last one."""
    if hasattr(net, 'set_requires_gradient_sync'):  # a sharded network
        net.set_requires_gradient_sync(is_last)  # pyright: ignore[reportCallIssue]
    if isinstance(net, DistributedDataParallel) and not is_last:
        return net.no_sync()
    return nullcontext()


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """The total gradient norm over all parameters of an optimizer, a scalar."""
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return parameters[0].new_zeros(())
    return _whole(nn.utils.get_total_norm(gradients))


def _whole(norm: Any) -> Tensor:
    """A norm as a plain tensor, gathered if the network is sharded."""
    return norm.full_tensor() if hasattr(norm, 'full_tensor') else norm
