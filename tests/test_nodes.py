"""Several agents of torchrun: on one host, and on two, which here are network namespaces."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from runs import checkpoint, differences, rows

pytestmark = pytest.mark.slow

# One training that nothing disturbs, then one that is disturbed in the first life of its processes.
PROGRAM = """
import os, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import basicsr.train
import faults_program
from basicsr.run import program

rank, lives = int(os.environ['RANK']), int(os.environ['TORCHELASTIC_RESTART_COUNT'])


def wait_for_the_cut():
    Path('reached').touch()
    while not Path('cut').exists():
        time.sleep(0.05)


faults_program.FAULTS['wait'] = wait_for_the_cut
basicsr.train.draw_results = lambda *_: None
if lives == 0:
    sys.argv = ['program', '-opt', 'whole.yml']
    basicsr.train.train_pipeline(Path.cwd())
    fault = {'kind': sys.argv_of_test[2], 'place': 'step', 'rank': 1, 'at': 4}
    faults_program.inject(fault, rank)
sys.argv = ['program', '-opt', 'cut.yml']
program.run(basicsr.train.train_pipeline, Path.cwd())
""".replace('sys.path.insert', 'sys.argv_of_test = sys.argv\nsys.path.insert', 1)

LIMIT = 200  # seconds for all of a test: a loaded machine needs ten to import torch
ENVIRONMENT = {'OMP_NUM_THREADS': '1'}


def torchrun(tmp_path, repository, kind, *flags, inside=()):
    """Start an agent of torchrun with one life more for its processes."""
    (tmp_path / 'program.py').write_text(PROGRAM)
    command = [*inside, sys.executable, '-m', 'torch.distributed.run', '--max-restarts=2', *flags]
    log = (tmp_path / f'agent_{len(list(tmp_path.glob("agent_*")))}.txt').open('w')
    return subprocess.Popen(
        [*command, 'program.py', str(repository / 'tests'), kind],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, 'PYTHONPATH': str(repository)},
        stdout=log,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def write_both(train_opt, write):
    def make(timeout):
        for name in ('whole', 'cut'):
            write(train_opt(name=name, dist_params={'timeout': timeout}))

    return make


def check_that_nothing_was_lost(tmp_path):
    whole, cut = tmp_path / 'experiments/whole', tmp_path / 'experiments/cut'
    for name in ('net_g_latest.pth', 'net_g_6.pth', '6.state'):
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == []
    assert rows(whole) == rows(cut)


def test_torchrun_starts_again_after_a_rank_was_killed(write_both, tmp_path, repository):
    write_both(timeout=30)
    flags = ('--standalone', '--nproc_per_node=2')
    agent = torchrun(tmp_path, repository, 'kill', *flags)
    assert agent.wait(LIMIT) == 0, (tmp_path / 'agent_0.txt').read_text()
    assert 'resuming from' in (tmp_path / 'agent_0.txt').read_text()
    check_that_nothing_was_lost(tmp_path)


@pytest.fixture
def two_hosts():
    """Names of two network namespaces with a link; how to take the link down or up."""
    if shutil.which('ip') is None:
        pytest.skip('two hosts need the command ip (package iproute2)')
    hosts = [f'basicsr{os.getpid()}{letter}' for letter in 'ab']

    def ip(*arguments, check=True):
        command = ['ip', *arguments]
        return subprocess.run(command, check=check, capture_output=True, text=True, timeout=20)

    made = ip('netns', 'add', hosts[0], check=False)
    if made.returncode:
        pytest.skip(f'two hosts need network namespaces: {made.stderr.strip()}')
    try:
        ip('netns', 'add', hosts[1])
        ends = [f'v{os.getpid()}{letter}' for letter in 'ab']
        ip('link', 'add', ends[0], 'type', 'veth', 'peer', 'name', ends[1])
        for number, (host, end) in enumerate(zip(hosts, ends, strict=True), 1):
            ip('link', 'set', end, 'netns', host)
            ip('-n', host, 'link', 'set', end, 'name', 'cable')
            ip('-n', host, 'addr', 'add', f'10.77.0.{number}/24', 'dev', 'cable')
            ip('-n', host, 'link', 'set', 'cable', 'up')
            ip('-n', host, 'link', 'set', 'lo', 'up')
        yield hosts, lambda state: ip('-n', hosts[1], 'link', 'set', 'cable', state)
    finally:
        for host in hosts:
            ip('netns', 'del', host, check=False)


def test_two_hosts_go_on_when_their_link_is_back(
    two_hosts, write_both, tmp_path, repository, monkeypatch
):
    """Without the link each host ends its process, in time; with it both start again."""
    hosts, set_link = two_hosts
    write_both(timeout=6)
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'cable')
    flags = ('--nnodes=2', '--nproc_per_node=1', '--rdzv-backend=c10d', '--rdzv-id=1')
    flags += ('--rdzv-endpoint=10.77.0.1:29400',)
    agents = [
        torchrun(
            tmp_path,
            repository,
            'wait',
            *flags,
            f'--local-addr=10.77.0.{number}',
            f'--rdzv-conf=is_host={number == 1},keep_alive_interval=1,keep_alive_max_attempt=30',
            inside=('ip', 'netns', 'exec', host),
        )
        for number, host in enumerate(hosts, 1)
    ]
    texts = [tmp_path / 'agent_0.txt', tmp_path / 'agent_1.txt']
    begin = time.monotonic()

    def wait_until(done):
        while not done():
            everything = '\n'.join(text.read_text() for text in texts)
            assert time.monotonic() < begin + LIMIT, everything
            assert {agent.poll() for agent in agents} == {None}, everything
            time.sleep(0.1)

    try:
        wait_until((tmp_path / 'reached').exists)
        set_link('down')
        (tmp_path / 'cut').touch()
        cut = time.monotonic()
        wait_until(lambda: all('for 6 s' in text.read_text() for text in texts))
        assert time.monotonic() - cut < 6 + 10
        set_link('up')
        statuses = [agent.wait(LIMIT) for agent in agents]
        assert statuses == [0, 0], '\n'.join(text.read_text() for text in texts)
    finally:
        for agent in agents:
            agent.kill()
    check_that_nothing_was_lost(tmp_path)
