"""Handle NaN and infinite losses or gradients: stop, skip or roll back (``train.on_nonfinite``).

Returning to a checkpoint and skipping samples is the remedy for loss spikes of
Aakanksha Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022),
https://arxiv.org/abs/2204.02311, sec. 5.1.
"""

import gc
import logging
import math
import shlex
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from basicsr.utils.background_saver import copy_to_cpu
from basicsr.utils.checkpoint import load_checkpoint, save_checkpoint
from basicsr.utils.checkpoint_series import numbered_states
from basicsr.utils.dist_util import barrier, from_master, get_dist_info
from basicsr.utils.errors import NonFiniteError
from basicsr.utils.logger import get_env_info

logger = logging.getLogger(__name__)

MOST_FILES = 20  # incident files that each rank keeps per run
MOST_IN_A_ROW = 10  # consecutive iterations with a skipped step
MOST_ROLLBACKS = 3  # to the same checkpoint
# Warn if a logged loss is _SPIKE times the median of the _LAST ones, given at least _ENOUGH.
_SPIKE, _LAST, _ENOUGH = 10, 100, 20
_TEXTS = ('lq_path', 'gt_path', 'recipe')


class RollBack(Exception):
    """Requests a rollback to a checkpoint, continuing with a later sample."""

    def __init__(self, checkpoint: str, samples: int):
        super().__init__(checkpoint, samples)
        self.checkpoint = checkpoint
        self.samples = samples


@dataclass
class _Iteration:
    """Everything that an incident file would need; tensors stay on their device."""

    number: int
    samples_seen: int
    about: dict[str, Any]
    batch: dict[str, Tensor]
    losses: Mapping[str, Any]
    found: dict[str, Tensor]
    copied: Any  # a CUDA event, or None


