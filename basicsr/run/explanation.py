"""Predict a training from its options: learning rates, costs of networks, amounts of data."""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from basicsr.data import build_dataset
from basicsr.data.progressive import Schedule, crop_sizes
from basicsr.data.samplers import build_sampler
from basicsr.models.lr_scheduler import CosineAnnealingRestartLR, MultiStepRestartLR
from basicsr.models.networks import Networks
from basicsr.models.optimization import build_optimizer
from basicsr.models.restore import receptive_halo
from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .data_checks import explained
from .loaders import schedule_of_all_ranks

_POINTS = 60  # points of a curve
_MOST_CHANGES = 24  # changes of a rate that are listed one by one
_INPUT_CHANNELS = ('num_in_ch', 'in_channels', 'in_chans')
_PROBE_PIXELS = 2 * 16 * (80 + 272 + 1040)  # in all images that ``receptive_halo`` uses


class Rates(NamedTuple):
    """The learning rates of a training.

    Attributes:
        names: Names of the parameter groups: the label of the optimizer, and the number of the
            group if there are several.
        at: The rates of all groups by iteration: wherever they change, or at many points.
        rows: Iterations that summarise the curve.
    """

    names: list[str]
    at: dict[int, list[float]]
    rows: list[int]


def learning_rates(opt: dict) -> Rates:
    """The learning rates that a training with these options would have."""
    nets = Networks(opt | {'num_gpu': 0, 'dist': False})
    nets.opt, names = opt, []
    for label in _trained_labels(opt):
        setattr(nets, f'net_{label}', ARCH_REGISTRY.build(opt[f'network_{label}']))
        nets.labels.append(label)
        if label == 'g' and opt['train']['swa']:
            nets.add_averages(label)
        groups = nets.add_optimizer(label).param_groups
        names += [label] if len(groups) == 1 else [f'{label}.{i}' for i in range(len(groups))]
    nets.setup_schedulers()
    total, warmup = opt['train']['total_iter'], opt['train']['warmup_iter']
    marks = _marks(nets.schedulers) if not (opt['train']['swa'] or {}).get('lr') else None
    at = _rates_at(nets, _points(total, warmup, marks), warmup, can_jump=marks is not None)
    return Rates(names, at, _rows(at, total, warmup, marks or set()))


def _trained_labels(opt: Mapping[str, Any]) -> list[str]:
    keys = [key.removeprefix('optim_') for key in opt['train'] if key.startswith('optim_')]
    return [label for label in keys if opt.get(f'network_{label}')]


def _marks(schedulers: list[Any]) -> set[int] | None:
    """Iterations after which schedules change their course; None if they must be stepped through.

    The rate of this package's schedules follows from the iteration alone, at a milestone also from
    the rate before it.
    """
    marks: set[int] = set()
    for scheduler in schedulers:
        if isinstance(scheduler, MultiStepRestartLR):
            marks |= {*scheduler.milestones, *scheduler.restarts}
        elif isinstance(scheduler, CosineAnnealingRestartLR):
            marks |= {
                end + 1 for end in scheduler.cumulative_period
            }  # an end belongs to its period
        else:
            return None
    return marks


def _points(total: int, warmup: int, marks: set[int] | None) -> list[int]:
    """Iterations at which rates are computed, in order: all of them if ``marks`` is None."""
    if marks is None:
        return list(range(1, total + 1))
    spread = {1 + round(i * (total - 1) / (_POINTS - 1)) for i in range(_POINTS)}
    quarters = {round(total * i / 4) for i in range(1, 5)}
    around = {mark + i for mark in marks for i in (0, 1)}
    return sorted(p for p in {warmup} | spread | quarters | around if 1 <= p <= total)


def _rates_at(
    nets: Networks, points: list[int], warmup: int, can_jump: bool
) -> dict[int, list[float]]:
    found = {}
    with warnings.catch_warnings(action='ignore'):  # of steps before the optimizer's
        for point in points:
            for scheduler in nets.schedulers if can_jump and point > 1 else ():
                scheduler.last_epoch = point - 2
            nets.update_learning_rate(point, warmup)
            found[point] = nets.get_current_learning_rate()
    return found


def _rows(at: Mapping[int, list[float]], total: int, warmup: int, marks: set[int]) -> list[int]:
    """The iterations at which rates change, or a few if they change all the time."""
    points = list(at)
    changes = [b for a, b in pairwise(points) if at[a] != at[b] and b > warmup]
    if len(changes) > _MOST_CHANGES:
        quarters = {round(total * i / 4) for i in range(1, 5)}
        changes = [point for point in points if point in quarters | {m + 1 for m in marks}]
    return sorted({1, *changes, total} | ({warmup} & at.keys()))


class Size(NamedTuple):
    """The cost of a network.

    Attributes:
        input, output: Shapes of a micro-batch.
        parameters, trained: Number of parameters, and of those that are trained.
        macs: Multiply-adds of one image of the training crop, in inference.
        activations: Bytes that the backward pass needs of one micro-batch, in float32.
        state: Bytes of weights, gradients, moments of the optimizer and averages, in float32.
    """

    input: tuple[int, ...]
    output: tuple[int, ...]
    parameters: int
    trained: int
    macs: int
    activations: int
    state: int


