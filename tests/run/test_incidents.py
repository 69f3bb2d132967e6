"""Losses and gradients that are not finite: the run ends, leaves a step out, or goes back."""

import json
import os
import signal
from collections import OrderedDict

import pytest
import torch
from blind import adversarial
from norms import with_norms
from runs import TORCHRUN, checkpoint, differences, log_text, rows

from basicsr.models.sr_model import SRModel
from basicsr.models.step import Stepper
from basicsr.run import incidents
from basicsr.run.incidents import Guard

POLICIES = ['stop', 'skip', 'rollback']


@pytest.fixture
def poison(monkeypatch):
    """Let the batch that holds one of some sample numbers have a NaN in its LQ images."""

    def apply(*samples):
        feed = SRModel.feed_data

        def poisoned(self, data):
            feed(self, data)
            seen = range(self.samples_seen - len(self.lq), self.samples_seen)
            if self.is_train and 'lq' in data and any(s in seen for s in samples):
                self.lq = self.lq.clone()
                self.lq[0, 0, 0, 0] = torch.nan

        monkeypatch.setattr(SRModel, 'feed_data', poisoned)

    return apply


@pytest.fixture
def opt(train_opt):
    """Six iterations of two samples, a checkpoint every two; without validation."""

    def make(policy='stop', **overrides):
        opt = train_opt(val=None, train__on_nonfinite=policy, **overrides)
        del opt['datasets']['val']
        return opt

    return make


def end(folder, iteration=6):
    return [checkpoint(folder, 'net_g_latest.pth'), checkpoint(folder, f'{iteration}.state')]


def is_finite(value):
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def only_incident(folder):
    (file,) = (folder / 'incidents').glob('*.pt')
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize('change', [dict, adversarial])
def test_where_all_is_finite_the_policies_make_the_same_run(run, opt, change):
    stop, skip, back = (end(run(change(opt(policy, name=policy)))) for policy in POLICIES)
    assert skip[1]['precision'].pop('watch') == {'skipped': 0, 'in_a_row': 0}
    assert differences(stop, skip) == differences(stop, back) == []


@pytest.mark.parametrize('iteration', [3, 4, 6])
def test_a_run_stops_before_anything_that_is_not_finite_is_saved(
    run, opt, poison, tmp_path, iteration
):
    poison(2 * iteration - 1)
    folder = tmp_path / 'experiments/tiny'
    with pytest.raises(FloatingPointError, match=f'Iteration {iteration}: not finite: l_pix, the'):
        run(opt(train__ema_decay=0.5))
    saved = {int(file.stem) for file in (folder / 'training_states').iterdir()}
    assert saved == {i for i in (2, 4, 6) if i < iteration}
    assert all(is_finite(torch.load(f)) for f in (folder / 'models').iterdir())
    content = only_incident(folder)
    first = 2 * (iteration - 1)
    assert (content['iter'], content['rank'], content['samples']) == (
        iteration,
        0,
        [first, first + 1],
    )
    assert content['not_finite'] == ['l_pix', 'the gradient of g']
    assert content['lq_path'][0].endswith('.png')
    assert content['batch']['gt'].shape == (2, 3, 16, 16)
    assert content['batch']['lq'].isnan().sum() == 1
    assert f'PyTorch: {torch.__version__}' in content['versions']


def test_a_gradient_alone_is_noticed_in_its_iteration(run, opt, monkeypatch, tmp_path):
    compute = SRModel.restore_and_compare

    def with_root_of_zero(self):
        losses = compute(self)
        if self.current_iter == 3:  # finite itself, its slope is not
            losses['l_root'] = (0 * self.output.mean()).abs().sqrt()
        return losses

    monkeypatch.setattr(SRModel, 'restore_and_compare', with_root_of_zero)
    with pytest.raises(FloatingPointError, match='Iteration 3: not finite: the gradient of g'):
        run(opt())
    content = only_incident(tmp_path / 'experiments/tiny')
    assert content['not_finite'] == ['the gradient of g']
    assert all(map(is_finite, content['losses'].values()))


