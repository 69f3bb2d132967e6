import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from runs import TORCHRUN, checkpoint, differences, log_text

from basicsr.models.sr_model import SRModel
from basicsr.run.resume import choose_state
from basicsr.utils.checkpoint_series import (
    CheckpointSeries,
    check_file,
    numbered_states,
)
from basicsr.utils.options import OptionError


class Interrupted(BaseException):
    pass


def names(folder, pattern='*'):
    return sorted(file.name for file in folder.glob(pattern))


def final(folder):
    return {name: checkpoint(folder, name) for name in ('net_g_latest.pth', '6.state')}


def iteration_begun_at(folder):
    """Of the newest log: the iteration that the run went on from."""
    return int(
        log_text(folder).partition('Resuming training from epoch: ')[2].split()[2].strip('.')
    )


@pytest.fixture
def cut(run, train_opt):
    """A run with states at 2 and 4 of 6 iterations: its folder, and the options to go on with."""

    def make(name='cut', **overrides):
        opt = train_opt(name=name, train__total_iter=4, **overrides)
        folder = run(opt)
        opt['train']['total_iter'] = 6
        return folder, opt

    return make


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


# ---------------------------------------------------------------------------- what is recorded


def test_a_state_records_length_and_hash_of_its_networks_and_of_no_other_file(run, train_opt):
    opt = train_opt(train__posthoc_ema=True, logger__keep_best=True, train__total_iter=4)
    folder = run(opt)
    for iteration in (2, 4):
        files = checkpoint(folder, f'{iteration}.state')['files']
        assert sorted(files) == [f'averages_{iteration}.pth', f'net_g_{iteration}.pth']
        for name, record in files.items():
            check_file(folder / 'models' / name, record)
            assert record['size'] == (folder / 'models' / name).stat().st_size


def test_equal_runs_write_equal_bytes(run, train_opt):
    a, b = run(train_opt(name='a')), run(train_opt(name='b'))
    for name in ('models/net_g_latest.pth', 'training_states/6.state'):
        assert (a / name).read_bytes() == (b / name).read_bytes()


def test_a_change_of_any_byte_is_seen(cut):
    folder, _ = cut()
    file = folder / 'models/net_g_4.pth'
    record = checkpoint(folder, '4.state')['files'][file.name]
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        flip(file, place)
        with pytest.raises(ValueError, match='damaged, or from another run: its SHA-256 begins'):
            check_file(file, record)
        file.write_bytes(whole)
    file.write_bytes(whole + b'x')
    with pytest.raises(ValueError, match='truncated, or from another run'):
        check_file(file, record)


# -------------------------------------------------------------------------- what a run resumes from


def earlier(file):
    """Put the file of iteration 2 in the place of that of iteration 4."""
    shutil.copy(file.with_name(file.name.replace('4', '2')), file)


EMPTY = torch.ones(2, device='meta')
BARE = {'iter': 4, 'epoch': 0, 'optimizers': [], 'schedulers': []}
NETWORK, STATE = 'models/net_g_4.pth', 'training_states/4.state'


@pytest.mark.parametrize(
    ('name', 'damage', 'reason'),
    [
        (NETWORK, lambda file: file.unlink(), 'no checkpoint file .*net_g_4'),
        (NETWORK, lambda file: file.write_bytes(b''), 'net_g_4.pth has 0.0 B, .*truncated'),
        (NETWORK, lambda file: flip(file, 700), 'net_g_4.pth is damaged'),
        (NETWORK, earlier, 'net_g_4.pth is damaged, or from another run'),
        (STATE, lambda file: file.write_bytes(b''), 'cannot load .*4.state: it is damaged'),
        (STATE, lambda file: file.write_bytes(file.read_bytes()[:-30]), '4.state: it is damaged'),
        (STATE, lambda file: flip(file, 700), '4.state: it is damaged .wrong checksum'),
        (STATE, lambda file: torch.save([4], file), '4.state is not a training state'),
        (STATE, lambda file: torch.save({'iter': 4, 'epoch': 0}, file), 'not a training state'),
        (STATE, lambda file: torch.save({**BARE, 'files': [4]}, file), 'not a training state'),
        (STATE, lambda file: torch.save({**BARE, 'swa': EMPTY}, file), 'not a training state'),
        (STATE, lambda file: torch.save({**BARE, 'files': {'a': 4}}, file), 'not a training state'),
        (STATE, earlier, '4.state is the state of iteration 2'),
        (STATE, lambda file: file.unlink() or file.mkdir(), 'no checkpoint file .*4.state'),
    ],
)
def test_auto_resume_takes_the_newest_whole_checkpoint(cut, name, damage, reason):
    folder, opt = cut()
    opt['path'] = {
        'training_states': str(folder / 'training_states'),
        'models': str(folder / 'models'),
        'resume_state': None,
    }
    assert choose_state(opt, '--auto_resume')[0] == str(folder / STATE)
    damage(folder / name)
    file, state = choose_state(opt, '--auto_resume')
    assert (file, state['iter']) == (str(folder / 'training_states/2.state'), 2)
    assert re.search(reason, log_text(folder))