class Guard:
    """Checks after each iteration the previous one, whose values no longer need synchronization.

    Every rank has a guard, and all make the same decisions.

    Args:
        model: The trained model.
        writer: Writer for the run's scalars, closed before a rollback.
        start_iter: Iterations completed before this start.
        begin: The training state given in the options, if any.
    """

    def __init__(self, model: Any, writer: Any, start_iter: int = 0, begin: str | None = None):
        self.model = model
        self._start_iter, self._begin = start_iter, begin
        self.writer = writer
        self._stepper = model.stepper
        self.folder = Path(model.opt['path']['experiments_root']) / 'incidents'
        self._pending: deque[_Iteration] = deque()
        # Non-finite from the start, such as masks with -inf.
        self._not_finite = {
            (name, key)
            for name, net in model.trained_networks().items()
            for key, tensor in _numbers(net).items()
            if not tensor.isfinite().all()
        }
        self._logged: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def note(self, current_iter: int, data: Mapping[str, Any]) -> None:
        """Record a completed iteration and its batch, and check the previous one.

        Raises:
            RollBack: With the policy 'rollback'.
            FloatingPointError: With 'stop', or if another policy did not help.
        """
        model, found = self.model, self._found()
        batch = {name: getattr(model, name, None) for name in model.batch_tensors}
        about = {key: data[key] for key in _TEXTS if key in data}
        about['recipe'] = getattr(model, 'recipes', about.get('recipe'))
        copied = None
        if model.device.type == 'cuda':
            copied = torch.cuda.Event()
            copied.record()
        step = _Iteration(
            current_iter,
            model.samples_seen,
            about,
            {name: value for name, value in batch.items() if isinstance(value, Tensor)},
            model.log_dict,
            found,
            copied,
        )
        self._pending.append(step)
        self._look(keep=1)

    def check(self) -> None:
        """Check all iterations and the weights before these are saved or scored."""
        self._look(keep=0)
        for name, net in self.model.trained_networks().items():
            finite = [
                tensor.isfinite().all()
                for key, tensor in _numbers(net).items()
                if (name, key) not in self._not_finite
            ]
            if finite and _on_any_rank(torch.stack(finite).all().logical_not_()):
                self._end(
                    f'{name} has non-finite weights or statistics after iteration '
                    f'{self.model.current_iter}: nothing is saved. {self._advice()}'
                )

    def note_losses(self, current_iter: int, losses: Mapping[str, float]) -> None:
        """Warn of spikes in the logged losses."""
        for name, value in losses.items():
            last = self._logged.setdefault(name, deque(maxlen=_LAST))
            median = statistics.median(last) if len(last) >= _ENOUGH else 0.0
            jumped = name.startswith('l_') and 0 < _SPIKE * median < value < math.inf
            if jumped and name not in self._told:  # warn once per spike
                logger.warning(
                    'Iteration %d: %s is %.3e, %.0f times the median of its last %d logged values.',
                    *(current_iter, name, value, value / median, len(last)),
                )
            (self._told.add if jumped else self._told.discard)(name)
            if math.isfinite(value):
                last.append(value)

    def _advice(self) -> str:
        return _advice(self._stepper.policy, self.model.opt)

    def _found(self) -> dict[str, Tensor]:
        """The flags of an iteration's steps, being copied to the CPU."""
        found = self._stepper.take()
        if not found and self._stepper.amp != 'fp16':  # a user's own training step
            losses = [value for value in self.model.log_dict.values() if isinstance(value, Tensor)]
            if losses:
                bad = torch.stack([loss.isfinite().all() for loss in losses]).all().logical_not_()
                found = {'': F.pad(_on_any_rank(bad).view(1), (0, 2))}
        return {label: value.to('cpu', non_blocking=True) for label, value in found.items()}

    def _look(self, keep: int) -> None:
        while len(self._pending) > keep:
            step = self._pending.popleft()
            if step.copied is not None:
                step.copied.synchronize()
            if any(value[:2].any() for value in step.found.values()):
                self._act(step)
            else:
                self._stepper.in_a_row = 0

    def _act(self, step: _Iteration) -> None:
        means = {k: torch.as_tensor(v, dtype=torch.float32).mean() for k, v in step.losses.items()}
        losses = {k: float(v) for k, v in means.items() if not k.startswith('grad_norm_')}
        broken = [name for name, value in losses.items() if not math.isfinite(value)]
        broken += [f'the gradient of {k}' for k, v in step.found.items() if k and v[1]]
        # A rank with finite losses keeps its batch only if all ranks have finite losses.
        is_own = any(not math.isfinite(value) for value in losses.values())
        of_some = any(value[0] for value in step.found.values())
        file = self._write(step, losses, broken) if is_own or not of_some else None
        what = (
            f'Iteration {step.number}: not finite: {", ".join(broken) or "a loss of another rank"}'
        )
        words = ['basicsr', 'replay', str(file or self.folder / 'FILE')]
        words += ['-opt', self.model.opt.get('option_file', 'FILE.yml')]
        if forced := self.model.opt.get('force_yml'):
            words += ['--force_yml', *forced]
        kept = f' The batch is kept: {shlex.join(words)}'
        if self._stepper.policy == 'skip' and '' not in step.found:
            self._stepper.skipped += 1
            self._stepper.in_a_row += 1
            if self._stepper.in_a_row >= MOST_IN_A_ROW:
                self._end(
                    f'{what}, and so were {MOST_IN_A_ROW} iterations in a row: skipping steps '
                    f'(train.on_nonfinite: skip) does not help. {self._advice()}{kept}'
                )
            if self._stepper.skipped <= MOST_FILES or self._stepper.skipped % 100 == 0:
                logger.warning(
                    '%s; its step is skipped, the %s so far.%s',
                    *(what, _ordinal(self._stepper.skipped), kept),
                )
            return
        if self._stepper.policy == 'rollback':
            self._roll_back(step, what, kept)
        self._end(f'{what}. {self._advice()}{kept}')

    def _end(self, message: str) -> NoReturn:
        """End the run on all ranks, after pending files have been written.

        The launcher kills all others as soon as the first rank exits.
        """
        if self.model.saver is not None:
            self.model.saver.close()
        barrier()
        raise NonFiniteError(message)

    def _roll_back(self, step: _Iteration, what: str, kept: str) -> NoReturn:
        if self.model.saver is not None:
            self.model.saver.close()
        newest = from_master(self._newest_checkpoint())
        if not newest:
            self._end(
                f'{what}, and there is no checkpoint yet to go back to (train.on_nonfinite: '
                f'rollback; one saved by a signal does not count). {self._advice()}{kept}'
            )
        self.writer.close()
        logger.warning('%s.%s', what, kept)
        raise RollBack(newest, step.samples_seen)

    def _newest_checkpoint(self) -> str:
        """The training state to roll back to, or ''.

        States added by a signal do not count: rolling back to one would give a different run than
        one without the signal. States in the folder from before this run do not count either.
        """
        path = self.model.opt['path']
        begin, own = path['resume_state'], numbered_states(path['training_states'])
        if begin and Path(begin).resolve().parent != Path(path['training_states']).resolve():
            own = [state for state in own if int(state.stem) > self._start_iter]
        regular = [state for state in own if self.model.checkpoints.is_regular(state)]
        if not regular:  # under the current options; the options may have changed since
            regular = [state for state in own if load_checkpoint(state).get('regular', True)]
        return str(regular[-1] if regular else self._begin or '')

    def _write(self, step: _Iteration, losses: dict[str, float], broken: list[str]) -> Path | None:
        """Write the batch of an iteration to a file, unless there are ``MOST_FILES``."""
        rank, world_size = get_dist_info()
        count = len(next(iter(step.batch.values()), ()))
        first = step.samples_seen - count * world_size + rank
        file = self.folder / f'{step.number}_{rank}_{first}.pt'
        others = [f for f in self.folder.glob(f'*_{rank}_*.pt') if f != file]
        if len(others) >= MOST_FILES:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            'iter': step.number,
            'rank': rank,
            'manual_seed': self.model.opt['manual_seed'],
            'amp': self._stepper.amp,
            'samples': list(range(first, step.samples_seen, world_size)),
            **step.about,
            'batch': step.batch,
            'losses': losses,
            'not_finite': broken,
            'grad_norm': {label: float(value[2]) for label, value in step.found.items() if label},
            'versions': get_env_info(),
        }
        save_checkpoint(copy_to_cpu(content), file)
        return file


