"""FSDP: shard weights, gradients and optimizer states across processes (``train.sharding``).

Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase, Yuxiong He, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (2020), https://arxiv.org/abs/1910.02054; the engine is that of
Yanli Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023),
https://arxiv.org/abs/2304.11277, in its second version, ``fully_shard``.

The import takes a second, so only runs that shard import this module. Files of networks and
training states always hold full tensors and do not depend on the number of processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from basicsr.utils.errors import UserError

from .preparation import inner_blocks

# These optimizers use rows, matrices or all parameters at once, or index what they update.
_NEED_WHOLE_TENSORS = ('LBFGS', 'Muon', 'JointOptimizer', 'Adafactor', 'Rprop')


class Sharding:
    """Splits the networks of a model over all processes of the group.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device):
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def shard(self, net: nn.Module) -> nn.Module:
        """Shard a network in place; all processes start from the weights of rank 0.

        Blocks of chains are gathered one at a time during computation, the rest together. From
        then on every process has to take part in each forward pass, except within ``whole``.
        """
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                dist.broadcast(tensor, 0)
        # The root is resharded too: after a pass without gradients its weights are not reused.
        for module in (*inner_blocks(net), net):
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        net.register_load_state_dict_pre_hook(_cut_weights)
        net.register_forward_hook(_share_statistics)
        return net

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer of sharded parameters load the state of full ones."""
        name = type(optimizer).__name__
        if name in _NEED_WHOLE_TENSORS:
            name = 'Muon' if name == 'JointOptimizer' else name
            raise UserError(
                f'train.sharding: {name} needs whole tensors, and every process has a part of '
                'each. Use AdamW, or leave sharding out.'
            )
        optimizer.register_load_state_dict_pre_hook(_cut_state)
        return optimizer

    @contextmanager
    def whole(self, net: nn.Module) -> Iterator[None]:
        """Gather the full network on every process, which can then evaluate it independently."""
        parts: list[Any] = [module for module in net.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()

    def gathered(self, content: Any) -> Any:
        """Gather sharded tensors in nested dicts and lists to the CPU of rank 0; None elsewhere.

        All processes have to call it.
        """
        if isinstance(content, DTensor):
            tensor = content.full_tensor()
            return tensor.cpu() if dist.get_rank() == 0 else None
        if isinstance(content, dict):
            result = copy(content)  # keeps the class: a schedule's state holds a Counter
            for key, value in content.items():
                result[key] = self.gathered(value)
            return result
        if isinstance(content, list):
            return [self.gathered(value) for value in content]
        return content


def _cut(tensor: Any, own: Any) -> Any:
    """The shard of a full tensor that this process holds in ``own``."""
    if not isinstance(own, DTensor) or isinstance(tensor, DTensor) or tensor.shape != own.shape:
        return tensor  # a wrong shape is reported by torch
    # No broadcast from a source rank: every process has read the same file.
    placing: dict[str, Any] = {'placements': own.placements, 'src_data_rank': None}
    return distribute_tensor(tensor.to(own.device), own.device_mesh, **placing)


def _cut_weights(net: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shard a state dict before a network loads it."""
    for name, own in net.named_parameters():
        if prefix + name in state_dict:
            state_dict[prefix + name] = _cut(state_dict[prefix + name], own)


def _cut_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Shard an optimizer state before it is loaded; moments have the shape of their parameter."""
    numbers = [number for group in state_dict['param_groups'] for number in group['params']]
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    own = dict(zip(numbers, parameters, strict=False))  # torch reports a length mismatch
    state = {
        number: {
            name: _cut(value, own.get(number)) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in state_dict['state'].items()
    }
    groups = zip(state_dict['param_groups'], optimizer.param_groups, strict=False)
    kept = [{**saved, 'fused': own_group.get('fused')} for saved, own_group in groups]
    return {**state_dict, 'state': state, 'param_groups': kept}


def _share_statistics(net: nn.Module, *_: Any) -> None:
    """Broadcast running statistics from rank 0 after a training forward pass.

    Other buffers are determined by the weights, so they are equal anyway.
    """
    if not net.training:
        return
    for module in net.modules():
        if isinstance(module, _NormBase):
            for buffer in module.buffers(recurse=False):
                # .data bypasses autograd's version counter: the backward pass does not read it
                dist.broadcast(buffer.data, 0)
