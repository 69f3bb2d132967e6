import json

import pytest
from runs import log_text

from basicsr.utils.trained_run import as_test, option_file_in


@pytest.fixture
def trained(run, train_opt):
    """A run of six iterations that keeps the best, and its options."""
    opt = train_opt(logger__keep_best=True, val__val_freq=2)
    return run(opt), opt


def scores(folder):
    (result,) = json.loads((folder / 'results.json').read_text())['sets'].values()
    return result['metrics']['psnr']


def test_a_training_is_tested_by_its_own_file_on_its_validation_sets(trained, run):
    folder, opt = trained
    results = run(opt, pipeline='test')
    text = log_text(results)
    assert 'Loading SRVGGNetCompact model from experiments/tiny/models/net_g_best.pth' in text
    assert 'with param key: [params_ema] (also there: params)' in text
    assert (results / 'visualization/val/0001_tiny.png').is_file()
    best = [line for line in log_text(folder).splitlines() if 'Best: ' in line][-1]
    assert f'{scores(results):.4f}' == best.partition('Best: ')[2].split()[0]


def test_the_weights_of_a_training_can_be_chosen(trained, run):
    folder, opt = trained
    text = log_text(run(opt, '--weights', 'last', pipeline='test'))
    assert 'net_g_latest.pth' in text
    (folder / 'models/net_g_latest.pth').unlink()
    assert 'net_g_6.pth' in log_text(run(opt, '--weights', 'last', pipeline='test'))
    (folder / 'models/net_g_best.pth').unlink()
    with pytest.raises(FileNotFoundError, match=r'no net_g_best: logger\.keep_best writes it'):
        run(opt, '--weights', 'best', pipeline='test')


def test_the_folder_of_a_run_is_enough(trained, run, monkeypatch, tmp_path):
    folder, _ = trained
    elsewhere = folder.rename(tmp_path / 'moved')
    file = option_file_in(elsewhere)
    assert file == str(elsewhere / 'tiny.yml')
    opt = {'name': 'a', 'train': {'ema_decay': 0}, 'datasets': {'train': {}, 'val': {}}}
    opt |= {'network_g': {}, 'network_d': {}, 'gt_usm': True, 'val': {'val_freq': 5}}
    test = as_test(opt, file, tmp_path, 'best')
    assert test['path']['pretrain_network_g'].endswith('moved/models/net_g_best.pth')
    assert test['path']['param_key_g'] == 'params'
    assert test['datasets'] == {'val': {}} and test['val'] == {'save_img': True}
    assert not test.keys() & {'train', 'network_d', 'gt_usm', 'logger'}


def test_a_folder_without_an_option_file_and_a_test_with_weights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match='not a run folder'):
        option_file_in(tmp_path)
    with pytest.raises(ValueError, match='--weights selects weights of a training'):
        as_test({'name': 'x', 'datasets': {}}, 'x.yml', tmp_path, 'best')
