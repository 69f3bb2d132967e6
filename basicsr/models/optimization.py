"""Build optimizers and parameter groups from options."""

import inspect
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from basicsr.data import gpus_per_process
from basicsr.data.progressive import training_stages
from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.errors import ArgumentError, UserError
from basicsr.utils.registry import argument_problems, import_name, wrong_kinds
from basicsr.utils.text import did_you_mean

logger = logging.getLogger(__name__)

# Options of every optimizer that are not arguments of its class.
_OWN_ARGUMENTS = {'groups', 'decay_norms'}
# Arguments of an optimizer that choose how it computes.
_IMPLEMENTATIONS = {'fused', 'foreach', 'capturable', 'differentiable'}
_TRAINED = 'trained_weight'  # key in the state of schedule-free optimizers
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build_optimizer(name: str, params: Iterable, **options: Any) -> Optimizer:
    """An optimizer of ``torch.optim`` by the name of its class, or any other as ``module:Class``.

    Its fused implementation is used where there is one, unless an option chooses another.

    Args:
        params: Parameters, or groups of them.
        options: Its other arguments.
    """
    optimizer_class, params = _optimizer_class(name), list(params)
    if optimizer_class is torch.optim.Muon:
        return _build_muon(params, **options)
    return _build(optimizer_class, params, options)


def _build(optimizer_class: type[Optimizer], params: list, options: dict[str, Any]) -> Optimizer:
    try:
        has_fused = 'fused' in inspect.signature(optimizer_class).parameters
        chosen = options.keys() & _IMPLEMENTATIONS
        if has_fused and not chosen and all(_can_be_fused(p, optimizer_class) for p in params):
            options = options | {'fused': True}
        return optimizer_class(params, **options)
    except (LookupError, TypeError, ValueError) as error:
        raise ArgumentError(
            f'{error}, while building {optimizer_class.__name__} from {options}'
        ) from error


def _can_be_fused(params: Tensor | Mapping[str, Any], optimizer_class: type[Optimizer]) -> bool:
    """Whether torch has a fused optimizer for a parameter, or for all of a group."""
    if isinstance(params, Mapping):
        return all(_can_be_fused(parameter, optimizer_class) for parameter in params['params'])
    is_sharded = hasattr(params, 'full_tensor')
    if is_sharded and optimizer_class not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return params.is_floating_point() and params.device.type in ('cpu', 'cuda')


def arguments_of(optimizer: Optimizer) -> set[str]:
    """Names of the arguments of an optimizer, or of those that it is composed of."""
    parts = getattr(optimizer, 'optimizers', [optimizer])
    return {name for part in parts for name in inspect.signature(type(part)).parameters}


@torch.no_grad()
def align_state(optimizers: Iterable[Optimizer]) -> None:
    """Give moments the memory layout of their parameters, which fused optimizers assume."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                is_like = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_like and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


@torch.no_grad()
def train_weights(optimizers: Iterable[Optimizer]) -> None:
    """Restore the weights in training, after ``evaluation_weights``."""
    for optimizer in filter(has_two_weights, optimizers):
        optimizer.train()  # pyright: ignore[reportAttributeAccessIssue]
        for parameter, state in optimizer.state.items():
            if _TRAINED in state:
                parameter.copy_(state.pop(_TRAINED))


@contextmanager
def evaluation_weights(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Within the block networks have the weights to evaluate and save.

    Schedule-free optimizers (Aaron Defazio et al., "The Road Less Scheduled", NeurIPS 2024,
    https://arxiv.org/abs/2405.15682) take gradients at other weights, and switch with ``train`` and
    ``eval``. Switching back and forth rounds, so the trained weights are kept in the optimizer's
    state, and thus in a training state that is saved within the block.
    """
    optimizers = list(optimizers)
    for optimizer in filter(has_two_weights, optimizers):
        for parameter, state in optimizer.state.items():
            state.setdefault(_TRAINED, parameter.detach().clone())
        optimizer.eval()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        train_weights(optimizers)


def has_two_weights(optimizer: Optimizer) -> bool:
    """Whether it is a schedule-free optimizer."""
    return hasattr(optimizer, 'train') and hasattr(optimizer, 'eval')