def size_of(opt: dict, label: str) -> Size:
    """The cost of a network for the training crop, traced on the meta device.

    Raises:
        ValueError: The network cannot be traced without values.
    """
    options = opt[f'network_{label}']
    with torch.device('meta'):
        net = ARCH_REGISTRY.build(options)
    side, batch = crop_of(opt, label), _micro_batch(opt)
    shape = (batch, input_channels(options), side, side)
    with explained('it cannot be traced without values'):
        output, activations = _saved_for_backward(net.train(), shape)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.eval()(torch.zeros((1, *shape[1:]), device='meta'))
    parameters = sum(p.numel() for p in net.parameters())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    averages = bool(opt['train']['ema_decay']) + bool(opt['train']['swa']) if label == 'g' else 0
    state = 4 * (parameters * (1 + averages) + trained * (1 + _moments(opt, label)))
    macs = counter.get_total_flops() // 2
    return Size(shape, output, parameters, trained, macs, activations, state)


def crop_of(opt: Mapping[str, Any], label: str) -> int:
    """Side of the largest training crop that a network sees: of GT for discriminators, else LQ."""
    sizes = crop_sizes(opt['datasets']['train']) or [opt.get('gt_size')]
    if sizes[0] is None:
        raise UserError('datasets.train has no gt_size, so there is no crop to go by')
    return max(sizes) if label.startswith('d') else max(sizes) // (opt['scale'] or 1)


def input_channels(options: Mapping[str, Any]) -> int:
    """Channels of the images that a network takes; 3 if no argument with a usual name tells."""
    name = next((name for name in _INPUT_CHANNELS if argument(options, name) is not None), '')
    return argument(options, name) or 3


def argument(options: Mapping[str, Any], name: str) -> Any:
    """The value of a network's argument, given or by default; None if there is no such argument."""
    if name in options:
        return options[name]
    parameter = inspect.signature(ARCH_REGISTRY.get(options['type'])).parameters.get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _micro_batch(opt: Mapping[str, Any]) -> int:
    stages = Schedule(opt['datasets']['train']).stages
    return math.ceil(max(stage.batch_size for stage in stages) / opt['train']['accumulate'])


def _saved_for_backward(net: nn.Module, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Shape of the output, and bytes of the tensors, except weights, that a backward pass needs."""
    own = {tensor.untyped_storage()._cdata for tensor in [*net.parameters(), *net.buffers()]}
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = net(torch.zeros(shape, device='meta'))
    return tuple(output.shape), sum(s.nbytes() for key, s in saved.items() if key not in own)


def _moments(opt: Mapping[str, Any], label: str) -> int:
    """Values that the optimizer keeps for each weight, counted after one step on a small matrix."""
    options = dict(opt['train'].get(f'optim_{label}') or {})
    if not options:
        return 0
    for key in ('groups', 'decay_norms'):
        options.pop(key, None)
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.ones(4, 4)
    optimizer = build_optimizer(options.pop('type'), [weight], **options)
    optimizer.step(lambda: 0.0)
    state = optimizer.state[weight].values()
    return sum(isinstance(v, torch.Tensor) and v.shape == weight.shape for v in state)


def halo(opt: Mapping[str, Any], macs: int, limit: float = math.inf) -> int | None:
    """LQ pixels that an output pixel of network_g sees to each side; None: the whole image.

    Args:
        macs: Multiply-adds of the network for a training crop.
        limit: Most multiply-adds to spend on the measurement.

    Raises:
        ValueError: It would take more, or the network cannot be measured.
    """
    options, side = opt['network_g'], crop_of(opt, 'g')
    if macs / side**2 * _PROBE_PIXELS > limit:
        raise UserError('it takes a while (--measure)')
    net = ARCH_REGISTRY.build(options)
    window = argument(options, 'window_size') or 1
    with explained('it cannot be measured'):
        return receptive_halo(net, input_channels(options), opt['scale'] or 1, window)


class Amounts(NamedTuple):
    """How much data a training uses."""

    images: int | None  # None if unknown
    samples: int
    epochs: float | None
    samples_per_iteration: int


def amounts(opt: dict, dataset: Any) -> Amounts:
    """How much data a training uses; for a stream, or without a set, only samples are counted."""
    schedule, total_iter = schedule_of_all_ranks(opt), opt['train']['total_iter']
    samples, per_iteration = schedule.samples(total_iter), schedule.batch_size(1)
    if dataset is None or isinstance(dataset, IterableDataset):
        return Amounts(None, samples, None, per_iteration)
    sampler = build_sampler(dataset, opt['datasets']['train'], 1, 0, opt['manual_seed'])
    return Amounts(len(dataset), samples, samples / sampler.total_size, per_iteration)


def datasets(opt: dict) -> Iterator[tuple[str, Any]]:
    """Every dataset with its key, without caches; the error in place of one that fails to build."""
    for key, options in opt['datasets'].items():
        try:
            yield key, build_dataset(options | ({'cache': 'off'} if 'cache' in options else {}))
        except (UserError, OSError) as error:
            yield key, error
