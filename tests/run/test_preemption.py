"""Runs that are asked to stop, and runs that torchrun starts again."""

import multiprocessing
import os
import signal
import sys

import pytest
from runs import TORCHRUN, checkpoint, differences, log_text, rows

from basicsr.models.sr_model import SRModel
from basicsr.run import preemption
from basicsr.utils import progress
from basicsr.utils.options import command_line

# A model whose process, or processes, get a signal in the middle of iteration 3.
SIGNALLED = """
import multiprocessing
import os
import subprocess

from basicsr.models.sr_model import SRModel
from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class SignalledModel(SRModel):
    def __init__(self, opt):
        super().__init__(opt)
        self.not_ours = multiprocessing.active_children()  # workers that another test has left

    def optimize_parameters(self, current_iter):
        super().optimize_parameters(current_iter)
        rank, world_size = get_dist_info()
        if current_iter == 3 and rank == world_size - 1 and 'SEND' in os.environ:
            children = multiprocessing.active_children()
            workers = [str(child.pid) for child in children if child not in self.not_ours]
            send = os.environ.pop('SEND')
            subprocess.run(['kill', send, str(os.getpid()), *workers], check=True)
"""


@pytest.fixture
def signalled(train_opt, tmp_path):
    """Options of a run that gets a signal, and of one that does not."""
    (tmp_path / 'plug_ins').mkdir()
    (tmp_path / 'plug_ins' / 'signalled_model.py').write_text(SIGNALLED)

    def make(name, **options):
        options |= {'plugins': ['plug_ins'], 'model_type': 'SignalledModel'}
        return train_opt(name=name, logger__save_checkpoint_freq=100, **options)

    return make


def final_state(folder):
    return [checkpoint(folder, 'net_g_latest.pth'), checkpoint(folder, '6.state'), rows(folder)]