class JointOptimizer(Optimizer):
    """Several optimizers as one, with their groups one after the other."""

    def __init__(self, optimizers: list[Optimizer]):
        self.optimizers = optimizers
        super().__init__([group for part in optimizers for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the optimizers work on the groups and the state of this one."""
        groups = iter(self.param_groups)
        for part in self.optimizers:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: None = None) -> None:
        for part in self.optimizers:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _build_muon(
    params: list, others: Mapping[str, Any] | None = None, **options: Any
) -> JointOptimizer:
    """Muon for matrices, the optimizer that ``others`` describes for all other parameters."""
    groups = params if isinstance(params[0], dict) else [{'params': params}]
    matrices, rest = (
        [
            {**group, 'params': chosen}
            for group in groups
            if (chosen := [p for p in group['params'] if (p.ndim == 2) is is_matrix])
        ]
        for is_matrix in (True, False)
    )
    if not matrices:
        raise UserError(
            'Muon trains matrices, the weights of linear layers, and this network has none: its '
            'convolutions are not matrices. Use AdamW, or your own optimizer as module:Class.'
        )
    parts = [_build(torch.optim.Muon, matrices, options)]
    if rest:
        if not others:
            raise UserError(
                'Muon trains only matrices, and this network has other parameters (biases, norms, '
                'convolutions): give these one, such as others: {type: AdamW, lr: 2e-4}.'
            )
        other = dict(others)
        parts.append(build_optimizer(other.pop('type'), rest, **other))
    return JointOptimizer(parts)


def optimizer_problems(options: Mapping[str, Any]) -> list[str]:
    """What keeps an optimizer from being built from its options, such as ``train.optim_g``."""
    if not isinstance(options.get('type'), str):
        return ['needs a type, such as {type: Adam, lr: 1e-4}.']
    try:
        optimizer_class = _optimizer_class(options['type'])
    except ValueError as error:
        return [str(error)]
    own = _OWN_ARGUMENTS | ({'others'} if optimizer_class is torch.optim.Muon else set())
    described = {key: value for key, value in options.items() if key not in own | {'type'}}
    problems = argument_problems(optimizer_class, described, ('params',))
    others = {key: value for key, value in described.items() if key != 'lr'}
    problems += [f'{key} {problem}' for key, problem in wrong_kinds(optimizer_class, others)]
    if not isinstance(options.get('decay_norms'), bool | None):
        problems.append(f'decay_norms must be true or false, got {options["decay_norms"]!r}.')
    try:
        _check_groups([] if options.get('groups') is None else options['groups'])
    except UserError as error:
        problems.append(str(error))
    parts = [options, *(part for part in _parts(options) if isinstance(part, Mapping))]
    for part in parts:
        rate = part.get('lr', options.get('lr'))
        if isinstance(rate, str):
            problems.append(f"lr is the string '{rate}': write the number without quotes.")
        elif (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf
        ):
            problems.append(f'needs a learning rate, such as lr: 1e-4; got {rate}.')
    return list(dict.fromkeys(problems))


def described_optimizer(
    opt: Mapping[str, Any], key: str, nets: Mapping[str, nn.Module]
) -> tuple[str, list[dict], dict[str, Any]]:
    """Name, parameter groups and other arguments of the optimizer ``train.<key>``.

    Args:
        opt: All options.
        nets: Networks to train, by label.
    """
    options = dict(opt['train'].get(key) or {})
    if problems := optimizer_problems(options):
        raise UserError(f'train.{key}: {" ".join(problems)}')
    name = options.pop('type')
    net = next(iter(nets.values())) if len(nets) == 1 else nn.ModuleDict(nets)
    frozen = [n for n, p in net.named_parameters() if not p.requires_grad]
    if frozen:
        logger.warning('Params %s will not be optimized.', ', '.join(frozen))
    groups, options = parameter_groups(net, options)
    if isinstance(options.get('others'), dict):
        options['others'] = dict(options['others'])
    factor = learning_rate_factor(opt)
    for described in (options, options.get('others') or {}, *groups):
        if 'lr' in described:
            described['lr'] *= factor
    return name, groups, options


def check_group_arguments(optimizer: Optimizer, groups: list[dict], key: str) -> None:
    """Refuse groups of ``train.<key>`` with an argument that their optimizer does not have."""
    given = {argument for group in groups for argument in group}
    for unknown in given - {'params', *optimizer.defaults}:
        if optimizer.defaults:  # several optimizers in one have no defaults
            hint = did_you_mean(unknown, optimizer.defaults)
            raise UserError(f"train.{key}: groups have no argument '{unknown}'{hint}")


def learning_rate_factor(opt: Mapping[str, Any]) -> float:
    """The factor of all learning rates by ``train.scale_lr``, for the batch of this run."""
    rule = opt['train'].get('scale_lr')
    if not rule:
        return 1.0
    gpus = gpus_per_process(opt['num_gpu'], opt['dist']) * get_dist_info()[1]
    batch_size = training_stages(opt['datasets']['train'])[0].batch_size * gpus
    ratio = batch_size / rule['batch']
    factor = math.sqrt(ratio) if rule['rule'] == 'sqrt' else ratio
    logger.info('Learning rates are multiplied by %g (train.scale_lr).', factor)
    return factor


def _parts(options: Mapping[str, Any]) -> list[Any]:
    """The sections of an optimizer's options that may have a learning rate of their own."""
    groups = options.get('groups')
    return [options.get('others'), *(groups if isinstance(groups, list) else [])]


def _optimizer_class(name: str) -> type[Optimizer]:
    if ':' in name:
        return import_name(name, 'optimizer', Optimizer)
    known = {key: value for key, value in vars(torch.optim).items() if _is_optimizer(value)}
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(f"optimizer '{name}' is not in torch.optim{hint} (others: module:Class)")
    return known[name]


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, Optimizer)
        and value.__name__ not in ('Optimizer', 'SparseAdam')  # it takes only sparse gradients
    )