def test_weights_that_overflow_are_not_saved(run, opt, monkeypatch, tmp_path):
    update = SRModel.update_averages

    def overflow(self, current_iter):
        update(self, current_iter)
        if current_iter == 4:
            next(self.net_g.parameters()).data.mul_(torch.inf)

    monkeypatch.setattr(SRModel, 'update_averages', overflow)
    with pytest.raises(FloatingPointError, match='net_g has non-finite weights or statistics'):
        run(opt('skip'))
    assert not (tmp_path / 'experiments/tiny/training_states/4.state').exists()


@pytest.mark.parametrize('optimizer', ['Adam', 'SGD', 'Adagrad', 'RMSprop'])
def test_a_step_that_is_left_out_changes_neither_weights_nor_moments(run, opt, poison, optimizer):
    """The run ends as one whose optimizer never saw that batch."""
    optim = {'type': optimizer, 'lr': 1e-3}
    plain = {'train__optim_g': optim, 'train__scheduler': None, 'train__ema_decay': 0}
    poison(10, 11)
    two = run(opt('skip', name='two', train__total_iter=6, **plain))
    five = end(run(opt(name='five', train__total_iter=5, **plain)), 5)
    six = end(two)
    assert differences(five[0], six[0]) == []
    assert differences(five[1]['optimizers'], six[1]['optimizers']) == []
    assert six[1]['precision']['watch'] == {'skipped': 1, 'in_a_row': 1}
    assert 'its step is skipped, the 1st so far' in log_text(two)


def test_a_first_step_that_is_left_out_leaves_no_momentum_unset(run, opt, poison):
    optim = {'type': 'SGD', 'lr': 1e-2, 'momentum': 0.9}
    plain = {'train__optim_g': optim, 'train__scheduler': None, 'logger__save_checkpoint_freq': 1}
    poison(0, 1)
    folder = run(opt('skip', train__total_iter=2, **plain))
    first, second = (checkpoint(folder, f'{i}.state')['optimizers'][0]['state'] for i in (1, 2))
    assert not any(first.values())
    before, after = (checkpoint(folder, f'net_g_{i}.pth')['params'] for i in (1, 2))
    for (name, weight), state in zip(before.items(), second.values(), strict=True):
        moved = weight - 1e-2 * state['momentum_buffer']
        torch.testing.assert_close(after[name], moved, rtol=0, atol=1e-7)


@pytest.mark.parametrize('parts', [1, 2])
def test_running_statistics_and_averages_never_take_a_bad_batch_in(
    run, opt, poison, tmp_path, parts
):
    poison(4)
    more = {'train__accumulate': parts, 'train__swa': {'start': 3, 'every': 1}}
    for name in ('norms', 'gan'):
        options = opt('skip', name=name, train__ema_decay=0.9, **more)
        options = adversarial(options) if name == 'gan' else with_norms(options, tmp_path)
        folder = run(options)
        assert all(map(is_finite, end(folder)[0].values()))
        assert end(folder)[1]['precision']['watch'] == {'skipped': 1, 'in_a_row': 0}


def test_a_run_that_skips_resumes_bit_for_bit(run, opt, poison, monkeypatch):
    poison(5, 7)
    whole = end(run(opt('skip', name='whole')))
    assert whole[1]['precision']['watch'] == {'skipped': 2, 'in_a_row': 0}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        begin = SRModel.update_learning_rate

        def dying(self, current_iter, *args):
            if current_iter == 5:
                raise KeyboardInterrupt
            begin(self, current_iter, *args)

        patch.setattr(SRModel, 'update_learning_rate', dying)
        run(opt('skip', name='cut'))
    cut = run(opt('skip', name='cut'), '--auto_resume')
    assert differences(whole, end(cut)) == []


def test_too_many_steps_left_out_in_a_row_end_the_run(run, opt, poison, tmp_path):
    poison(*range(4, 60))
    message = r'Iteration 12: .* 10 iterations in a row'
    with pytest.raises(FloatingPointError, match=message):
        run(opt('skip', train__total_iter=30, logger__save_checkpoint_freq=100))
    assert len(list((tmp_path / 'experiments/tiny/incidents').iterdir())) == 10


