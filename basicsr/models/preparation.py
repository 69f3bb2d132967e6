"""Prepare networks for training: channels_last, compile, activation checkpointing, norms, DDP."""

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.errors import UserError

logger = logging.getLogger(__name__)

_TRIALS = 4


def prepare_for_training(net: nn.Module, train_opt: Mapping[str, Any], dist: bool) -> nn.Module:
    """Apply ``channels_last``, ``norms``, ``checkpoint_activations`` and ``compile``.

    The state dict does not change.
    """
    if train_opt.get('channels_last') is True:
        use_channels_last(net)
    norms = train_opt.get('norms')
    if norms == 'synced' and dist:
        net = _with_synced_norms(net)
    elif norms == 'frozen':
        freeze_norms(net)
    if train_opt.get('checkpoint_activations'):
        _checkpoint_chains(net)
    compile_if_asked(net, train_opt)
    return net


def compile_if_asked(module: nn.Module, train_opt: Mapping[str, Any]) -> None:
    """Apply ``train.compile`` in place, which keeps the keys of the state dict."""
    options = train_opt.get('compile')
    if not options:
        return
    try:
        module.compile(**(options if isinstance(options, Mapping) else {}))
    except (LookupError, TypeError, RuntimeError) as error:
        reason = str(error).partition('\n')[0]
        raise UserError(
            f'train.compile: {options} are not arguments of torch.compile: {reason}'
        ) from error


def use_channels_last(net: nn.Module, layout: torch.memory_format = torch.channels_last) -> None:
    """Store the weights of convolutions as (out, height, width, in), in place.

    Buffers stay as they are: PyTorch cannot broadcast a single one of shape (1, c, 1, 1) with other
    strides, as DistributedDataParallel does before each step.

    Args:
        layout: ``contiguous_format`` restores (out, in, height, width).
    """
    for parameter in net.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout)


