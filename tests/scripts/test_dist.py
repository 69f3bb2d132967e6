"""The scripts that start a process for each GPU, with torchrun replaced."""

import os
import subprocess

import pytest


@pytest.fixture
def start(repository, tmp_path):
    """Run a script; torchrun prints each argument on a line of its own."""
    torchrun = tmp_path / 'torchrun'
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)

    def run(script, *args, **environment):
        env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', **environment}
        path = repository / 'scripts' / script
        command = [path, *args]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


@pytest.mark.parametrize('kind', ['train', 'test'])
def test_a_process_for_each_gpu_gets_the_option_file_and_all_further_flags(start, repository, kind):
    more = ['--auto_resume', '--force_yml', 'name=two words']
    first = ['--nproc_per_node=8', '--master_port=4321']
    program = [str(repository / 'basicsr' / f'{kind}.py'), '-opt', 'x y.yml']
    run = start(f'dist_{kind}.sh', '8', 'x y.yml', *more)
    assert run.stdout.splitlines() == [*first, *program, '--launcher', 'pytorch', *more]
    run = start(f'dist_{kind}.sh', '8', 'x y.yml', PORT='29500')
    first[1] = '--master_port=29500'
    assert run.stdout.splitlines() == [*first, *program, '--launcher', 'pytorch']


@pytest.mark.parametrize('kind', ['train', 'test'])
@pytest.mark.parametrize('args', [[], ['8']])
def test_too_few_arguments_are_answered_with_the_usage(start, kind, args):
    run = start(f'dist_{kind}.sh', *args)
    assert (run.returncode, run.stdout) == (2, '')
    assert 'GPUS OPTION_FILE [flags of basicsr/' in run.stderr
