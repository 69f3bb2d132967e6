"""Distributed training: start the process group; rank, barriers, broadcast and gather."""

import datetime
import functools
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .errors import MissingKeyError, UserError

START_TIMEOUT = 120.0  # least seconds before the first step: imports, lists of files, workers
_LATE = 5  # seconds past the timeout after which torch's rendezvous is given up


def launched_by_torchrun() -> bool:
    """Whether torchrun (or a compatible launcher) started this process."""
    return all(name in os.environ for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'))


def init_dist(
    launcher: str,
    backend: str = 'nccl',
    timeout: float = 1800,  # networks may be compiled, and caches filled, before the first step
    port: int | None = None,
    **kwargs: Any,
) -> None:
    """Join the process group, once.

    Args:
        launcher: 'pytorch' reads torchrun's environment variables; 'slurm' reads SLURM's.
        backend: 'nccl' becomes 'gloo' where there is no GPU.
        timeout: Seconds after which processes that wait for each other time out.
        port: Rendezvous port on the first node (SLURM only); by default derived from the job ID.
        **kwargs: Passed to ``init_process_group``.

    Raises:
        ValueError: The environment lacks what the launcher should have set.
        ConnectionError: The processes did not find each other in time.
    """
    if dist.is_initialized():
        return
    if launcher == 'slurm':
        _slurm_environment(port)
    elif launcher != 'pytorch':
        raise UserError(f"launcher is '{launcher}'; give 'none', 'pytorch' or 'slurm'.")
    missing = [name for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR') if name not in os.environ]
    if missing:
        raise UserError(
            f'--launcher {launcher}: the environment has no {", ".join(missing)}. Start the '
            'processes with: torchrun --nproc_per_node=N basicsr/train.py -opt FILE'
        )
    if torch.cuda.is_available():
        # LOCAL_RANK, not RANK: on a second node RANK continues while devices start at 0.
        local_rank = int(os.environ.get('LOCAL_RANK', '0'))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if backend == 'nccl' and not (torch.cuda.is_available() and dist.is_nccl_available()):
        backend = 'gloo'
    limit = datetime.timedelta(seconds=timeout)
    try:
        if 'init_method' not in kwargs:
            is_restarted = dist.is_torchelastic_launched()
            kwargs |= _store_of_this_start(limit) if is_restarted else _meet(limit)
        dist.init_process_group(backend, timeout=limit_of_operations(timeout), **kwargs)
    except dist.DistError as error:
        address = f'{os.environ["MASTER_ADDR"]}:{os.environ.get("MASTER_PORT")}'
        raise ConnectionError(
            f'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]} found no process group at '
            f'{address} ({str(error).splitlines()[0]}). MASTER_ADDR must be the address of the '
            'node of rank 0, reachable from all nodes, and MASTER_PORT a free port there; '
            'dist_params.timeout sets the seconds to wait.'
        ) from error


def limit_of_operations(timeout: float) -> datetime.timedelta:
    """Timeout of collectives, whose error names no rank: the longest limit of a watchdog."""
    return datetime.timedelta(seconds=max(timeout, START_TIMEOUT))


def _meet(timeout: datetime.timedelta) -> dict[str, Any]:
    """Rendezvous of all ranks: store, rank and world size, as for ``init_process_group``.

    A program other than torch's store may accept the connection and never answer, and torch would
    wait forever. So it waits in a thread, which is abandoned after the timeout.
    """
    found: Future[tuple] = Future()

    def meet() -> None:
        try:
            found.set_result(next(rendezvous('env://', timeout=timeout)))
        except Exception as error:  # handed over
            found.set_exception(error)

    threading.Thread(target=meet, daemon=True).start()
    try:
        store, rank, world_size = found.result(timeout.total_seconds() + _LATE)
    except TimeoutError:
        raise dist.DistError('what answers there is not PyTorch') from None
    return {'store': store, 'rank': rank, 'world_size': world_size}


def _store_of_this_start(timeout: datetime.timedelta) -> dict[str, Any]:
    """As ``_meet``, with a key prefix that only the ranks of this start know.

    torchrun keeps its store when it restarts all ranks, and in it the addresses of dead ones.
    The restart count cannot be the prefix: it differs on a node that joined later. So rank 0 makes
    up a random one and sends it to every rank that has arrived, dead ones included, until all
    ranks of this start have it.
    """
    meeting = _meet(timeout)
    store, rank, world_size = meeting.values()
    if rank > 0:
        answer = f'basicsr/answer/{store.add("basicsr/arrivals", 1)}'
        name = store.get(answer).decode()  # waits for it
        store.add(f'{name}/known', 1)
    else:
        name, answered = f'basicsr/{uuid.uuid4()}', 0
        deadline = time.monotonic() + timeout.total_seconds()
        while store.add(f'{name}/known', 0) < world_size - 1:
            arrivals = store.add('basicsr/arrivals', 0)
            for number in range(answered + 1, arrivals + 1):
                store.set(f'basicsr/answer/{number}', name)
            if time.monotonic() > deadline:
                known = store.add(f'{name}/known', 0)
                raise dist.DistError(f'{known + 1} of {world_size} ranks have come')
            answered = arrivals
            time.sleep(0.01)
    return meeting | {'store': PrefixStore(name, store)}


def _slurm_environment(port: int | None) -> None:
    """Translate SLURM's variables into those that torch reads; those already set are kept."""
    try:
        rank, world_size = os.environ['SLURM_PROCID'], os.environ['SLURM_NTASKS']
    except KeyError as error:
        raise MissingKeyError(
            f'--launcher slurm: the environment has no {error.args[0]}.'
        ) from None
    os.environ.update(
        RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=os.environ.get('SLURM_LOCALID', '0')
    )
    if 'MASTER_ADDR' not in os.environ:
        os.environ['MASTER_ADDR'] = _first_slurm_host()
    if port is not None:
        os.environ['MASTER_PORT'] = str(port)
    elif 'MASTER_PORT' not in os.environ:
        # Two jobs on one node must not meet, so the port depends on the job ID.
        os.environ['MASTER_PORT'] = str(20000 + int(os.environ.get('SLURM_JOB_ID', '9500')) % 20000)


def _first_slurm_host() -> str:
    nodes = os.environ.get('SLURM_NODELIST', '')
    if '[' not in nodes and ',' not in nodes:
        return nodes or socket.gethostname()
    hosts = subprocess.run(
        ['scontrol', 'show', 'hostnames', nodes], check=True, capture_output=True, text=True
    )
    return hosts.stdout.split()[0]


def get_dist_info() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def master_only(func: Callable) -> Callable:
    """Run ``func`` on rank 0 only; the other ranks get None."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) if get_dist_info()[0] == 0 else None

    return wrapper


def barrier() -> None:
    """Wait for all ranks; returns at once without a process group."""
    if get_dist_info()[1] > 1:
        dist.barrier()


def share_buffers(net: torch.nn.Module) -> None:
    """Broadcast the buffers of rank 0's network to all ranks.

    Running statistics differ after a step: DistributedDataParallel shares them before the next one.
    """
    if get_dist_info()[1] > 1:
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)


def from_master(value: Any) -> Any:
    """Rank 0's ``value``, on every rank."""
    if get_dist_info()[1] == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_on_master(value: Any) -> list:
    """The values of all ranks on rank 0; on the others an empty list."""
    rank, world_size = get_dist_info()
    if world_size == 1:
        return [value]
    values: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(value, values)
    return values or []


def gather_lists(items: list) -> list:
    """The lists of all ranks, one after the other, on every rank."""
    world_size = get_dist_info()[1]
    if world_size == 1:
        return items
    lists: list[Any] = [None] * world_size
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]
