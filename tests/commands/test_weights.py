"""``basicsr weights``: actions on files of networks."""

import pytest
import torch

from basicsr.utils.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture
def files(tmp_path):
    for name, value in (('a', 0.0), ('b', 4.0), ('c', 5.0)):
        save_checkpoint({'params': {'w': torch.full((1,), value)}}, tmp_path / f'{name}.pth')
    return lambda name: load_checkpoint(tmp_path / name)['params']['w'].item()


def test_files_are_interpolated_and_averaged(command, files):
    status, out, _ = command(
        'weights', 'interpolate', 'a.pth', 'b.pth', '--alpha', 0.25, '-o', 'd.pth'
    )
    assert (status, out) == (0, 'd.pth (params): 0.75 * a.pth + 0.25 * b.pth\n')
    assert files('d.pth') == 1.0
    assert command('weights', 'average', 'a.pth', 'b.pth', 'c.pth', '-o', 'm.pth')[0] == 0
    assert files('m.pth') == 3.0


def test_what_is_there_is_replaced_only_with_overwrite(command, files):
    for arguments in (
        ('interpolate', 'a.pth', 'b.pth', '-o', 'c.pth'),
        ('average', 'a.pth', 'b.pth', '-o', 'c.pth'),
        ('strip', 'a.pth', '-o', 'c.pth'),
        ('convert', 'a.pth', 'c.pth'),
    ):
        status, _, err = command('weights', *arguments)
        assert (status, files('c.pth')) == (1, 5.0)
        assert 'c.pth exists' in err
        assert command('weights', *arguments, '--overwrite')[0] == 0
        assert files('c.pth') != 5.0
        save_checkpoint({'params': {'w': torch.full((1,), 5.0)}}, 'c.pth')


def test_flags_that_do_not_go_together_are_refused(command, files):
    for arguments in (
        ('interpolate', 'a.pth', 'b.pth', '--alpha', '2', '-o', 'd.pth'),
        ('average', 'a.pth', '-o', 'd.pth'),
        ('average', 'a.pth', 'b.pth', '--length', '0.1', '-o', 'd.pth'),
        (),
    ):
        assert command('weights', *arguments)[0] == 2


def test_a_file_is_shown(command, files):
    status, out, _ = command('weights', 'show', 'a.pth')
    assert status == 0
    assert '  params: 1 tensors, 1 numbers, float32\n' in out
    assert out.endswith('Fits: no network here\nparams:\n  w  (1,)  float32\n')


def test_the_averages_of_a_run_are_made_by_both_spellings(command, run, train_opt, tmp_path):
    opt = train_opt(val=None, train__posthoc_ema=[0.05, 0.1], logger__save_checkpoint_freq=1)
    folder = run(opt | {'train': {**opt['train'], 'total_iter': 12}})
    flags = folder, '--length', '0.1', '-o'
    assert command('average', *flags, 'old.pth')[0] == 0
    assert command('weights', 'average', *flags, 'new.pth')[0] == 0
    old, new = (load_checkpoint(tmp_path / f'{name}.pth') for name in ('old', 'new'))
    assert old.keys() == new.keys() == {'params_ema', 'basicsr'}
    assert all(torch.equal(v, new['params_ema'][k]) for k, v in old['params_ema'].items())
    status, _, err = command('weights', 'average', *flags, 'new.pth')
    assert status == 1 and 'new.pth exists' in err
    assert command('weights', 'average', *flags, 'new.pth', '--overwrite')[0] == 0