def test_a_rollback_goes_on_from_the_last_checkpoint_with_later_samples(run, opt, poison):
    """It makes the run that is resumed there, and begins with the sample after the bad batch."""
    poison(9)  # of iteration 5
    back = run(opt('rollback', name='back'))
    text = ''.join(file.read_text() for file in back.glob('*.log'))
    assert (
        'states/4.state, continuing with sample 10 (train.on_nonfinite: rollback, the 1st' in text
    )
    assert [row['iter'] for row in rows(back)] == [1, 2, 3, 4, 5, 6]

    by_hand = run(opt(name='by_hand', train__total_iter=4))
    file = by_hand / 'training_states/4.state'
    torch.save(torch.load(file) | {'samples': 10}, file)
    by_hand = run(opt(name='by_hand'), '--auto_resume')
    assert end(back)[1]['samples'] == 14
    assert differences(end(back), end(by_hand)) == []


@pytest.fixture
def stopped_at(run, monkeypatch):
    """Run until a signal comes in an iteration."""

    def call(iteration, options):
        make = SRModel.optimize_parameters

        def signalled(self, current_iter):
            make(self, current_iter)
            if current_iter == iteration:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(SRModel, 'optimize_parameters', signalled)
            run(options)

    return call


@pytest.mark.parametrize('keep_last', [None, 1])
def test_a_checkpoint_that_a_signal_has_added_changes_no_rollback(
    run, opt, poison, stopped_at, keep_last
):
    poison(11)  # of iteration 6
    more = {'save_checkpoint_freq': 3, 'keep_last': keep_last}
    more = {'train__total_iter': 8, **{f'logger__{key}': value for key, value in more.items()}}
    whole = run(opt('rollback', name='whole', **more))
    stopped_at(4, opt('rollback', name='cut', **more))
    cut = run(opt('rollback', name='cut', **more), '--auto_resume')
    assert differences(end(whole, 8), end(cut, 8)) == []
    if keep_last:
        ours, theirs = (sorted(path.name for path in f.glob('*/*_[0-9]*')) for f in (cut, whole))
        assert ours == theirs


@pytest.mark.slow
def test_a_checkpoint_that_a_signal_has_added_is_none_to_go_back_to(run, opt, poison, stopped_at):
    """Without one of its own, a run goes back to the state it began with, or to none."""
    begin = run(opt(name='first', train__total_iter=2)) / 'training_states/2.state'
    poison(9, 11)  # of iterations 5 and 6
    more = {'logger__save_checkpoint_freq': 8, 'train__total_iter': 7}
    for name in ('whole', 'cut'):
        options = opt('rollback', name=name, **more)
        options['path'] = {'resume_state': str(begin)}
        if name == 'cut':
            stopped_at(4, options)
        run(options, *['--auto_resume'] * (name == 'cut'))
    folders = [begin.parents[2] / name for name in ('whole', 'cut')]
    assert differences(*(end(folder, 7) for folder in folders)) == []

    run(opt('rollback', name='other', logger__save_checkpoint_freq=4, train__total_iter=4))
    folder = run(opt('rollback', name='other', **more), '--auto_resume')
    text = ''.join(file.read_text() for file in folder.glob('*.log'))
    assert 'other/training_states/4.state, continuing' in text, 'regular by the earlier options'

    stopped_at(4, opt('rollback', name='alone', **more))
    with pytest.raises(FloatingPointError, match='no checkpoint yet to go back to'):
        run(opt('rollback', name='alone', **more), '--auto_resume')


def test_a_rollback_does_not_go_to_what_the_folder_had_before(run, opt, poison):
    state = run(opt(name='first', train__total_iter=4)) / 'training_states/4.state'
    run(opt(name='used', train__total_iter=2, manual_seed=5))
    poison(11)  # of iteration 6
    ends = []
    for name in ('empty', 'used'):
        resumed = opt('rollback', name=name, logger__save_checkpoint_freq=8)
        resumed['path'] = {'resume_state': str(state)}
        folder = run(resumed)
        assert f'Back to {state}' in ''.join(file.read_text() for file in folder.glob('*.log'))
        ends.append(end(folder))
    assert differences(*ends) == []


