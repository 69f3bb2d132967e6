import sys
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import wandb
from runs import Recorder, log_text, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from basicsr.models.sr_model import SRModel
from basicsr.utils.logger import init_tb_logger, init_tb_loggers, init_wandb_logger
from basicsr.utils.scalar_writers import JsonlWriter, ScalarWriter, TensorBoardWriter


class Failing(Recorder):
    def add_scalar(self, tag, value, step):
        raise RuntimeError('the server is gone')


def test_a_writer_that_fails_is_switched_off_with_one_warning(caplog):
    good = Recorder()
    writer = ScalarWriter(Failing(), good)
    for step in range(3):
        writer.add_scalar('x', np.float64(step), step)
    writer.flush()
    assert good.values == {('x', step): step for step in range(3)}
    assert caplog.messages == [
        'Failing failed and is switched off for the rest of the run: the server is gone'
    ]


def test_training_goes_on_without_its_curves(run, train_opt, monkeypatch):
    add_scalar = TensorBoardWriter.add_scalar

    def fail_later(self, tag, value, step):
        if step >= 3:
            raise OSError('disk full')
        add_scalar(self, tag, value, step)

    monkeypatch.setattr(TensorBoardWriter, 'add_scalar', fail_later)
    folder = run(train_opt(logger__use_tb_logger=True))
    assert log_text(folder).count('TensorBoardWriter failed and is switched off') == 1
    assert [row['iter'] for row in rows(folder) if 'lr' in row] == list(range(1, 7))


@pytest.fixture
def writer_opt(tmp_path):
    """What init_tb_loggers reads."""
    (tmp_path / 'exp').mkdir()

    def make(name='tiny', use_tb_logger=True, **wandb):
        return {
            'name': name,
            'root_path': str(tmp_path),
            'path': {'experiments_root': str(tmp_path / 'exp')},
            'logger': {
                'use_tb_logger': use_tb_logger,
                'wandb': {'project': None, 'resume_id': None, **wandb},
            },
        }

    return make


def test_a_tensorboard_folder_that_cannot_be_written_costs_a_warning(writer_opt, tmp_path, caplog):
    (tmp_path / 'tb_logger').write_text('in the way')
    writer = init_tb_loggers(writer_opt())
    writer.add_scalar('x', 1, 1)
    writer.close()
    assert rows(tmp_path / 'exp') == [{'iter': 1, 'x': 1.0}]
    (record,) = caplog.records
    assert record.message.startswith('No TensorBoard events are written: ')


def test_other_ranks_write_nothing(writer_opt, tmp_path, monkeypatch):
    monkeypatch.setattr('basicsr.utils.logger.get_dist_info', lambda: (1, 2))
    writer = init_tb_loggers(writer_opt(project='x', mode='offline'))
    writer.add_scalar('x', 1, 1)
    init_tb_logger(tmp_path / 'tb').add_scalar('x', 1, 1)
    assert init_wandb_logger(writer_opt(project='x', mode='offline')) is None
    writer.close()
    assert [path.name for path in tmp_path.rglob('*')] == ['exp']


@pytest.mark.parametrize('options', [{'name': 'my_debug'}, {'use_tb_logger': False}])
def test_debug_runs_and_those_that_want_none_write_no_events(writer_opt, tmp_path, options):
    init_tb_loggers(writer_opt(**options)).close()
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['exp', 'metrics.jsonl']


def test_scalars_of_an_iteration_are_one_row(tmp_path):
    writer = JsonlWriter(tmp_path / 'x.jsonl')
    for step in (10, 20):
        writer.add_scalar('lr', 0.5, step)
        writer.add_scalar('losses/l_pix', step / 4, step)
        writer.add_image('image', np.zeros((2, 2, 3), np.uint8), step)
    writer.flush()
    writer.flush()
    writer.add_scalar('metrics/val/psnr', 30.0, 20)
    writer.close()
    assert (tmp_path / 'x.jsonl').read_text() == (
        '{"iter": 10, "lr": 0.5, "losses/l_pix": 2.5}\n'
        '{"iter": 20, "lr": 0.5, "losses/l_pix": 5.0}\n'
        '{"iter": 20, "metrics/val/psnr": 30.0}\n'
    )


def test_a_resume_drops_what_is_made_anew(tmp_path):
    """Validation follows the save, so that of the resumed iteration is repeated."""
    path = tmp_path / 'x.jsonl'
    kept = ['{"iter": 10, "lr": 1}', '{"iter": 10, "metrics/val/psnr": 1}', '{"iter": 20, "lr": 1}']
    dropped = ['{"iter": 20, "metrics/val/psnr": 2}', '{"iter": 30, "lr": 1}', '{"iter": 4']
    path.write_text('\n'.join(kept + dropped))
    JsonlWriter(path, resume_iter=20).add_scalar('lr', 0.5, 21)
    assert path.read_text().splitlines() == kept
    JsonlWriter(path)
    assert path.read_text() == '', 'a fresh run begins an empty file'


