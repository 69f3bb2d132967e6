"""Load pretrained weights; save and restore the training state of a model."""

import hashlib
import inspect
import logging
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from basicsr.utils.checkpoint import (
    load_checkpoint,
    select_params,
    state_dicts,
    strip_wrapper_prefixes,
    take_below_prefix,
)
from basicsr.utils.errors import UserError
from basicsr.utils.misc import folder_of_networks
from basicsr.utils.text import some
from basicsr.utils.wrong_weights import advice, unlike_kinds

from .averaging import PowerAverages, StochasticAverage
from .optimization import align_state, arguments_of, train_weights
from .posthoc import load_snapshot

logger = logging.getLogger(__name__)

# Progress of a scheduler or parameter group, restored from the state, never set by the options.
_PROGRESS = {
    *('last_epoch', '_step_count', '_last_lr', '_get_lr_called_within_step', '_is_initial'),
    *('T_cur', 'T_i'),  # of CosineAnnealingWarmRestarts
}
_GROUP_PROGRESS = {'params', 'initial_lr', 'lr_before_warmup', 'fused'}
_CONTINUES = (
    'A resume continues with the optimizer and schedule of the state; for others, begin a new run '
    'from the weights (path.pretrain_network_g).'
)


def load_weights(
    net: nn.Module,
    file: str | Path,
    param_key: str | None = 'params',
    strict: bool = True,
    label: str = 'g',
    options: Mapping[str, Any] | None = None,
) -> tuple[str | None, list[str]]:
    """Load weights into an unwrapped network; see ``BaseModel.load_network``.

    Args:
        label: Label of the network, for messages.
        options: Options of the run, for messages.

    Returns:
        The key that was used, and the other keys of the file.
    """
    content = load_checkpoint(file)
    state, used_key = select_params(content, param_key, file)
    others = [
        key
        for key, value in state_dicts(content).items()
        if key != used_key and any(isinstance(item, Tensor) for item in value.values())
    ]
    own = net.state_dict()
    state = take_below_prefix(strip_wrapper_prefixes(state, own), own, file)
    if problem := unlike_kinds(own, state):
        raise UserError(f'{file} {problem}')
    with open(file, 'rb') as opened:
        digest = hashlib.file_digest(opened, 'sha256').hexdigest()[:8]
    also = f' (also there: {", ".join(others)})' if others and used_key else ''
    logger.info(
        'Loading %s model from %s, with param key: [%s]%s. (sha256 %s…)',
        *(type(net).__name__, file, used_key, also, digest),
    )
    if not strict:
        _load_fitting(net, state, file, lambda: _advice(net, state, label, options or {}))
        return used_key, others
    try:
        net.load_state_dict(state, strict=True)
    except RuntimeError as error:
        text = '; '.join(_differences(own, state)) or str(error).replace('\n', ' ')
        raise UserError(
            f'{file} does not fit {type(net).__name__}: {text}. '
            f'{_advice(net, state, label, options or {})}'
        ) from error
    return used_key, others


def _load_fitting(
    net: nn.Module, state: Mapping[str, Tensor], file: str | Path, advise: Any
) -> None:
    own = net.state_dict()
    fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
    share = 100 * len(fitting) / max(len(own), 1)
    logger.info('Loaded %d of %d keys (%.0f %%).', len(fitting), len(own), share)
    for problem in _differences(own, state):
        logger.warning('Not loaded: %s', problem)
    if not fitting:
        raise UserError(f'{file} has nothing that fits {type(net).__name__}. {advise()}')
    net.load_state_dict(fitting, strict=False)


def _advice(net: nn.Module, state: Mapping[str, Tensor], label: str, opt: Mapping[str, Any]) -> str:
    """Advice for the user when weights do not fit a network."""
    if (opt.get('path') or {}).get('resume_state'):
        return 'A resume needs the network that was trained.'
    options = opt.get(f'network_{label}') or {}
    scale = options.get('upscale') or options.get('scale') or opt.get('scale')
    return advice(net.state_dict(), state, label, scale)