@pytest.mark.slow
def test_a_run_that_was_killed_after_a_rollback_resumes_bit_for_bit(run, opt, poison, monkeypatch):
    poison(5)
    more = {'train__total_iter': 6, 'datasets__train__num_worker_per_gpu': 1}
    whole = end(run(opt('rollback', name='whole', **more)))
    for last in (3, 5):
        step, made = SRModel.optimize_parameters, []

        def dying(self, current_iter, last=last, made=made, step=step):
            step(self, current_iter)
            made.append(current_iter)
            if made.count(3) == 2 and current_iter == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SRModel, 'optimize_parameters', dying)
            run(opt('rollback', name=f'cut{last}', **more))
        cut = run(opt('rollback', name=f'cut{last}', **more), '--auto_resume')
        assert differences(whole, end(cut)) == []


def test_rollbacks_to_one_checkpoint_are_few_and_need_one(run, opt, poison):
    poison(*range(4, 100))
    with pytest.raises(FloatingPointError, match=r'3 rollbacks to .*2\.state did not help'):
        run(opt('rollback'))
    with pytest.raises(
        FloatingPointError,
        match=r'no checkpoint yet to go back to .* with a lower learning rate\. The batch',
    ):
        run(opt('rollback', logger__save_checkpoint_freq=5))


def test_policies_that_cannot_work_are_refused_with_their_options(run, opt):
    for overrides, message in (
        ({'train__optim_g': {'type': 'LBFGS', 'lr': 1}}, 'cannot undo the steps of LBFGS'),
        ({'train__sharding': 'fsdp'}, r'skip cannot be combined with train\.sharding'),
    ):
        with pytest.raises(ValueError, match=message):
            run(opt('skip', **overrides))


@pytest.mark.parametrize('policy', ['stop', 'rollback'])
def test_the_steps_of_lbfgs_are_watched(run, opt, poison, policy):
    poison(5)
    options = opt(policy, train__optim_g={'type': 'LBFGS', 'lr': 0.1, 'max_iter': 2})
    if policy == 'stop':
        with pytest.raises(FloatingPointError, match='Iteration 3: not finite: l_pix'):
            run(options)
    else:
        assert end(run(options))[1]['samples'] == 14


def test_an_overflow_of_fp16_is_no_incident(run, opt, poison):
    poison(5)
    folder = run(opt(train__amp='fp16'))
    assert not (folder / 'incidents').exists()
    assert all(map(is_finite, end(folder)[0].values()))


def test_a_rank_keeps_no_more_than_its_share_of_files(run, opt, poison, monkeypatch):
    monkeypatch.setattr(incidents, 'MOST_FILES', 2)
    poison(1, 5, 9)
    folder = run(opt('skip'))
    assert [f.name.partition('_')[0] for f in sorted((folder / 'incidents').iterdir())] == [
        '1',
        '3',
    ]
    assert end(folder)[1]['precision']['watch']['skipped'] == 3