def events(folder):
    accumulator = EventAccumulator(str(folder), {'images': 0, 'scalars': 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_scalars_and_images(tmp_path):
    image = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    writer = init_tb_logger(tmp_path / 'tb')
    writer.add_scalar('lr', 0.25, 3)
    writer.add_image('val/one', image, 3)
    writer.close()
    read = events(tmp_path / 'tb')
    assert [(event.step, event.value) for event in read.Scalars('lr')] == [(3, 0.25)]
    (event,) = read.Images('val/one')
    assert (event.step, event.width, event.height) == (3, 4, 2)
    decoded = cv2.imdecode(np.frombuffer(event.encoded_image_string, np.uint8), cv2.IMREAD_COLOR)
    assert np.array_equal(decoded[..., ::-1], image)


def test_events_of_a_run_and_its_resume_are_one_curve(run, train_opt, tmp_path, monkeypatch):
    class Interrupted(BaseException):
        pass

    step = SRModel.optimize_parameters

    def dying_step(self, current_iter):
        step(self, current_iter)
        if current_iter == 4:
            raise Interrupted

    opt = train_opt(logger__use_tb_logger=True, logger__save_checkpoint_freq=3)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(SRModel, 'optimize_parameters', dying_step)
        run(opt)
    run(opt, '--auto_resume')
    read = events(tmp_path / 'tb_logger' / 'tiny')
    # Files of one second are read in the order of their names, not of their making.
    assert sorted(event.step for event in read.Scalars('losses/l_pix')) == [1, 2, 3, 4, 5, 6]
    scores = sorted((event.step, event.value) for event in read.Scalars('metrics/val/psnr'))
    assert [step for step, _ in scores] == [3, 3, 6], 'the resume repeats what it may have missed'
    assert scores[0] == scores[1]
    assert {'lr', 'time/iteration', 'time/data'} <= set(read.Tags()['scalars'])
    tags = read.Tags()['images']
    assert len(tags) == 3
    assert max(image.step for image in read.Images(tags[0])) == 6


def test_a_missing_tensorboard_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with pytest.raises(ImportError, match=r'pip install tensorboard \(or set it to false\)'):
        TensorBoardWriter(tmp_path)


@pytest.fixture
def wandb_runs(monkeypatch):
    """Runs that the real package starts, with the arguments and the rows given to them."""
    started, init = [], wandb.init

    def keep(**kwargs):
        run, logged = init(**kwargs), []
        log = run.log
        run.log = lambda row: (logged.append(row), log(row))
        started.append(SimpleNamespace(run=run, given=kwargs, rows=logged))
        return run

    monkeypatch.setattr(wandb, 'init', keep)
    return started


def test_a_wandb_run_goes_on_when_resumed_and_only_then(run, train_opt, wandb_runs):
    where = {'project': 'x', 'mode': 'offline', 'tags': ['a']}
    options = {'logger__wandb': where, 'logger__save_checkpoint_freq': 3}
    folder = run(train_opt(train__total_iter=3, **options))
    first = (folder / 'wandb_run_id.txt').read_text().strip()
    run(train_opt(train__total_iter=6, **options), '--auto_resume')
    assert (folder / 'wandb_run_id.txt').read_text().strip() == first
    run(train_opt(train__total_iter=1, **options))
    assert (folder / 'wandb_run_id.txt').read_text().strip() not in ('', first)

    assert [r.run.id == first for r in wandb_runs] == [True, True, False]
    assert [r.given['resume'] for r in wandb_runs] == ['never', 'allow', 'never']
    assert wandb_runs[0].run.config['train']['optim_g']['lr'] == 1e-3
    assert wandb_runs[0].run.config['train']['warmup_iter'] == -1, 'options are complete'
    assert (wandb_runs[0].run.name, wandb_runs[0].run.project) == ('tiny', 'x')
    assert wandb_runs[0].run.tags == ('a',)

    steps = [row for r in wandb_runs[:2] for row in r.rows if 'lr' in row]
    logged = [row for row in rows(next(folder.parent.glob('tiny_archived_*'))) if 'lr' in row]
    assert [{k: v for k, v in row.items() if not k.startswith('time/')} for row in steps] == logged
    scores = [row for row in wandb_runs[1].rows if 'metrics/val/psnr' in row]
    assert [row['iter'] for row in scores] == [3, 6]
    archive = next(folder.parent.glob('tiny_archived_*'))
    assert len(list(archive.glob('wandb/offline-run-*/files/media/images/**/*.png'))) == 3 * 3


def test_a_wandb_run_may_be_chosen(writer_opt, wandb_runs, tmp_path):
    writer = init_wandb_logger(writer_opt(project='x', mode='offline', resume_id='abc123'))
    writer.add_scalar('l', 0.5, 3)
    writer.close()
    (started,) = wandb_runs
    assert (started.run.id, started.given['resume']) == ('abc123', 'allow')
    assert started.rows == [{'iter': 3, 'l': 0.5}]
    assert (tmp_path / 'exp' / 'wandb_run_id.txt').read_text() == 'abc123\n'


def test_a_missing_wandb_package_stops_the_run_before_it_starts(run, train_opt, monkeypatch):
    made = []
    monkeypatch.setattr(SRModel, 'optimize_parameters', lambda self, i: made.append(i))
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(ImportError, match=r'pip install wandb \(or remove logger.wandb.project\)'):
        run(train_opt(logger__wandb={'project': 'x'}))
    assert made == []


def test_a_wandb_run_that_cannot_start_is_explained(writer_opt, monkeypatch):
    def refuse(**_):
        raise wandb.errors.UsageError('api_key not configured')

    monkeypatch.setattr(wandb, 'init', refuse)
    with pytest.raises(ValueError, match=r'logger.wandb: api_key .* logger.wandb.mode: offline'):
        init_wandb_logger(writer_opt(project='x'))


def test_rows_are_json(tmp_path):
    writer = JsonlWriter(tmp_path / 'x.jsonl')
    writer.add_scalar('x', float('inf'), 1)
    writer.close()
    assert (tmp_path / 'x.jsonl').read_text() == '{"iter": 1, "x": null}\n'


@pytest.mark.parametrize('damage', [b'\xff', b'}', b'[3]\n', b'{"iter": "x"}\n'])
def test_a_damaged_line_of_the_metrics_is_set_aside_at_a_resume(run, train_opt, damage):
    folder = run(train_opt(train__total_iter=4))
    whole = (folder / 'metrics.jsonl').read_bytes()
    (folder / 'metrics.jsonl').write_bytes(damage + whole)
    run(train_opt(), '--auto_resume')
    assert {row['iter'] for row in rows(folder)} == (
        {2, 3, 4, 5, 6} | ({1} if b'\n' in damage else set())
    )
    (copy,) = folder.glob('metrics.jsonl_damaged_*')
    assert copy.read_bytes() == damage + whole
    assert 'metrics.jsonl: 1 damaged lines removed; the original is' in log_text(folder)


@pytest.mark.parametrize(
    ('end', 'damaged'),
    [(b'{"iter": 3, "l', 0), (b'{"iter": 3', 0), (b'{"iter": 3]\n', 1), (b'[' * 10**5 + b'\n', 1)],
)
def test_only_half_a_line_at_the_end_is_no_damage(tmp_path, caplog, end, damaged):
    file = tmp_path / 'metrics.jsonl'
    file.write_bytes(b'{"iter": 1}\n{"iter": 2}\n' + end)
    JsonlWriter(file, resume_iter=9)
    assert rows(tmp_path) == [{'iter': 1}, {'iter': 2}]
    assert len(list(tmp_path.glob('metrics.jsonl_damaged_*'))) == damaged
    assert ('1 damaged lines' in caplog.text) == bool(damaged)


def test_metrics_that_cannot_be_read_at_all_are_set_aside(tmp_path, caplog):
    (tmp_path / 'metrics.jsonl' / 'inside').mkdir(parents=True)
    JsonlWriter(tmp_path / 'metrics.jsonl', resume_iter=9).add_scalar('x', 1, 10)
    (aside,) = tmp_path.glob('metrics.jsonl_damaged_*')
    assert (aside / 'inside').is_dir() and (tmp_path / 'metrics.jsonl').read_bytes() == b''
    assert 'metrics.jsonl is unreadable' in caplog.text


@pytest.mark.parametrize('content', [b'abc\xff23\n', b'a/c123\n', b''])
def test_a_damaged_id_of_a_wandb_run_begins_a_new_one(
    writer_opt, wandb_runs, tmp_path, caplog, content
):
    (tmp_path / 'exp' / 'wandb_run_id.txt').write_bytes(content)
    opt = writer_opt(project='x', mode='offline')
    opt['path']['resume_state'] = 'some.state'
    init_wandb_logger(opt).close()
    assert wandb_runs[0].given['resume'] == 'never'
    assert 'wandb_run_id.txt is damaged: wandb starts a new run' in caplog.text
