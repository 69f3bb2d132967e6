"""``basicsr explain``: what a run of an option file would be."""

import re

from basicsr.commands.explain import shown, sparkline


def test_a_file_is_explained_from_options_to_contradictions(command, train_opt, write, tmp_path):
    file = write(train_opt(val__val_freq=7, train__warmup_iter=8))
    status, out, err = command('explain', '-opt', file, '--force_yml', 'train:warmup_iter=-1')
    assert (status, err) == (0, '')
    assert f'train.total_iter: 6{" " * 45}  {file}:1\n    int; optimizer steps of the run' in out
    assert re.search(r'^ +from iteration +g\n +1 +0.001\n +5 +0.0005\n +6 +0.0005$', out, re.M)
    assert 'network_g: SRVGGNetCompact, 3x8x8 to 3x16x16\n    parameters       712\n' in out
    assert 'multiply-adds    43,776 for such an image' in out
    assert 'receptive field  at most 16 LQ pixels' in out
    assert 'samples          12, 2 in the first iteration\n  epochs           2.4 of 5' in out
    problems = out.partition('Contradictions: ')[2].splitlines()
    assert problems[0] == '2'
    assert problems[1].startswith(f'  {file}:1: val.val_freq: 7 is not within total_iter 6')
    assert problems[2].startswith(f'  {file}:1: train.ema_decay: 0.9 averages over')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['data', 'tiny.yml', 'valdata']


def test_a_key_is_explained_alone(command, train_opt, write):
    file = write(train_opt())
    for key in ('train.optim_g.lr', 'train:optim_g:lr'):
        status, out, _ = command('explain', '-opt', file, key, '--force_yml', 'train:optim_g:lr=2')
        assert status == 0
        assert re.fullmatch(
            r'train\.optim_g\.lr: 2 +--force_yml\n    int; learning rate; .*\n', out
        )
    _, out, _ = command('explain', '-opt', file, 'train.scheduler')
    assert re.findall(r'^train\.scheduler\.(\w+): (\S+)', out, re.M) == [
        *(('type', 'MultiStepLR'), ('milestones', '[4]'), ('gamma', '0.5')),
        *(('restarts', '[0]'), ('restart_weights', '[1]')),
    ]
    assert command('explain', '-opt', file, 'train.net_d_iters')[1].startswith(
        'train.net_d_iters: not given\n    the generator is trained'
    )


def test_a_key_that_is_not_there_is_corrected_without_torch(run_program, train_opt, write):
    result = run_program(
        '-c',
        'import sys\nfrom basicsr import cli\n'
        'try: cli.main()\n'
        'finally: print({"torch", "numpy"} & set(sys.modules))',
        *('explain', '-opt', write(train_opt()), 'train.total_iters'),
    )
    assert (result.returncode, result.stdout) == (2, 'set()\n')
    assert 'there is no option train.total_iters; did you mean train.total_iter' in result.stderr


def test_wrong_components_are_told_all_at_once(command, train_opt, write):
    opt = train_opt(network_g__num_feats=3, train__pixel_opt={'type': 'L1Loss', 'weight': 1})
    status, _, err = command('explain', '-opt', write(opt))
    assert status == 2
    assert "did you mean 'num_feat'" in err and "did you mean 'loss_weight'" in err


MINE = """
from torch import nn

from basicsr.utils.registry import ARCH_REGISTRY


@ARCH_REGISTRY.register()
class Mine(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1))

    def forward(self, x):
        return self.body(x)
"""


def test_a_network_of_the_users_own_is_measured_too(command, train_opt, write, tmp_path):
    (tmp_path / 'mine_arch.py').write_text(MINE)
    opt = train_opt(plugins=['.'], scale=1, network_g={'type': 'Mine', 'width': 5})
    opt['datasets']['train']['dataroot_lq'] = opt['datasets']['train']['dataroot_gt']
    status, out, _ = command('explain', '-opt', write(opt))
    assert status == 0
    assert 'network_g.width: 5' in out and '    int; argument of Mine\n' in out
    assert f'multiply-adds    {(27 + 3) * 5 * 16 * 16:,} for' in out


def test_a_file_for_a_test_is_explained_too(command, train_opt, write):
    opt = train_opt()
    del opt['train'], opt['datasets']['train'], opt['logger']
    status, out, _ = command('explain', '-opt', write(opt))
    assert status == 0
    assert 'network_g.num_feat: 4' in out and 'Learning rates' not in out


def test_the_time_is_estimated_if_asked_for(command, train_opt, write, monkeypatch, tmp_path):
    monkeypatch.setattr('basicsr.commands.explain._SECONDS', 0.01)
    opt = train_opt(train__total_iter=14, train__ema_decay=0, logger__save_checkpoint_freq=2)
    status, out, _ = command('explain', '-opt', write(opt), '--measure')
    assert status == 0
    assert re.search(
        r'^Contradictions: none found\n\nTime: about \S+ h at [\d.]+ samples', out, re.M
    )
    assert not (tmp_path / 'experiments').exists()


def test_a_curve_is_drawn_from_zero_to_its_top():
    assert sparkline([0.0, 0.5, 1.0, 0.25]) == '▁▅█▃'
    assert sparkline([0.0]) == '▁'


def test_values_are_shown_as_in_an_option_file():
    assert [shown(v) for v in (None, True, (1, 2), 'a', '', {'b': 1e-4})] == [
        *('~', 'true', '[1, 2]', 'a', "''", '{b: 0.0001}')
    ]
    assert len(shown('x' * 100)) == 60