@pytest.mark.slow
def test_two_processes_agree_on_what_only_one_of_them_has_met(
    run_program, opt, write, tmp_path, repository
):
    """A NaN in the batches of rank 1 alone, with each policy, and a resume after a rollback."""
    (tmp_path / 'poisoned_model.py').write_text(
        """
import torch
from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class Poisoned(SRModel):
    def feed_data(self, data):
        super().feed_data(data)
        if self.opt['rank'] == 1 and self.samples_seen == 12:
            self.lq[0, 0, 0, 0] = torch.nan
"""
    )
    more = {
        'plugins': [str(tmp_path)],
        'model_type': 'Poisoned',
        'datasets__train__dataset_enlarge_ratio': 2,
    }
    plan = [
        (opt('skip', name='skip', **more), None),
        (opt('rollback', name='back', **more), None),
        (opt('rollback', name='cut', **more), 4),
        (opt('rollback', name='cut', **more), None),
        (opt('rollback', name='split', train__sharding='fsdp', **more), None),
        (opt('stop', name='stop', **more), None),
    ]
    plan = [
        {
            'pipeline': 'train',
            'argv': ['-opt', write(options), *['--auto_resume'] * (number == 3)],
            'die_after': die_after,
            'draw': False,
        }
        for number, (options, die_after) in enumerate(plan)
    ]
    (tmp_path / 'plan.json').write_text(json.dumps(plan))
    program = repository / 'tests' / 'distributed_program.py'
    result = run_program(*TORCHRUN, program, 'plan.json')
    assert result.returncode == 1
    assert 'NonFiniteError: Iteration 3: not finite: ' in result.stderr

    skip, back, cut, split, stop = (
        tmp_path / 'experiments' / name for name in ('skip', 'back', 'cut', 'split', 'stop')
    )
    assert differences(end(back), end(cut)) == []
    assert end(back)[1]['samples'] == end(split)[1]['samples'] == 28
    assert end(skip)[1]['precision']['watch'] == {'skipped': 1, 'in_a_row': 0}
    assert all(map(is_finite, end(skip)[0].values()))
    for folder in (skip, back, stop):
        assert [f.name for f in (folder / 'incidents').iterdir()] == ['3_1_9.pt']
        assert only_incident(folder)['samples'] == [9, 11]
    for folder in (skip, back):
        ranks = [torch.load(folder / f'rank_{rank}.pth', weights_only=True) for rank in (0, 1)]
        assert differences(ranks[0]['net_g'], ranks[1]['net_g']) == []
    assert sorted(f.name for f in (stop / 'training_states').iterdir()) == ['2.state']


class Scripted:
    """A model without steps, for the losses that are logged."""

    def __init__(self, tmp_path):
        self.opt = {'path': {'experiments_root': str(tmp_path)}}
        self.stepper = Stepper({}, torch.device('cpu'))

    def trained_networks(self):
        return {}


def test_a_loss_that_jumps_is_told_once(tmp_path, caplog):
    import logging

    logging.getLogger('basicsr').propagate = True
    guard = Guard(Scripted(tmp_path), None)
    values = [1.0, 1.2] * 15 + [9.0, 10.5, 30.0, 1.0, 13.0] + [0.01]
    for iteration, value in enumerate(values):
        guard.note_losses(iteration, OrderedDict(l_pix=value, grad_norm_g=100 * value))
    told = [r.message for r in caplog.records if 'times the median' in r.message]
    assert [text.partition(' is ')[0] for text in told] == [
        'Iteration 32: l_pix',
        'Iteration 34: l_pix',
    ]


def test_an_incident_is_replayed(run, opt, poison, tmp_path, monkeypatch, capsys):
    from basicsr import cli

    poison(9)
    (tmp_path / 'plug_ins').mkdir()
    options = opt(name='bad', train__clip_grad_norm=1.0, plugins=['plug_ins'])
    with pytest.raises(FloatingPointError, match='Iteration 5: not finite: l_pix, the'):
        run(options)
    (file,) = (tmp_path / 'experiments/bad/incidents').iterdir()
    options = str(tmp_path / 'bad.yml')
    monkeypatch.setattr('sys.argv', ['basicsr', 'replay', str(file), '-opt', options])
    cli.main()
    out = capsys.readouterr().out
    assert 'iteration 5, rank 0, samples [8, 9]' in out
    assert 'now with the weights of iteration 4:' in out
    assert 'lq: 1 of 384 values are not finite' in out
    assert 'gt: 0 of 1536 values are not finite' in out
    assert 'l_pix: nan' in out
    assert 'layers with non-finite output: net_g.body.0 (Conv2d), net_g.body.1 (PReLU)' in out
    assert 'from the last one on: net_g.body.4.weight, net_g.body.3.weight' in out


def test_of_other_weights_and_other_files_replay_speaks_plainly(run, opt, poison, tmp_path):
    from basicsr.run.replay import replay

    poison(3)
    with pytest.raises(FloatingPointError, match='Iteration 2: not finite: l_pix, the'):
        run(opt(name='bad'))
    folder = tmp_path / 'experiments/bad'
    (file,) = (folder / 'incidents').iterdir()
    options = str(tmp_path / 'bad.yml')
    assert 'the weights that the run began with' in replay(str(file), options, None, tmp_path)[1]
    weights = run(opt(name='good', train__total_iter=1)) / 'models/net_g_1.pth'
    assert str(weights) in replay(str(file), options, str(weights), tmp_path)[1]
    content = torch.load(file, weights_only=True)
    content['batch']['lq'].zero_()
    torch.save(content, file)
    assert 'Now all values are finite' in replay(str(file), options, None, tmp_path)[-1]
    with pytest.raises(ValueError, match='is not a file of'):
        replay(str(weights), options, None, tmp_path)