def channels_last_is_faster(
    net: nn.Module, inputs: Sequence[Any], autocast: AbstractContextManager
) -> bool:
    """Benchmark whether channels_last makes forward and backward passes at least 3 % faster.

    Weights, buffers and random generators are restored afterwards; gradients are cleared.

    Args:
        net: The unwrapped network, in the contiguous layout.
        inputs: Its arguments; images (b, c, h, w) are converted to each layout.
        autocast: Context of the forward pass.
    """
    buffers = [buffer.clone() for buffer in net.buffers()]
    layouts = (torch.contiguous_format, torch.channels_last)
    seconds: dict[torch.memory_format, list[float]] = {layout: [] for layout in layouts}
    devices = {value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    with torch.random.fork_rng(devices):
        for _ in range(_TRIALS):  # alternate, so that other load affects both
            for layout in layouts:
                use_channels_last(net, layout)
                arguments = [_in_layout(value, layout) for value in inputs]
                _pass_through(net, arguments, autocast)  # warm-up: chooses kernels, allocates
                begin = time.perf_counter()
                _pass_through(net, arguments, autocast)
                seconds[layout].append(time.perf_counter() - begin)
    use_channels_last(net, torch.contiguous_format)
    net.zero_grad()
    for buffer, before in zip(net.buffers(), buffers, strict=True):
        buffer.copy_(before)
    usual, last = (1000 * min(seconds[layout]) for layout in layouts)
    logger.info('train.channels_last: a step takes %.1f ms with it, %.1f without.', last, usual)
    return last < 0.97 * usual


def _in_layout(value: Any, layout: torch.memory_format) -> Any:
    is_image = isinstance(value, Tensor) and value.ndim == 4
    return value.to(memory_format=layout) if is_image else value


def _pass_through(net: nn.Module, inputs: list[Any], autocast: AbstractContextManager) -> None:
    with autocast:
        output = net(*inputs)
    parts = [output] if isinstance(output, Tensor) else output
    total: Any = sum(part.float().mean() for part in parts if isinstance(part, Tensor))
    total.backward()
    if total.is_cuda:
        torch.cuda.synchronize()


def wrapped(net: nn.Module, opt: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Wrap a network in DDP for several processes, or DataParallel for several GPUs of one."""
    if opt['dist'] and any(p.requires_grad for p in net.parameters()):
        # DDP rebuilds its gradient buckets after the first step, also after a resume; sums over
        # three or more ranks depend on the position of a gradient in its bucket.
        exact = opt.get('deterministic') and get_dist_info()[1] > 2
        return DistributedDataParallel(
            net,
            device_ids=[torch.cuda.current_device()] if device.type == 'cuda' else None,
            find_unused_parameters=bool(opt.get('find_unused_parameters') or exact),
        )
    if opt['num_gpu'] > 1 and not opt['dist']:
        logger.info(
            'DataParallel on %d GPUs; one process per GPU is faster: torchrun --nproc_per_node=%d '
            'basicsr/train.py -opt FILE',
            *(opt['num_gpu'], opt['num_gpu']),
        )
        return DataParallel(net, device_ids=list(range(opt['num_gpu'])))
    return net


def _with_synced_norms(net: nn.Module) -> nn.Module:
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    if norms and next(net.parameters()).device.type != 'cuda':
        raise UserError(
            'train.norms: synced needs GPUs: torch has no SyncBatchNorm on the CPU. Leave it out.'
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


def freeze_norms(net: nn.Module) -> None:
    """Freeze the running statistics, weights and biases of batch normalisation."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
            module.train = functools.partial(_stay_in_eval, module)  # pyright: ignore (on purpose)
            module.requires_grad_(False)


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _checkpoint_chains(net: nn.Module) -> None:
    """Recompute the blocks of every chain in the backward pass instead of keeping activations.

    Blocks with batch normalisation are skipped: recomputing would count a batch twice.
    """
    blocks = [block for block in inner_blocks(net) if not _counts_batches(block)]
    for block in blocks:  # patch the class, not the instance: replicas on other GPUs share it
        block.__class__ = _checkpointed(type(block))
    if blocks:
        logger.info(
            'The activations of %d blocks are recomputed in the backward pass.', len(blocks)
        )
        return
    logger.warning(
        'train.checkpoint_activations has no effect on %s: it has no chain of blocks '
        '(nn.Sequential or nn.ModuleList of several blocks of one class, without batch norms).',
        type(net).__name__,
    )


def inner_blocks(net: nn.Module) -> list[nn.Module]:
    """The blocks of every chain; of nested chains, those of the innermost."""
    chains = [chain for chain in net.modules() if _is_chain(chain)]
    inner = [chain for chain in chains if sum(map(_is_chain, chain.modules())) == 1]
    return [block for chain in inner for block in chain.children()]


def _is_chain(module: nn.Module) -> bool:
    """Whether a module is a chain of blocks of one class, each of several layers."""
    blocks = list(module.children())
    return (
        isinstance(module, nn.Sequential | nn.ModuleList)
        and len(blocks) > 1
        and len({type(block) for block in blocks}) == 1
        and all(len(list(block.modules())) > 2 for block in blocks)
    )


def _counts_batches(block: nn.Module) -> bool:
    return any(
        isinstance(module, _NormBase) and module.track_running_stats and module.training
        for module in block.modules()
    )


@functools.cache
def _checkpointed(block_class: type[nn.Module]) -> type[nn.Module]:
    class Checkpointed(block_class):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    Checkpointed.__name__ = Checkpointed.__qualname__ = block_class.__name__
    return Checkpointed


def warn_of_own_step(model: Any) -> None:
    """Warn of options that have no effect on a model with its own training step."""
    train_opt = model.opt['train']
    names = [n for n in ('amp', 'clip_grad_norm', 'clip_grad_value', 'freeze') if train_opt.get(n)]
    names += ['channels_last: auto'] if model.channels_last is None else []
    names += ['accumulate'] if model.stepper.accumulate > 1 else []
    names += ['on_nonfinite: skip'] if model.stepper.policy == 'skip' else []
    if names:
        logger.warning(
            '%s has an optimize_parameters of its own, which does not call self.step(): train.%s '
            'have no effect.',
            *(type(model).__name__, ', train.'.join(names)),
        )


def warn_of_own_results(model: Any) -> None:
    """Warn of options of ``val`` that a model with its own way of restoring may ignore."""
    hooks: dict[str, tuple[str, ...]] = dict.fromkeys(('tile', 'tile_overlap'), ('results', 'test'))
    hooks['self_ensemble'] = ('results', 'test_selfensemble')
    for key, names in hooks.items():
        functions = [getattr(type(model), name, warn_of_own_results) for name in names]
        own = [f.__name__ for f in functions if not f.__module__.startswith('basicsr.')]
        if own and (model.opt['val'] or {}).get(key):
            logger.warning(
                'val.%s: %s has its own %s, so the option applies only if that calls super() or '
                'reads it.',
                *(key, type(model).__name__, ' and '.join(own)),
            )