def parameter_groups(net: nn.Module, options: dict[str, Any]) -> tuple[list[dict], dict[str, Any]]:
    """The trained parameters of a network in groups, and the options without those for the groups.

    Args:
        options: The options of an optimizer. ``groups``: a list of ``{pattern, lr, weight_decay,
            …}``; a parameter is in the first group whose pattern (a regular expression) is found in
            its name, else in the rest. ``decay_norms: false``: norms and biases do not decay.
    """
    options = dict(options)
    described = options.pop('groups', None) or []
    decay_norms = options.pop('decay_norms', None) is not False
    _check_groups(described)
    plain = set() if decay_norms else _norms_and_biases(net)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        number = next(
            (i for i, group in enumerate(described) if re.search(group['pattern'], name)),
            len(described),
        )
        key = number, name in plain
        if key not in groups:
            own = dict(described[number]) if number < len(described) else {}
            own.pop('pattern', None)
            groups[key] = {'params': [], **own, **({'weight_decay': 0.0} if name in plain else {})}
        groups[key]['params'].append(parameter)
    for number, group in enumerate(described):
        if not any(key[0] == number for key in groups):
            raise UserError(f"groups: no trained parameter has '{group['pattern']}' in its name.")
    return [groups[key] for key in sorted(groups)], options


def _check_groups(described: Any) -> None:
    if not isinstance(described, list) or not all(
        isinstance(group, dict) and 'pattern' in group for group in described
    ):
        raise UserError(
            f'groups must be a list, such as [{{pattern: body, lr: 1e-5}}]: {described}'
        )
    for group in described:
        try:
            re.compile(group['pattern'])
        except (re.error, TypeError) as error:
            raise UserError(f"groups: pattern '{group['pattern']}': {error}.") from error


def _norms_and_biases(net: nn.Module) -> set[str]:
    names = {name for name, _ in net.named_parameters() if name.split('.')[-1] == 'bias'}
    for prefix, module in net.named_modules():
        if isinstance(module, _NORMS):
            names |= {f'{prefix}.{name}'.lstrip('.') for name, _ in module.named_parameters()}
    return names


def check_freeze(rules: Iterable[Mapping[str, Any]], nets: Mapping[str, nn.Module]) -> None:
    """Refuse entries of ``train.freeze`` that match no parameter of the networks."""
    names = [name for net in nets.values() for name, _ in net.named_parameters()]
    for rule in rules:
        try:
            found = any(re.search(rule['pattern'], name) for name in names)
        except re.error as error:
            raise UserError(f"train.freeze: pattern '{rule['pattern']}': {error}.") from error
        if not found:
            raise UserError(f"train.freeze: no parameter has '{rule['pattern']}' in its name.")
