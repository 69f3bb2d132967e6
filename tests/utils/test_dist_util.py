import datetime
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from basicsr.utils import dist_util
from basicsr.utils.dist_util import (
    barrier,
    from_master,
    gather_lists,
    get_dist_info,
    init_dist,
    launched_by_torchrun,
    master_only,
)


@pytest.fixture
def environment(monkeypatch):
    """Set the environment variables of a launcher; the old ones come back afterwards."""
    for name in ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'SLURM_JOB_ID', 'SLURM_NODELIST'):
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    # What init_dist sets itself is forgotten too.
    put(RANK='', WORLD_SIZE='', LOCAL_RANK='', MASTER_ADDR='', MASTER_PORT='')
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(name)
    return put


@pytest.fixture
def joined(monkeypatch):
    """Record how the process group would be joined."""
    calls = []
    monkeypatch.setattr(dist, 'init_process_group', lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(dist_util, '_meet', lambda timeout: {})
    return calls


def fake_cuda(monkeypatch, count):
    chosen = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: count > 0)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: count)
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    return chosen


def test_one_process_is_alone():
    assert get_dist_info() == (0, 1)
    assert barrier() is None
    items = [1, {'a': 2}]
    assert gather_lists(items) == items
    assert from_master('mine') == 'mine'


def test_master_only_is_silent_on_other_ranks(monkeypatch):
    @master_only
    def double(x, *, plus=0):
        """Twice."""
        return 2 * x + plus

    assert (double(3, plus=1), double.__doc__) == (7, 'Twice.')
    monkeypatch.setattr(dist_util, 'get_dist_info', lambda: (1, 2))
    assert double(3) is None


def test_torchrun_is_recognised_by_its_variables(environment):
    assert not launched_by_torchrun()
    environment(RANK=0, WORLD_SIZE=2)
    assert not launched_by_torchrun()
    environment(LOCAL_RANK=0)
    assert launched_by_torchrun()


def test_an_unknown_launcher_is_refused():
    with pytest.raises(ValueError, match="launcher is 'mpi'; give 'none', 'pytorch' or 'slurm'"):
        init_dist('mpi')


def test_a_launcher_that_did_not_launch_is_named(environment):
    environment(WORLD_SIZE=2)
    with pytest.raises(ValueError, match=r'pytorch: .* no RANK, MASTER_ADDR. Start .* torchrun'):
        init_dist('pytorch')
    with pytest.raises(ValueError, match='slurm: the environment has no SLURM_PROCID'):
        init_dist('slurm')


@pytest.mark.parametrize(
    ('gpus', 'nccl', 'asked', 'used'),
    [
        (0, True, 'nccl', 'gloo'),
        (2, False, 'nccl', 'gloo'),
        (2, True, 'nccl', 'nccl'),
        (2, True, 'gloo', 'gloo'),
    ],
)
def test_nccl_is_taken_where_it_exists(environment, joined, monkeypatch, gpus, nccl, asked, used):
    fake_cuda(monkeypatch, gpus)
    monkeypatch.setattr(dist, 'is_nccl_available', lambda: nccl)
    environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR='127.0.0.1')
    init_dist('pytorch', backend=asked, timeout=900)
    assert joined == [((used,), {'timeout': datetime.timedelta(seconds=900)})]


@pytest.mark.parametrize(('gpus', 'device'), [(4, 3), (1, 0), (2, 1)])
def test_the_gpu_is_that_of_the_local_rank(environment, joined, monkeypatch, gpus, device):
    """The fourth process of the second of two nodes."""
    chosen = fake_cuda(monkeypatch, gpus)
    environment(RANK=8, WORLD_SIZE=10, LOCAL_RANK=3, MASTER_ADDR='10.0.0.1')
    init_dist('pytorch')
    assert chosen == [device]


def test_gloo_joins_for_real_and_once(environment):
    environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR='127.0.0.1', MASTER_PORT=0)
    init_dist('pytorch')
    init_dist('pytorch')
    assert (dist.get_backend(), get_dist_info()) == ('gloo', (0, 1))