@pytest.mark.parametrize('name', [NETWORK, STATE])
def test_a_run_that_passes_over_a_damaged_checkpoint_ends_as_one_that_never_stopped(
    run, cut, train_opt, name
):
    whole = run(train_opt(name='whole'))
    folder, opt = cut()
    flip(folder / name, 700)
    run(opt, '--auto_resume')
    assert differences(final(whole), final(folder)) == []
    assert iteration_begun_at(folder) == 2
    assert log_text(folder).count('WARNING: --auto_resume: newer states are skipped: ') == 1


def test_a_run_is_not_begun_anew_over_one_whose_states_are_all_damaged(cut, run):
    folder, opt = cut()
    for iteration in (2, 4):
        flip(folder / f'models/net_g_{iteration}.pth', 700)
    before = {file: file.read_bytes() for file in folder.rglob('*.*') if file.suffix != '.log'}
    with pytest.raises(ValueError, match=r'no state in .*net_g_4.*net_g_2.*Restore the files'):
        run(opt, '--auto_resume')
    assert {file: file.read_bytes() for file in before} == before


def test_a_named_state_that_is_damaged_or_lacks_a_network_is_an_error(cut, run):
    folder, opt = cut()
    opt['path'] = {'resume_state': str(folder / STATE)}
    flip(folder / NETWORK, 700)
    with pytest.raises(ValueError, match='net_g_4.pth is damaged, or from another run'):
        run(dict(opt, name='next'))
    (folder / NETWORK).unlink()
    with pytest.raises(FileNotFoundError, match='no checkpoint file .*net_g_4.pth'):
        run(dict(opt, name='next'))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'optimizers': [{0: None}]}, "has invalid entries .KeyError: 'param_groups'"),
        ({'optimizers': [None]}, 'has invalid entries .TypeError'),
        ({'types': {4: 5}}, 'has invalid entries .TypeError'),
    ],
)
def test_a_state_that_no_run_has_written_is_refused_in_a_line(cut, run, change, message):
    folder, opt = cut()
    torch.save({**checkpoint(folder, '4.state'), **change}, folder / STATE)
    opt['path'] = {'resume_state': str(folder / STATE)}
    with pytest.raises(ValueError, match=message):
        run(dict(opt, name='next'))


def test_what_a_run_does_not_load_may_be_missing(cut, run):
    folder, opt = cut(train__posthoc_ema=True)
    (folder / 'models/averages_4.pth').unlink()
    (folder / NETWORK).rename(folder / 'mine.pth')
    opt['train']['posthoc_ema'] = False
    opt['path'] = {
        'ignore_resume_networks': ['network_g'],
        'pretrain_network_g': str(folder / 'mine.pth'),
    }
    run(opt, '--auto_resume')
    assert iteration_begun_at(folder) == 4


def test_states_without_records_are_gone_on_from_and_looked_at_as_far_as_can_be(cut, run):
    """As BasicSR 1.x writes them."""
    folder, opt = cut()
    for iteration in (2, 4):
        state = checkpoint(folder, f'{iteration}.state')
        del state['files']
        torch.save(state, folder / f'training_states/{iteration}.state')
    flip(folder / NETWORK, 700)
    run(opt, '--auto_resume')
    assert iteration_begun_at(folder) == 2
    (folder / 'training_states/6.state').unlink()
    run(opt, '--auto_resume')
    assert iteration_begun_at(folder) == 4, 'it has been written anew'