def _differences(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Describe the mismatches between ``state`` and the state dict ``own`` of a network."""
    problems = []
    missing, unexpected = sorted(own.keys() - state), sorted(state.keys() - own.keys())
    if missing:
        problems.append(f'missing in the file: {some(missing)}')
    if unexpected:
        problems.append(f'not in the network: {some(unexpected)}')
    shapes = [
        f'{key} {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the network'
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    return problems + ([f'other shapes: {some(shapes)}'] if shapes else [])


def training_state(model: Any, epoch: int, iteration: int) -> dict[str, Any]:
    """Everything a resume needs besides the networks.

    Random numbers are determined by ``manual_seed``, iteration and sample number, so no generator
    state is stored.
    """
    state = {
        'epoch': epoch,
        'iter': iteration,
        'samples': model.samples_seen,
        'batch': model.batch_size,
        'manual_seed': model.opt.get('manual_seed'),
        'optimizers': [optimizer.state_dict() for optimizer in model.optimizers],
        'schedulers': [_without_functions(s.state_dict()) for s in model.schedulers],
        'best_metric_results': model.best_metric_results,
        'types': _types(model),
        'precision': model.stepper.state_dict(),
        'channels_last': model.channels_last,
        **model.extra_state(),
    }
    averages = {label: average.state_dict() for label, average in _stochastic(model).items()}
    return state | ({'swa': averages} if averages else {})


def _stochastic(model: Any) -> dict[str, StochasticAverage]:
    return {
        label: average
        for label, averages in model.averages.items()
        for average in averages
        if isinstance(average, StochasticAverage)
    }


def resume(model: Any, state: Mapping[str, Any]) -> None:
    """Restore optimizers, schedulers, averages and best scores from a training state.

    Raises:
        ValueError: The state belongs to another kind of run.
    """
    for kind in ('optimizers', 'schedulers'):
        if len(state[kind]) != len(getattr(model, kind)):
            raise UserError(
                f'the training state has {len(state[kind])} {kind}, this model '
                f'{len(getattr(model, kind))}: it belongs to another kind of run.'
            )
    if 'types' not in state:
        state = _completed(state, model)
    elif state['types'] != _types(model):
        raise UserError(
            f'the training state is one of {_listed(state["types"])}, the option file asks for '
            f'{_listed(_types(model))}. {_CONTINUES}'
        )
    for optimizer, saved in zip(model.optimizers, state['optimizers'], strict=True):
        _resume_optimizer(optimizer, saved)
    align_state(model.optimizers)  # the earlier run may have used another layout
    train_weights(model.optimizers)
    for scheduler, saved in zip(model.schedulers, state['schedulers'], strict=True):
        _warn_of_changes('scheduler', scheduler.state_dict(), saved, _PROGRESS)
        scheduler.load_state_dict(deepcopy(saved))
    model.best_metric_results = deepcopy(state.get('best_metric_results', {}))
    if 'precision' in state:
        model.stepper.load_state_dict(state['precision'])
    if model.channels_last is None and state.get('channels_last') is not None:
        model.set_layout(state['channels_last'])
    for label, average in _stochastic(model).items():
        if label in state.get('swa', {}):
            average.load_state_dict(state['swa'][label])
    for label, averages in model.averages.items():
        for average in averages:
            if isinstance(average, PowerAverages):
                models = folder_of_networks(model.opt['path'])
                average.load_state_dict(load_snapshot(models, state['iter'], label))


def _completed(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A state of BasicSR 1.x with the additional entries that a resume needs.

    BasicSR 1.x overwrote the scheduled rate during the warm-up, so it is not stored; and newer
    releases of torch have added arguments to optimizers.

    Raises:
        ValueError: It is of other optimizers or schedulers.
    """
    warmup_iter = (model.opt.get('train') or {}).get('warmup_iter', -1)
    optimizers = []
    for optimizer, saved in zip(model.optimizers, state['optimizers'], strict=True):
        own, groups = optimizer.param_groups, saved['param_groups']
        if len(own) == len(groups):  # else torch reports it
            for pair in zip(own, groups, strict=True):
                _check_kind(optimizer, *pair)
            groups = [{**mine, **theirs} for mine, theirs in zip(own, groups, strict=True)]
        if state['iter'] < warmup_iter:
            groups = [{'lr_before_warmup': group['initial_lr'], **group} for group in groups]
        optimizers.append({**saved, 'param_groups': groups})
    for scheduler, saved in zip(model.schedulers, state['schedulers'], strict=True):
        _check_kind(scheduler, scheduler.state_dict(), saved)
    return {**state, 'optimizers': optimizers}


def _check_kind(part: Any, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare the names of an optimizer's or scheduler's entries with those in a state."""
    names = {name for name in saved.keys() - own.keys() if not name.startswith('_')}
    unknown = sorted(names - {'initial_lr', 'verbose'})
    if unknown:
        raise UserError(
            f'the training state is not one of {type(part).__name__}, which has no '
            f'{some(unknown)}. {_CONTINUES}'
        )


def _resume_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    arguments = arguments_of(optimizer)
    for group, saved in zip(optimizer.param_groups, state['param_groups'], strict=False):
        rate = {'lr': saved.get('initial_lr', saved.get('lr_before_warmup', saved['lr']))}
        given = {k: v for k, v in group.items() if k in arguments}
        _warn_of_changes('optimizer', given, {**saved, **rate}, _GROUP_PROGRESS)
    try:
        optimizer.load_state_dict(deepcopy(state))
    except ValueError as error:
        raise UserError(f'the training state does not fit the optimizer: {error}') from error


def _types(model: Any) -> dict[str, list[str]]:
    """Class names of the optimizers and schedulers."""
    kinds = {'optimizers': model.optimizers, 'schedulers': model.schedulers}
    return {kind: [_type_of(part) for part in parts] for kind, parts in kinds.items()}


def _type_of(part: Any) -> str:
    """The class name of an optimizer or scheduler, with those it combines in brackets."""
    inner = getattr(part, '_schedulers', getattr(part, 'optimizers', []))
    names = ', '.join(map(_type_of, inner))
    return f'{type(part).__name__}({names})' if inner else type(part).__name__


def _listed(types: Mapping[str, list[str]]) -> str:
    return ' and '.join(name for names in types.values() for name in names)


def _without_functions(state: Any) -> Any:
    """A scheduler's state without functions, which some schedulers hold but files cannot."""
    if type(state) is dict:
        return {k: _without_functions(v) for k, v in state.items() if not inspect.isroutine(v)}
    return [_without_functions(v) for v in state] if type(state) is list else state


def _warn_of_changes(
    kind: str, current: Mapping[str, Any], saved: Mapping[str, Any], progress: set[str]
) -> None:
    """Warn of edited options that have no effect because the resumed state overrides them."""
    for key in current.keys() & saved.keys() - progress:
        if key == '_schedulers':
            for pair in zip(current[key], saved[key], strict=True):
                _warn_of_changes(kind, *pair, progress)
        elif _as_list(current[key]) != _as_list(saved[key]):
            logger.warning(
                'Resume: %s.%s stays %s, as in the training state; %s of the option file is not '
                'used.',
                *(kind, key, saved[key], current[key]),
            )


def _as_list(value: Any) -> Any:
    """A tuple as a list: files may have either."""
    return list(value) if isinstance(value, tuple) else value