def test_the_folder_of_an_incident_names_no_code(run, opt, poison, tmp_path):
    """Neither the file's list of plug-ins nor a copied option file is obeyed."""
    from basicsr.run.replay import replay

    poison(3)
    with pytest.raises(
        FloatingPointError, match=rf'basicsr replay .*\.pt -opt {tmp_path}/bad\.yml'
    ):
        run(opt(name='bad'))
    folder = tmp_path / 'experiments/bad'
    (file,) = (folder / 'incidents').iterdir()
    (tmp_path / 'hostile').mkdir()
    (tmp_path / 'hostile/bad_arch.py').write_text("open('marker', 'w')")
    content = torch.load(file, weights_only=True)
    torch.save(content | {'plugins': [str(tmp_path / 'hostile')]}, file)
    copy = folder / 'bad.yml'
    lines = copy.read_text().splitlines()
    lines[2] = f'# train.py -opt bad.yml --force_yml plugins=[{tmp_path}/hostile]'
    copy.write_text('\n'.join(lines))
    assert replay(str(file), str(tmp_path / 'bad.yml'), None, tmp_path)
    assert not (tmp_path / 'marker').exists()


def test_the_file_of_a_blind_degradation_has_its_whole_recipe(run, opt, poison, tmp_path):
    from blind import blind

    feed = SRModel.feed_data
    poison_all = pytest.MonkeyPatch()

    def poisoned(self, data):
        feed(self, data)
        self.lq[0, 0, 0, 0] = torch.nan

    poison_all.setattr(SRModel, 'feed_data', poisoned)
    with pytest.raises(FloatingPointError, match='Iteration 1: not finite: l_pix, the'):
        run(blind(opt(name='blind')))
    poison_all.undo()
    content = only_incident(tmp_path / 'experiments/blind')
    assert len(content['recipe']) == 2
    assert 'final' in json.dumps(content['recipe'][0])


def test_what_is_not_finite_from_the_start_is_not_looked_at(run, opt, monkeypatch):
    """Such as a mask of attention."""
    make = SRModel.init_training_settings

    def with_mask(self):
        self.net_g.register_buffer('mask', torch.tensor([0.0, -torch.inf]), persistent=False)
        make(self)

    monkeypatch.setattr(SRModel, 'init_training_settings', with_mask)
    folder = run(opt(train__ema_decay=0))
    assert rows(folder)[-1]['iter'] == 6
    assert all(map(is_finite, end(folder)[0].values()))
    assert not (folder / 'incidents').exists()


def test_a_loss_with_one_number_in_a_dimension_counts_as_well():
    stepper = Stepper({}, torch.device('cpu'))
    found = stepper._note('g', torch.tensor([torch.nan]), torch.tensor(1.0))
    assert found.item() == 1
    assert stepper.take()['g'].tolist() == [1, 0, 1]


def test_a_rollback_never_goes_forward(run, opt, poison, tmp_path):
    """From an earlier state, in a folder that has later ones of what was given up."""
    folder = run(opt('rollback'))
    poison(2 * 2 + 1)
    again = opt('rollback', path__resume_state=str(folder / 'training_states/2.state'))
    run(again)
    assert only_incident(folder)['iter'] == 3
    (given_up,) = folder.glob('given_up_*')
    names = sorted(str(file.relative_to(given_up)) for file in given_up.rglob('*.*'))
    expected = [f'models/net_g_{n}.pth' for n in (4, 6)]
    assert names == [*expected, *(f'training_states/{n}.state' for n in (4, 6))]
    assert checkpoint(folder, '6.state')['samples'] == 2 * 6 + 2