def test_processes_that_do_not_meet_say_so_in_time(environment):
    environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR='127.0.0.1', MASTER_PORT=9)
    begin = time.perf_counter()
    with pytest.raises(ConnectionError) as error:
        init_dist('pytorch', timeout=1)
    assert time.perf_counter() - begin < 120  # not the 300 s of PyTorch
    message = str(error.value)
    assert 'rank 1 of 2 found no process group at 127.0.0.1:9' in message
    assert 'MASTER_ADDR must be the address of the node of rank 0' in message
    assert '\n' not in message


def test_a_program_that_is_no_store_is_not_waited_for_without_end(environment, monkeypatch):
    """It takes the connection, and never answers."""
    monkeypatch.setattr(dist_util, '_LATE', 0.1)
    with socket.create_server(('127.0.0.1', 0)) as silent:
        port = silent.getsockname()[1]
        environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
        with pytest.raises(ConnectionError, match=f'127.0.0.1:{port} .what answers there is not'):
            init_dist('pytorch', timeout=0.2)


# ---------------------------------------------------------------------------- SLURM


@pytest.fixture
def slurm(environment, joined, monkeypatch):
    """Join as process 5 of 8, the second of its node; returns the variables torch reads."""
    environment(SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_LOCALID=1, SLURM_JOB_ID=123456)

    def join(nodes, **options):
        environment(SLURM_NODELIST=nodes)
        init_dist('slurm', **options)
        names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')
        return [os.environ[name] for name in names]

    return join


def test_slurm_tells_rank_size_and_address(slurm, joined):
    """A port derived from the job keeps two jobs of a node apart."""
    assert slurm('node7') == ['5', '8', '1', 'node7', '23456']
    assert joined == [(('gloo',), {'timeout': datetime.timedelta(seconds=1800)})]


def test_the_first_node_of_a_slurm_list_is_the_master(slurm, monkeypatch):
    asked = []

    def scontrol(command, **_):
        asked.append(command)
        return SimpleNamespace(stdout='node03\nnode04\nnode09\n')

    monkeypatch.setattr(subprocess, 'run', scontrol)
    assert slurm('node[03-04,09]')[3] == 'node03'
    assert asked == [['scontrol', 'show', 'hostnames', 'node[03-04,09]']]


def test_address_and_port_of_the_user_are_respected(slurm, environment):
    environment(MASTER_ADDR='10.0.0.1', MASTER_PORT=4444)
    assert slurm('node7')[3:] == ['10.0.0.1', '4444']
    assert slurm('node7', port=5555)[3:] == ['10.0.0.1', '5555']


def test_the_slurm_gpu_is_that_of_the_local_rank(slurm, monkeypatch):
    chosen = fake_cuda(monkeypatch, 4)
    slurm('node7')
    assert chosen == [1]


def test_ranks_that_are_started_again_meet_apart_from_those_before(monkeypatch):
    """In one store, as torchrun keeps it; of the first start, only rank 1 has come."""
    store = dist.HashStore()
    here = threading.local()
    meeting = {'store': store, 'rank': 0, 'world_size': 3}
    monkeypatch.setattr(dist_util, '_meet', lambda timeout: meeting | {'rank': here.rank})

    def come(rank):
        here.rank = rank
        meeting = dist_util._store_of_this_start(datetime.timedelta(seconds=10))
        meeting['store'].set(f'address of {rank}', str(rank))
        return [meeting['store'].get(f'address of {other}') for other in range(3)]

    store.add('basicsr/arrivals', 1)
    store.set('address of 1', 'of a dead one')
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            assert [*pool.map(come, (1, 0, 2))] == [[b'0', b'1', b'2']] * 3


def test_ranks_that_never_come_are_counted(monkeypatch):
    store = dist.HashStore()
    meeting = {'store': store, 'rank': 0, 'world_size': 2}
    monkeypatch.setattr(dist_util, '_meet', lambda timeout: meeting)
    with pytest.raises(dist.DistError, match='1 of 2 ranks have come'):
        dist_util._store_of_this_start(datetime.timedelta(seconds=0.05))