@pytest.mark.slow
def test_all_ranks_pass_over_the_same_checkpoint_or_refuse(
    cut, write, run_program, repository, tmp_path, monkeypatch
):
    monkeypatch.setattr('basicsr.train.claim_folder', lambda _: None)  # this process will live on
    folder, opt = cut(val=None)
    lost, lost_opt = cut('lost', val=None)
    for file in (folder / NETWORK, *(lost / 'training_states').iterdir()):
        flip(file, 700)
    plan = [
        {'pipeline': 'train', 'argv': ['-opt', write(o), '--auto_resume'], 'die_after': None}
        for o in (opt, lost_opt)
    ]
    (tmp_path / 'plan.json').write_text(json.dumps([{**part, 'draw': False} for part in plan]))
    result = run_program(*TORCHRUN, repository / 'tests/distributed_program.py', 'plan.json')
    weights = [torch.load(folder / f'rank_{rank}.pth')['net_g'] for rank in (0, 1)]
    assert differences(*weights) == []
    assert iteration_begun_at(folder) == 2
    assert names(folder / 'training_states') == ['2.state', '4.state', '6.state']
    assert result.returncode == 1
    assert f'no state in {lost / "training_states"} can be resumed from' in result.stderr


# ---------------------------------------------------------------------------- how many are kept


def test_the_last_states_are_kept_with_their_networks(run, train_opt):
    whole = run(train_opt(name='whole', logger__save_checkpoint_freq=1))
    options = {'logger__save_checkpoint_freq': 1, 'train__posthoc_ema': True}
    folder = run(train_opt(name='few', logger__keep_last=2, logger__keep_best=True, **options))
    assert names(folder / 'training_states') == ['5.state', '6.state']
    networks = ['net_g_5.pth', 'net_g_6.pth', 'net_g_best.pth', 'net_g_latest.pth']
    assert names(folder / 'models', 'net_*') == networks
    assert len(names(folder / 'models', 'averages_*')) == 6
    weights = [checkpoint(f, 'net_g_latest.pth')['params'] for f in (whole, folder)]
    assert differences(*weights) == []


@pytest.mark.parametrize('workers', [0, 2])
def test_a_run_that_keeps_one_state_resumes_bit_for_bit(run, train_opt, cut, workers):
    options = {'logger__keep_last': 1, 'datasets__train__num_worker_per_gpu': workers}
    whole = run(train_opt(name='whole', **options))
    folder, opt = cut(**options)
    assert names(folder / 'training_states') == ['4.state']
    run(opt, '--auto_resume')
    assert differences(final(whole), final(folder)) == []
    assert names(folder / 'training_states') == ['6.state']


def test_earlier_checkpoints_go_only_when_the_new_state_is_written(tmp_path, monkeypatch):
    series = CheckpointSeries(tmp_path, keep_last=1)
    for iteration in (8, 9):
        series.write({'params': {}}, tmp_path / f'net_g_{iteration}.pth')
        series.write({'iter': iteration}, tmp_path / f'{iteration}.state')
    kept = ['9.state', 'net_g_9.pth']
    assert names(tmp_path) == kept
    series.write({'params': {}}, tmp_path / 'net_g_10.pth')
    assert names(tmp_path, '*9*') == kept
    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', fail)
        with pytest.raises(OSError, match='cannot write'):
            series.write({'iter': 10}, tmp_path / '10.state')
    assert names(tmp_path, '*9*') == kept


def fail(*_):
    raise RuntimeError('No space left on device')


def test_states_of_later_iterations_are_not_counted(tmp_path):
    """A run that goes on from iteration 2, since later states are damaged, keeps its own."""
    for iteration in (1, 2, 7, 8):
        (tmp_path / f'{iteration}.state').touch()
    CheckpointSeries(tmp_path, keep_last=2).write({'iter': 3}, tmp_path / '3.state')
    assert [file.stem for file in numbered_states(tmp_path)] == ['2', '3', '7', '8']