def with_rollbacks(train: Callable[[dict, int | None], None], opt: dict) -> None:
    """Train, and restart from the last checkpoint whenever the guard requests a rollback.

    Args:
        train: Called with the options and the number of the sample to continue with; None
            continues with that of the checkpoint.
        opt: The complete options.
    """
    counts: Counter[str] = Counter()
    own, samples = deepcopy(opt), None
    while True:
        try:
            return train(own, samples)
        except RollBack as back:
            checkpoint, samples = back.checkpoint, back.samples
        counts[checkpoint] += 1
        if counts[checkpoint] > MOST_ROLLBACKS:
            raise NonFiniteError(
                f'{MOST_ROLLBACKS} rollbacks to {checkpoint} did not help. '
                f'{_advice("rollback", opt)}'
            )
        logger.warning(
            'Back to %s, continuing with sample %d (train.on_nonfinite: rollback, the %s of %d).',
            *(checkpoint, samples, _ordinal(counts[checkpoint]), MOST_ROLLBACKS),
        )
        own = {**deepcopy(opt), 'auto_resume': False}
        own['path']['resume_state'] = checkpoint
        gc.collect()  # free the previous model and loader
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _numbers(net: torch.nn.Module) -> dict[str, Any]:
    """The floating-point parameters and buffers of a network, as this rank's shard."""
    tensors: list[tuple[str, Any]] = [*net.named_parameters(), *net.named_buffers()]
    return {k: getattr(t, 'to_local', t.detach)() for k, t in tensors if t.is_floating_point()}


def _on_any_rank(flag: Tensor) -> Tensor:
    """1 if a flag is true on any rank, else 0."""
    flag = flag.float()
    if get_dist_info()[1] > 1:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


def _advice(policy: str, opt: Mapping[str, Any]) -> str:
    """Advice when a policy has ended the run; a resume would keep the learning rate."""
    saved = bool(numbered_states(opt['path']['training_states']))
    anew = 'Begin a new run with a lower learning rate'
    if saved:
        anew += ' (path.pretrain_network_g: the last weights)'
    if policy == 'stop' and saved:
        return f'{anew}, or resume (--auto_resume) with train.on_nonfinite: skip or rollback.'
    return f'{anew}, or with train.on_nonfinite: skip.' if policy == 'stop' else f'{anew}.'


def _ordinal(number: int) -> str:
    endings = {1: 'st', 2: 'nd', 3: 'rd'}
    return f'{number}{"th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")}'