@pytest.mark.parametrize(
    ('send', 'workers', 'method'),
    [
        pytest.param('-USR1', 0, 'fork', id='USR1'),
        pytest.param('-INT', 1, 'fork', id='Ctrl-C'),
        pytest.param('-TERM', 2, 'fork', id='TERM with workers'),
        pytest.param('-TERM', 2, 'forkserver', id='with a fork server', marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_its_state_and_says_so(
    run, signalled, monkeypatch, tmp_path, send, workers, method
):
    """The workers get the signal as well, as from a launcher that sends it to all processes."""
    monkeypatch.setattr(multiprocessing.context._default_context, '_actual_context', None)
    multiprocessing.set_start_method(method)
    options = {'datasets__train__num_worker_per_gpu': workers}
    handlers = [signal.getsignal(number) for number in preemption.SIGNALS]
    monkeypatch.setenv('SEND', send)
    with pytest.raises(SystemExit) as stop:
        run(signalled('cut', **options))
    assert stop.value.code == (130 if send == '-INT' else 75)
    del stop  # and with it the frames that hold the loader
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == handlers
    folder = tmp_path / 'experiments/cut'
    assert [state.name for state in (folder / 'training_states').iterdir()] == ['3.state']
    assert 'the state of iteration 3 is saved. Resume with: python prog -opt' in log_text(folder)
    assert not any('psnr' in key for row in rows(folder) for key in row), 'validated when resumed'

    run(signalled('cut', **options), '--auto_resume')
    assert differences(final_state(folder), final_state(run(signalled('whole', **options)))) == []


@pytest.mark.parametrize(('iteration', 'states'), [(3, {'3'}), (6, {'4', '6'})])
def test_a_validation_is_left_between_two_images_and_made_again(
    run, two_val_opt, monkeypatch, tmp_path, iteration, states
):
    """In the second of two sets; of an iteration that saves no state otherwise, and the last."""
    options = {'logger__save_checkpoint_freq': 4, 'val__val_freq': 3}
    whole = run(two_val_opt(name='whole', **options))
    restored = []

    def test(self):
        restored.append(self.current_iter)
        if restored.count(iteration) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        restore(self)

    restore = SRModel.test
    opt = two_val_opt(name='cut', **options)
    opt['datasets'] = dict(sorted(opt['datasets'].items(), reverse=True))  # one image, then three
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(SRModel, 'test', test)
        run(opt)
    assert stop.value.code == 75
    assert restored.count(iteration) == 2, 'of four images'
    folder = tmp_path / 'experiments/cut/training_states'
    assert {state.stem for state in folder.iterdir()} == states

    folder = run(opt, '--auto_resume')
    ours, theirs = (
        [checkpoint(f, name) for name in ('net_g_latest.pth', '6.state')] for f in (folder, whole)
    )
    assert differences(ours, theirs) == []
    assert sorted(map(str, rows(folder))) == sorted(map(str, rows(whole)))


def test_the_first_interrupt_is_noted_and_the_second_one_ends_at_once(monkeypatch):
    monkeypatch.setattr(os, 'write', lambda *_: None)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = preemption.PreemptionWatch()
    try:
        with watch:
            with pytest.raises(KeyboardInterrupt):  # there is nothing to save yet
                os.kill(os.getpid(), signal.SIGINT)
            watch.is_stepping = True
            assert watch.asked() == 0
            os.kill(os.getpid(), signal.SIGINT)
            assert watch.asked() == watch.noticed() == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in the background
        watch = preemption.PreemptionWatch()
        with watch:
            watch.is_stepping = True
            os.kill(os.getpid(), signal.SIGINT)
            assert watch.asked() == 0
    finally:
        signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize(
    ('argv', 'command'),
    [
        (['/bin/basicsr train', '-opt', 'a b.yml'], "basicsr train -opt 'a b.yml' --auto_resume"),
        (['/x/cli.py train', '-opt', 'x'], 'basicsr train -opt x --auto_resume'),
        (['basicsr/train.py', '-opt', 'x'], 'python basicsr/train.py -opt x --auto_resume'),
        (['t.py', '--auto_resume', '-opt', 'x'], 'python t.py --auto_resume -opt x'),
    ],
)
def test_the_command_to_go_on_is_the_one_that_was_given(argv, command, monkeypatch):
    monkeypatch.setattr(sys, 'argv', argv)
    assert command_line('--auto_resume') == command


def test_under_torchrun_the_command_begins_with_it(monkeypatch):
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'x')
    monkeypatch.setattr(sys, 'argv', ['train.py', '-opt', 'x'])
    assert command_line('--auto_resume') == 'torchrun … train.py -opt x --auto_resume'


def test_a_state_is_named_only_where_this_run_has_saved_one(tmp_path, monkeypatch):
    opt = {'path': {'training_states': str(tmp_path)}}
    monkeypatch.setattr(sys, 'argv', ['train.py', '-opt', 'x'])
    monkeypatch.setattr(progress.current, 'phase', 'step')
    assert preemption.last_state(opt) == ''
    for number in (8, 10):
        (tmp_path / f'{number}.state').touch()
    assert preemption.last_state(opt).startswith('The last state is that of iteration 10: python')
    monkeypatch.setattr(progress.current, 'phase', 'start')
    assert preemption.last_state(opt) == '', 'those of an earlier run'


def test_a_handler_is_silent_where_standard_error_has_no_reader(monkeypatch):
    """As with ``2>&1 | tee``, which Ctrl-C ends as well."""
    reader, writer = os.pipe()
    os.close(reader)
    for stderr in (os.fdopen(writer, 'w'), None):
        monkeypatch.setattr(sys, 'stderr', stderr)
        watch = preemption.PreemptionWatch()
        watch.is_stepping, watch._before = True, {signal.SIGINT: None}
        watch._interrupt(signal.SIGINT, None)
        assert watch.signal == signal.SIGINT


@pytest.mark.slow
def test_all_ranks_stop_at_one_iteration_and_torchrun_goes_on(
    signalled, run_program, write, repository, tmp_path
):
    """One rank gets the signal; its launcher starts all again, without --auto_resume."""
    options = {'datasets__train__dataset_enlarge_ratio': 4}
    program = repository / 'basicsr/train.py'
    root = f'path:experiments_root={tmp_path / "experiments"}'
    cut = ('-opt', write(signalled('cut', **options)), '--force_yml', root)
    old = tmp_path / 'experiments/cut/training_states/9.state'
    old.parent.mkdir(parents=True)
    old.write_text('of an earlier run, not one to go on with')
    result = run_program(*TORCHRUN, '--max-restarts=1', program, *cut, SEND='-TERM')
    assert result.returncode == 0, result.stderr
    assert result.stderr.count('Asked to stop: the state of iteration 3 is saved') == 1
    assert 'Restarted by torchrun: resuming from' in result.stderr
    assert not old.exists(), 'moved aside'

    whole = ('-opt', write(signalled('whole', **options)), '--force_yml', root)
    result = run_program(*TORCHRUN, program, *whole)
    assert result.returncode == 0, result.stderr
    ours, theirs = (final_state(tmp_path / 'experiments' / name) for name in ('cut', 'whole'))
    assert differences(ours, theirs) == []


# In a process of its own: libraries that other tests have used may have threads everywhere.
HEEDING = """
import multiprocessing
import os
import subprocess
import time

from basicsr.data.workers import heed_parent_alone


def heed(ready):
    heed_parent_alone()
    ready.set()
    time.sleep(600)


def start(context):
    ready = context.Event()
    worker = context.Process(target=heed, args=(ready,), daemon=True)
    worker.start()
    return worker, ready


if __name__ == '__main__':
    multiprocessing.set_forkserver_preload(['basicsr.data.workers'])
    contexts = [multiprocessing.get_context(method) for method in ('forkserver', 'fork')]
    workers = [start(context) for context in contexts]
    for worker, ready in workers:
        assert ready.wait(120)
        for name in ('-TERM', '-USR1', '-INT'):
            subprocess.run(['kill', name, str(worker.pid)], check=True)
    workers[-1][0].join(0.3)
    for worker, _ in workers:
        assert worker.is_alive(), worker.exitcode
        worker.terminate()
        worker.join(120)
        assert worker.exitcode == 0, worker.exitcode
    for context in contexts:
        assert start(context)[1].wait(120)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, 'sigwaitinfo'), reason='the system has no sigwaitinfo')
def test_a_worker_ends_when_its_parent_says_so_or_is_gone_and_at_no_other_signal(
    run_program, tmp_path
):
    """Forked by its parent or by a fork server. The output ends with the last worker."""
    (tmp_path / 'heeding.py').write_text(HEEDING)
    result = run_program('heeding.py', timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr


def test_without_torchrun_a_folder_is_nobodys(tmp_path):
    preemption.note_launcher(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not preemption.was_begun_by_launcher(tmp_path)


def test_a_folder_belongs_to_the_torchrun_that_has_begun_it(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'x')
    assert not preemption.was_begun_by_launcher(tmp_path)
    preemption.note_launcher(tmp_path)
    assert preemption.was_begun_by_launcher(tmp_path)
    monkeypatch.setattr(os, 'getppid', lambda: 1)
    assert not preemption.was_begun_by_launcher(tmp_path), 'of another start'
    (file,) = tmp_path.iterdir()
    file.write_bytes(b'\xff')
    assert not preemption.was_begun_by_launcher(tmp_path), 'damaged'
