"""The command that kills trainings and compares what they leave."""

import json
import re

import pytest
import torch
from blind import adversarial, blind

from basicsr import cli
from basicsr.commands.verify_resume import differences
from basicsr.utils.checkpoint import save_checkpoint

# A model whose steps depend on how often its process was started.
FORGETFUL = """
import torch
from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class ForgetfulModel(SRModel):
    steps = 0

    def optimize_parameters(self, current_iter):
        super().optimize_parameters(current_iter)
        self.steps += 1
        with torch.no_grad():
            next(self.net_g.parameters()).add_(self.steps * 1e-3)
"""


def main(flags):
    args = cli.parse(['verify-resume', *flags])
    return args.main(args)


@pytest.fixture
def verify(write, tmp_path, monkeypatch, capsys):
    """The exit status of the command on an option dict, and what it prints."""

    def call(opt, *flags):
        monkeypatch.chdir(tmp_path)
        status = main(['-opt', write(opt), *flags])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.mark.slow
def test_a_model_with_all_its_state_is_identical(verify, train_opt, tmp_path):
    opt = blind(train_opt(), 'RealESRGANModel') | {'log_recipes': True}
    opt['datasets']['train']['num_worker_per_gpu'] = 2
    before = {*tmp_path.rglob('*')}
    status, out, _ = verify(adversarial(opt, 'RealESRGANModel'), '--iters', '8', '--kills', '2')
    assert status == 0, out
    assert re.search(r'kill 1 of 2: after iteration [1-8] was logged\n', out)
    assert 'identical: 10 files of networks, 4 states, all logged values\n' in out
    assert {*tmp_path.rglob('*')} - before == {tmp_path / 'tiny.yml'}, 'nothing else is left'


@pytest.mark.slow
def test_a_model_that_forgets_a_state_is_found_out(verify, train_opt, tmp_path):
    (tmp_path / 'forgetful_model.py').write_text(FORGETFUL)
    opt = train_opt(plugins=['.'], model_type='ForgetfulModel', train__total_iter=100)
    flags = ('--iters', '30', '--save-every', '1', '--kills', '1')
    status, out, _ = verify(opt, *flags, '--keep', str(tmp_path / 'kept'))
    assert status == 1
    # The logged losses come first in the alphabet, and the kill may leave them equal.
    assert re.search(
        r'first difference: (metrics\.jsonl \[\d+\]|models/net_g_\d+\.pth: params): ', out
    )
    assert (tmp_path / 'kept/whole/tiny/models/net_g_6.pth').is_file()
    assert (tmp_path / 'kept/killed/tiny/models/net_g_6.pth').is_file()


@pytest.mark.slow
def test_a_training_that_fails_by_itself_is_shown(verify, train_opt):
    status, _, err = verify(train_opt(network_g={'type': 'Unknown'}))
    assert status == 1
    assert 'Unknown' in err
    assert 'A training has ended with status' in err


def test_a_missing_file_and_wrong_flags_are_refused(capsys, tmp_path):
    assert main(['-opt', str(tmp_path / 'none.yml')]) == 2
    assert 'none.yml' in capsys.readouterr().err
    for flags, message in (
        (['--iters', '1'], '--iters must be above 1'),
        (['--kills', '0'], '--kills, --nproc and --save-every above 0'),
        (['--keep', str(tmp_path)], f'--keep: {tmp_path} is there already'),
    ):
        with pytest.raises(SystemExit) as stop:
            main(['-opt', 'x.yml', *flags])
        assert stop.value.code == 2
        assert message in ' '.join(capsys.readouterr().err.split())


def a_run(folder, weight, row):
    (folder / 'models').mkdir(parents=True)
    (folder / 'training_states').mkdir()
    save_checkpoint({'params': {'w': torch.tensor(weight)}}, folder / 'models/net_g_1.pth')
    (folder / 'metrics.jsonl').write_text(f'{json.dumps(row)}\n')
    return folder


@pytest.mark.parametrize(
    ('weight', 'row', 'expected'),
    [
        ([1.0, 2.0], {'iter': 1, 'time/iteration': 5}, []),
        ([1.0, 2.5], {'iter': 1}, ['models/net_g_1.pth: params: w: by up to 0.5']),
        ([1.0, float('nan')], {'iter': 1}, ['models/net_g_1.pth: params: w: by up to nan']),
        (
            [1.0],
            {'iter': 1},
            ['models/net_g_1.pth: params: w: torch.float32 (2,) and torch.float32 (1,)'],
        ),
        ([1.0, 2.0], {'iter': 2}, ['metrics.jsonl [0]: iter: 1 and 2']),
        ([1.0, 2.0], {'iter': 1, 'loss': 0}, ['metrics.jsonl [0]: only one has loss']),
    ],
)
def test_differences_are_named_to_the_bit(tmp_path, weight, row, expected):
    one = a_run(tmp_path / 'a', [1.0, 2.0], {'iter': 1, 'time/iteration': 4})
    assert list(differences(one, a_run(tmp_path / 'b', weight, row))) == expected


def test_equal_numbers_that_are_none_and_signs_of_zero_are_told_apart(tmp_path):
    nan = float('nan')
    one, other = (a_run(tmp_path / name, [nan, 0.0], {'iter': 1}) for name in 'ab')
    assert list(differences(one, other)) == []
    other = a_run(tmp_path / 'c', [nan, -0.0], {'iter': 1})
    assert len(list(differences(one, other))) == 1


def test_a_file_that_one_run_lacks_is_named(tmp_path):
    one, other = (a_run(tmp_path / name, [1.0], {'iter': 1}) for name in 'ab')
    (one / 'models/net_g_1.pth').rename(one / 'models/net_g_2.pth')
    assert list(differences(one, other)) == [
        'only one has models/net_g_1.pth',
        'only one has models/net_g_2.pth',
    ]