def test_a_state_that_a_signal_adds_pushes_out_no_other(tmp_path):
    """It goes when there are enough of the regular ones, of which the end of the run is one."""
    series = CheckpointSeries(tmp_path, keep_last=2, every=3, last=10)
    kept = []
    for iteration in (2, 3, 4, 6, 8, 9, 10):
        series.write({'iter': iteration}, tmp_path / f'{iteration}.state')
        kept.append([int(file.stem) for file in numbered_states(tmp_path)])
    assert kept == [[2], [2, 3], [3, 4], [3, 6], [3, 6, 8], [6, 9], [9, 10]]


def test_a_file_that_cannot_be_removed_costs_a_warning(tmp_path, caplog):
    series = CheckpointSeries(tmp_path, keep_last=1)
    (tmp_path / '1.state').mkdir()
    series.write({'iter': 2}, tmp_path / '2.state')
    assert 'keep_last: cannot remove' in caplog.text


def two_networks(series, folder, iteration):
    for label in 'gd':
        series.write({'params': {}}, folder / f'net_{label}_{iteration}.pth')
    series.write({'iter': iteration}, folder / f'{iteration}.state')


@pytest.mark.parametrize('files_removed', range(3))
def test_a_removal_that_is_killed_is_finished_by_the_next_one(tmp_path, monkeypatch, files_removed):
    series, unlink, removed = CheckpointSeries(tmp_path, keep_last=1), Path.unlink, []

    def die_at(path, missing_ok=False):
        if path.name in ('2.state', 'net_g_2.pth', 'net_d_2.pth'):
            if len(removed) == files_removed:
                raise Interrupted
            removed.append(path)
        unlink(path, missing_ok)

    two_networks(series, tmp_path, 2)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Path, 'unlink', die_at)
        two_networks(series, tmp_path, 4)
    assert len(names(tmp_path, '*2.*')) == 3 - files_removed
    CheckpointSeries(tmp_path, keep_last=1).prune(tmp_path, 4)
    assert names(tmp_path) == ['4.state', 'net_d_4.pth', 'net_g_4.pth']


def test_what_a_kill_has_left_goes_when_a_finished_run_is_resumed(run, train_opt):
    folder = run(train_opt(logger__keep_last=1))
    for name in ('training_states/4.state', 'models/net_g_4.pth', 'models/net_g_best.pth'):
        (folder / name).write_bytes(b'')
    run(train_opt(logger__keep_last=1), '--auto_resume')
    assert names(folder / 'training_states') == ['6.state']
    assert names(folder / 'models') == ['net_g_6.pth', 'net_g_best.pth', 'net_g_latest.pth']


def test_networks_whose_states_the_user_has_removed_are_kept(run, train_opt):
    folder = run(train_opt(train__total_iter=4))
    (folder / 'training_states/2.state').unlink()
    run(train_opt(logger__keep_last=1), '--auto_resume')
    assert names(folder / 'training_states') == ['6.state']
    assert names(folder / 'models', 'net_g_?.pth') == ['net_g_2.pth', 'net_g_6.pth']


def test_a_run_that_is_moved_aside_keeps_no_temporaries(run, train_opt, tmp_path):
    temporary = run(train_opt()) / 'models/.net_g_2.pth.1-1.tmp'
    temporary.write_bytes(b'')
    run(train_opt())
    (archive,) = (tmp_path / 'experiments').glob('tiny_archived_*')
    assert names(archive / 'training_states') == ['2.state', '4.state', '6.state']
    assert not list(archive.rglob('.*.tmp'))


# ---------------------------------------------------------------------------- the best


def scores(folder, dataset='val', metric='psnr'):
    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    key = f'metrics/{dataset}/{metric}'
    return {row['iter']: row[key] for row in map(json.loads, lines) if key in row}


def every_step(train_opt, name, **overrides):
    """Every iteration is saved and validated; the weights get better and worse."""
    options = {'val__val_freq': 1, 'logger__save_checkpoint_freq': 1}
    optimizer = {'type': 'SGD', 'lr': 0.3}
    return train_opt(name=name, train__optim_g=optimizer, **options, **overrides)


@pytest.mark.parametrize('better', ['higher', 'lower'])
def test_the_best_network_is_that_of_the_best_score(run, train_opt, better):
    opt = every_step(train_opt, 'x', logger__keep_best=True, train__total_iter=8)
    opt['val']['metrics']['psnr']['better'] = better
    folder = run(opt)
    found = scores(folder)
    best = (max if better == 'higher' else min)(found, key=found.get)
    ours, theirs = (checkpoint(folder, f'net_g_{label}.pth') for label in ('best', best))
    assert differences(ours, theirs) == []


def test_metric_and_set_of_the_best_may_be_chosen(run, two_val_opt):
    choice = {'metric': 'ssim', 'dataset': 'val_2'}
    folder = run(every_step(two_val_opt, 'x', logger__keep_best=choice, train__total_iter=8))
    found = scores(folder, 'val_2', 'ssim')
    best = max(found, key=lambda iteration: (found[iteration], iteration))
    ours, theirs = (checkpoint(folder, f'net_g_{label}.pth') for label in ('best', best))
    assert differences(ours, theirs) == []


def test_a_run_that_keeps_the_best_is_otherwise_the_same(run, train_opt):
    whole, best = (
        run(every_step(train_opt, 'a')),
        run(every_step(train_opt, 'b', logger__keep_best=True)),
    )
    assert differences(final(whole), final(best)) == []


@pytest.mark.parametrize('dies_in', ['validation', 'save_best'])
@pytest.mark.parametrize('iteration', [1, 3, 5])
def test_a_kill_between_validation_and_save_loses_no_best(
    run, train_opt, monkeypatch, dies_in, iteration
):
    options = {'val__val_freq': 1, 'logger__keep_best': True}
    whole = run(train_opt(name='whole', **options))
    opt, before = train_opt(name='cut', **options), getattr(SRModel, dies_in)

    def die(model, *args):
        if iteration in args:
            raise Interrupted
        before(model, *args)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(SRModel, dies_in, die)
        run(opt)
    folder = run(opt, '--auto_resume')
    assert differences(final(whole), final(folder)) == []
    weights = [checkpoint(f, 'net_g_best.pth') for f in (whole, folder)]
    assert differences(*weights) == []


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        ({'logger__keep_best': {'metric': 'pnsr'}}, 'metric: there is no pnsr; there are psnr'),
        ({'logger__keep_best': {'dataset': 'Set5'}}, 'dataset: there is no Set5; there are val'),
        ({'logger__keep_best': {'of': 3}}, 'there are metric and dataset'),
        ({'logger__keep_best': True, 'val': None}, 'needs a validation set'),
        ({'logger__keep_best': True, 'val__metrics': None}, 'needs a validation set'),
        ({'logger__keep_last': 0}, 'keep_last: .*greater than or equal to 1'),
        ({'logger__checkpoint_format': 'onnx'}, "'pth' or 'safetensors'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(run, train_opt, overrides, message):
    with pytest.raises(OptionError, match=message):
        run(train_opt(**overrides))


def test_a_network_that_the_model_saves_nowhere_is_not_asked_for(cut, run):
    """It stands in the option file, and no file of it in the state's record."""
    _, opt = cut()
    opt['network_x'] = dict(opt['network_g'])
    assert (run(opt, '--auto_resume') / 'training_states/6.state').is_file()


def test_averages_that_a_signal_added_go_with_their_state(tmp_path):
    series = CheckpointSeries(tmp_path, keep_last=1, every=2, last=8)
    for number in (2, 3, 4):
        for name in ('net_g', 'averages', 'averages_h'):
            series.write({'a': torch.ones(1)}, tmp_path / f'{name}_{number}.pth')
        series.write({'iter': number}, tmp_path / f'{number}.state')
    assert names(tmp_path, '*.state') == ['4.state']
    assert names(tmp_path, 'averages*') == [
        *('averages_2.pth', 'averages_4.pth', 'averages_h_2.pth', 'averages_h_4.pth'),
    ]
