"""A training run from end to end: what it writes, that it is exact, and that it resumes exactly."""

import json
import re
import runpy
import sys

import cv2
import numpy as np
import pytest
import torch
from golden import fill, params, recipe, resolve
from runs import checkpoint, differences, log_text, rows

import basicsr.train
from basicsr.archs import build_network
from basicsr.models.sr_model import SRModel
from basicsr.run import monitor
from basicsr.utils.options import OptionError


def final_state(folder, total_iter=6):
    """All that a run ends with: networks, training state, logged values."""
    return {
        'latest': checkpoint(folder, 'net_g_latest.pth'),
        'state': checkpoint(folder, f'{total_iter}.state'),
        'rows': rows(folder),
    }


def test_a_run_writes_the_files_of_the_reference(run, train_opt):
    folder = run(train_opt(val__save_img=True), draw=True)
    names = {str(file.relative_to(folder)) for file in folder.rglob('*') if file.is_file()}
    assert {f'models/net_g_{label}.pth' for label in (2, 4, 6, 'latest')} <= names
    assert {f'training_states/{i}.state' for i in (2, 4, 6)} <= names
    assert not [name for name in names if name.endswith('latest.state')]
    assert 'visualization/0001/0001_3.png' in names
    assert {'tiny.yml', 'metrics.jsonl', 'curves.png', 'comparison.png'} <= names
    assert any(re.fullmatch(r'train_tiny_\d{8}_\d{6}\.log', name) for name in names)


def test_the_option_file_is_copied_below_three_lines(run, train_opt):
    lines = (run(train_opt()) / 'tiny.yml').read_text().splitlines()
    assert lines[0].startswith('# GENERATE TIME: ')
    assert lines[1] == '# CMD:'
    assert lines[2].startswith('# python prog -opt ')
    assert lines[3] == ''
    assert json.loads(lines[4])['name'] == 'tiny'


def test_iteration_lines_have_the_format_of_the_reference(run, train_opt):
    text = log_text(run(train_opt(name='tinytiny')))
    pattern = (
        r'INFO: \[tinyt\.\.\]\[epoch:  0, iter:       3, lr:\(1\.000e-03,\)\] '
        r'\[eta: \d:\d\d:\d\d, time \(data\): \d+\.\d{3} \(\d+\.\d{3}\)\] l_pix: \d\.\d{4}e-\d\d '
    )
    assert re.search(pattern, text)
    assert re.search(r'Validation val\n\t # psnr: \d+\.\d{4}\tBest: \d+\.\d{4} @ 3 iter\n', text)


def test_the_log_begins_with_version_and_origin(run, train_opt, repository):
    text = log_text(run(train_opt()))
    assert text.index(f'BasicSR: 2.0.0 from {repository / "basicsr"}') < text.index('model_type')


@pytest.mark.parametrize('ratio', [1, 7, 100])
@pytest.mark.parametrize('batch', [2, 16])
def test_exactly_total_iter_steps_are_made(run, train_opt, monkeypatch, ratio, batch):
    made = []
    step = SRModel.optimize_parameters
    monkeypatch.setattr(
        SRModel,
        'optimize_parameters',
        lambda self, i: (made.append(i), step(self, i))[1],
    )
    opt = train_opt(
        datasets__train__dataset_enlarge_ratio=ratio,
        datasets__train__batch_size_per_gpu=batch,
        train__total_iter=17,
    )
    folder = run(opt)
    assert made == list(range(1, 18))
    assert checkpoint(folder, '17.state')['optimizers'][0]['state'][0]['step'] == 17
    assert [row['lr'] for row in rows(folder) if 'lr' in row] == [1e-3] * 4 + [5e-4] * 13


def test_the_last_validation_bears_the_last_iteration_and_is_not_repeated(run, train_opt):
    validated = [row['iter'] for row in rows(run(train_opt())) if 'metrics/val/psnr' in row]
    assert validated == [3, 6]
    validated = [
        row['iter']
        for row in rows(run(train_opt(train__total_iter=5)))
        if 'metrics/val/psnr' in row
    ]
    assert validated == [3, 5]


@pytest.mark.parametrize('case', params('traces'))
def test_the_training_trace_of_the_reference_is_met(run, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def image(spec):
        if 'box_down' in spec:
            return recipe.box_down(image(spec['of']), spec['box_down'])
        return resolve(spec)

    for name, spec in case['files'].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / name), image(spec))
    for name, text in case['texts'].items():
        (tmp_path / name).write_text(text)
    for key, name in case['init'].items():
        net = fill(build_network(case['yml'][key]), case['fill'])
        torch.save({'params': net.state_dict()}, tmp_path / name)

    folder = run(case['yml'])
    logged = rows(folder)
    steps = [row for row in logged if 'lr' in row]
    scores = [row for row in logged if 'lr' not in row]
    tags = {key: f'losses/{key}' if key.startswith('l_') else key for key in case['log_keys']}
    output = {f'loss_{key}': [row[tag] for row in steps] for key, tag in tags.items()}
    output['lr'] = [row['lr'] for row in steps]
    for metric in ('psnr', 'ssim'):
        output[f'val_{metric}'] = [row[f'metrics/tinyval/{metric}'] for row in scores]
    assert [row['iter'] for row in scores] == case['val_iters']
    for net in [key.removeprefix('network_') for key in case['init']]:
        content = checkpoint(folder, f'net_{net}_latest.pth')
        content.pop('basicsr')
        for key, state in content.items():
            tensors = [state[name].double() for name in sorted(state)]
            output[f'final_net_{net}_{key}_sum'] = [float(t.sum()) for t in tensors]
            output[f'final_net_{net}_{key}_norm'] = [float(t.norm()) for t in tensors]
            output[f'final_net_{net}_{key}_first'] = [float(t.flatten()[0]) for t in tensors]
    output = {key: np.array(value) for key, value in output.items()}
    assert recipe.compare(case, output) is None


# ---------------------------------------------------------------------------- exactness


class Interrupted(BaseException):
    pass


DROPOUT_NET = """
from torch import nn
from basicsr.utils.registry import ARCH_REGISTRY


@ARCH_REGISTRY.register()
class DropoutNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5),
            nn.Conv2d(4, 12, 3, padding=1), nn.PixelShuffle(2),
        )

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture
def random_opt(train_opt, tmp_path):
    """A run in which everything is random that can be: crops, flips, order, dropout."""
    (tmp_path / 'dropout_arch.py').write_text(DROPOUT_NET)

    def make(**overrides):
        return train_opt(
            plugins=['.'], network_g={'type': 'DropoutNet'}, train__warmup_iter=3, **overrides
        )

    return make


def interrupt_after(monkeypatch, iteration):
    """Let the process die right after the step of an iteration, before anything is saved."""
    step = SRModel.optimize_parameters

    def dying_step(self, current_iter):
        step(self, current_iter)
        if current_iter == iteration:
            raise Interrupted

    monkeypatch.setattr(SRModel, 'optimize_parameters', dying_step)


@pytest.mark.parametrize('workers', [0, 3])
def test_a_run_interrupted_after_any_iteration_resumes_bit_for_bit(
    run, random_opt, monkeypatch, workers
):
    options = {'datasets__train__num_worker_per_gpu': workers}
    whole = final_state(run(random_opt(name='whole', **options)))
    for iteration in range(1, 7) if workers == 0 else (3,):
        opt = random_opt(name=f'cut{iteration}', **options)
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(patch, iteration)
            run(opt)
        assert differences(whole, final_state(run(opt, '--auto_resume'))) == []


def test_an_interruption_in_a_validation_changes_nothing(run, random_opt, monkeypatch):
    whole = final_state(run(random_opt(name='whole', val__val_freq=2)))
    opt = random_opt(name='cut', val__val_freq=2)

    def die(*_):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(SRModel, 'nondist_validation', die)
        run(opt)
    assert differences(whole, final_state(run(opt, '--auto_resume'))) == []


def test_the_number_of_workers_and_prefetching_change_nothing(run, random_opt):
    plain = final_state(run(random_opt(name='plain')))
    for name, options in {
        'workers': {'datasets__train__num_worker_per_gpu': 2},
        'cpu': {'datasets__train__prefetch_mode': 'cpu'},
        'cuda': {'datasets__train__prefetch_mode': 'cuda'},
        'bytes': {'datasets__train__uint8_batch': True},
    }.items():
        assert differences(plain, final_state(run(random_opt(name=name, **options)))) == []


def test_another_seed_gives_another_run(run, random_opt):
    a = run(random_opt(name='a'))
    b = run(random_opt(name='b', manual_seed=8))
    assert differences(checkpoint(a, 'net_g_latest.pth'), checkpoint(b, 'net_g_latest.pth'))


def test_a_resumed_run_may_be_longer(run, random_opt):
    whole = final_state(run(random_opt(name='whole')))
    run(random_opt(name='longer', train__total_iter=3))
    longer = final_state(run(random_opt(name='longer'), '--auto_resume'))
    del whole['rows'], longer['rows']  # the shorter run validated at its end as well
    whole['state'].pop('best_metric_results'), longer['state'].pop('best_metric_results')
    assert differences(whole, longer) == []


def test_resume_does_not_depend_on_what_was_pretrained(run, train_opt, tmp_path):
    """Strictness, key and path of the first start are not those of a resume."""
    first = run(train_opt(name='first', train__total_iter=2))
    opt = train_opt(
        name='second',
        path__pretrain_network_g=str(first / 'models/net_g_latest.pth'),
        path__param_key_g='params_ema',
        path__strict_load_g=False,
        train__total_iter=4,
    )
    whole = final_state(run(opt), 4)
    run(dict(opt, name='third', train=dict(opt['train'], total_iter=2)))
    assert (
        differences(
            whole['latest'],
            final_state(run(dict(opt, name='third'), '--auto_resume'), 4)['latest'],
        )
        == []
    )


def test_auto_resume_without_a_state_says_where_it_looked(run, train_opt):
    folder = run(train_opt(), '--auto_resume')
    assert f'no state in {folder / "training_states"}' in log_text(folder)
    assert len(rows(folder)) == 8


def test_a_rerun_keeps_the_earlier_folder_under_another_name(run, train_opt):
    folder = run(train_opt())
    before = checkpoint(folder, 'net_g_latest.pth')
    run(train_opt(manual_seed=1))
    archive = next(folder.parent.glob('tiny_archived_*'))
    assert differences(before, checkpoint(archive, 'net_g_latest.pth')) == []
    assert f'Rename it to {archive}' in log_text(folder)


def test_auto_resume_searches_the_chosen_experiments_root(run, train_opt, tmp_path):
    opt = train_opt(path__experiments_root=str(tmp_path / 'elsewhere'), train__total_iter=2)
    run(opt)
    opt['train']['total_iter'] = 4
    run(opt, '--auto_resume')
    folder = tmp_path / 'elsewhere' / 'tiny'
    assert [row['iter'] for row in rows(folder) if 'lr' in row] == [1, 2, 3, 4]
    assert not list(folder.parent.glob('*_archived_*'))


def test_a_resume_with_the_option_file_of_the_run_folder_works(run, train_opt, monkeypatch):
    """The file is not copied onto itself."""
    folder = run(train_opt(train__total_iter=2))
    import sys

    from basicsr.train import train_pipeline

    argv = ['prog', '-opt', str(folder / 'tiny.yml'), '--auto_resume']
    monkeypatch.setattr(sys, 'argv', [*argv, '--force_yml', 'train:total_iter=3'])
    train_pipeline(folder.parents[1])
    assert rows(folder)[-1]['iter'] == 3


def test_edited_options_that_a_resume_does_not_use_are_named(run, train_opt):
    run(train_opt(train__total_iter=2))
    opt = train_opt(train__total_iter=4)
    opt['train']['scheduler']['milestones'] = [5]
    assert 'scheduler.milestones' in log_text(run(opt, '--auto_resume'))


def test_debug_logs_and_saves_often_and_writes_no_events(run, train_opt):
    opt = train_opt(train__total_iter=8, logger__use_tb_logger=True, logger__print_freq=5)
    run(opt, '--debug')
    from pathlib import Path

    folder = Path('experiments/debug_tiny')
    assert [row['iter'] for row in rows(folder) if 'lr' in row] == list(range(1, 9))
    assert [file.name for file in (folder / 'training_states').iterdir()] == ['8.state']
    assert not Path('tb_logger').exists()


def test_a_drawn_seed_is_that_of_the_resumed_run_too(run, train_opt):
    opt = train_opt(manual_seed=None)
    whole = final_state(run(dict(opt, name='whole')))
    drawn = whole['state']['manual_seed']
    cut = dict(opt, name='cut', train=dict(opt['train'], total_iter=4))
    run(cut, '--force_yml', f'manual_seed={drawn}')
    resumed = run(dict(opt, name='cut'), '--auto_resume')
    assert f'manual_seed stays {drawn}, as in the training state' in log_text(resumed)
    resumed = final_state(resumed)
    assert differences(whole['latest'], resumed['latest']) == []
    assert differences(whole['state']['optimizers'], resumed['state']['optimizers']) == []


def test_a_metric_may_be_added_before_a_resume(run, train_opt):
    opt = train_opt(train__total_iter=3)
    run(opt)
    opt['train']['total_iter'] = 6
    opt['val']['metrics']['ssim'] = {'type': 'calculate_ssim', 'crop_border': 0}
    best = checkpoint(run(opt, '--auto_resume'), '6.state')['best_metric_results']['val']
    assert set(best) == {'psnr', 'ssim'}
    assert best['ssim']['iter'] > 0


@pytest.mark.parametrize(
    ('metric', 'message'),
    [
        ({'type': 'calculate_pnsr', 'crop_border': 0}, 'Did you mean calculate_psnr'),
        ({'type': 'calculate_psnr'}, r'val\.metrics\.psnr: .*crop_border'),
    ],
)
def test_a_wrong_metric_is_refused_before_anything_is_made(
    run, train_opt, metric, message, tmp_path
):
    with pytest.raises((KeyError, ValueError), match=message):
        run(train_opt(val__metrics={'psnr': metric}))
    assert not (tmp_path / 'experiments').exists()


def test_a_run_that_cannot_be_built_leaves_the_earlier_one_alone(run, train_opt, tmp_path):
    run(train_opt(train__total_iter=2))
    opt = train_opt()
    opt['network_g']['num_feet'] = 3
    with pytest.raises(OptionError, match='num_feet'):
        run(opt)
    opt = train_opt()
    opt['datasets']['train']['dataroot_gt'] = 'nowhere'
    place = f'{tmp_path}/tiny.yml:1: datasets.train.dataroot_gt, looked up from {tmp_path}: '
    with pytest.raises(FileNotFoundError, match=re.escape(f'{place}no folder nowhere.')):
        run(opt)
    assert [folder.name for folder in (tmp_path / 'experiments').glob('[!.]*')] == ['tiny']


def test_what_another_process_saves_until_the_folder_is_free_is_gone_on_from(
    run, train_opt, monkeypatch
):
    opt = train_opt(name='run')
    other = run(train_opt(name='other', train__total_iter=4))
    folder, claim = other.with_name('run'), basicsr.train.claim_folder

    def wait_and_claim(name):
        if not folder.exists():
            other.rename(folder)
        claim(name)

    monkeypatch.setattr(basicsr.train, 'claim_folder', wait_and_claim)
    run(opt, '--auto_resume')
    assert 'Resuming training from epoch: 1, iter: 4' in log_text(folder)
    assert [path.name for path in folder.parent.glob('run*')] == ['run'], 'none is moved aside'


def test_a_validation_set_that_no_option_asks_for_is_named(run, train_opt):
    opt = train_opt()
    del opt['val']
    assert 'val is not used: there is no val section' in log_text(run(opt))


def test_a_resumed_run_says_that_its_batch_is_another(run, train_opt):
    assert checkpoint(run(train_opt(train__total_iter=2)), '2.state')['batch'] == 2
    folder = run(train_opt(datasets__train__batch_size_per_gpu=4), '--auto_resume')
    assert (
        'Resume: 4 samples per iteration, and 2 before. datasets.train.batch_size_total: 2 keeps'
    ) in log_text(folder)


def test_the_batch_of_all_goes_on_in_one_process(run, train_opt):
    sizes = {'batch_size_per_gpu': 1, 'batch_size_total': 2}
    small = run(train_opt(datasets__train=train_opt()['datasets']['train'] | sizes, name='small'))
    whole = run(train_opt(name='whole'))
    weights = [checkpoint(folder, 'net_g_latest.pth')['params'] for folder in (small, whole)]
    for key, value in weights[0].items():
        assert torch.allclose(value, weights[1][key], atol=1e-5), key


def test_another_optimizer_or_schedule_is_no_resume(run, train_opt):
    run(train_opt(train__total_iter=2))
    with pytest.raises(ValueError, match='one of Adam and MultiStep.* asks for SGD and MultiStep'):
        run(train_opt(train__optim_g={'type': 'SGD', 'lr': 0.1}), '--auto_resume')
    with pytest.raises(ValueError, match='asks for Adam and StepLR'):
        opt = train_opt(train__scheduler={'type': 'StepLR', 'step_size': 3})
        run(opt, '--auto_resume')


def test_an_edited_rate_that_a_resume_does_not_use_is_named(run, train_opt):
    run(train_opt(train__total_iter=2, train__scheduler=None))
    opt = train_opt(train__optim_g={'type': 'Adam', 'lr': 5e-4}, train__scheduler=None)
    text = log_text(run(opt, '--auto_resume'))
    assert 'optimizer.lr stays 0.001, as in the training state; 0.0005' in text
    assert 'not used' not in log_text(run(train_opt(train__scheduler=None), '--auto_resume'))


def test_options_that_cannot_mean_what_they_say_are_refused(run, train_opt, image_pairs):
    psnr = {'type': 'calculate_psnr', 'crop_border': 2}
    for overrides, message in (
        ({'val__metrics': {'p': psnr | {'test_y_chanel': True}}}, "did you mean 'test_y_channel'"),
        ({'val__metrics': {'p': psnr | {'type': 'calculate_psnr_pt'}}}, 'takes tensors'),
        ({'network_g': None}, 'network_g: required'),
        ({'datasets__train__gt_size': '16'}, "gt_size must be a number of pixels, got '16'"),
        ({'datasets__train__gt_size': -4}, 'gt_size must be a number of pixels'),
        ({'datasets__train__dataroot_gt': None}, 'dataroot_gt must be a folder'),
        ({'train__optim_g': {'type': 'Adam', 'lr': -1}}, 'optim_g: needs a learning rate'),
        ({'train__optim_g': {'type': 'Adam', 'lr': 1, 'eps': -1}}, 'while building Adam from'),
        ({'train__optim_g': {'type': 'Adam', 'lr': 1, 'betas': []}}, 'while building Adam from'),
        ({'train__optim_g': {'type': 'Adam', 'lr': 1, 'weight_decay': [1]}}, 'must be a number'),
        ({'train__scheduler': {'type': 'MultiStepLR', 'milestones': 'x'}}, 'must be a list'),
        ({'train__scheduler': {'type': 'StepLR', 'step_size': 1, 'gamma': -1}}, 'rate of -0.001'),
        ({'val__metrics': {'p': psnr | {'test_y_channel': {}}}}, 'must be true or false'),
        ({'train__optim_g': {'type': 'SparseAdam', 'lr': 1}}, "'SparseAdam' is not in"),
        ({'train__scheduler': {'type': 'LRScheduler'}}, "'LRScheduler' is unknown"),
        ({'val__suffix': '../x'}, 'val.suffix: must be a plain'),
    ):
        with pytest.raises(ValueError, match=message):
            run(train_opt(**overrides))
    opt = train_opt()
    opt['datasets']['val_2'] = dict(opt['datasets']['val'], name='val')
    with pytest.raises(ValueError, match='datasets share a name: val, val'):
        run(opt)


def test_images_of_several_validation_sets_do_not_overwrite_each_other(run, train_opt):
    opt = train_opt(val__save_img=True, train__total_iter=3)
    opt['datasets']['val_2'] = dict(opt['datasets']['val'])
    folder = run(opt)
    for name in ('val', 'val_2'):
        assert (folder / f'visualization/{name}/0001/0001_3.png').is_file()


def test_a_loss_that_is_not_finite_and_periods_that_are_too_short_are_named(
    run, train_opt, tmp_path
):
    scheduler = {'type': 'CosineAnnealingRestartLR', 'periods': [2]}
    opt = train_opt(train__optim_g={'type': 'SGD', 'lr': 1e30}, train__scheduler=scheduler)
    with pytest.raises(FloatingPointError, match='not finite: l_pix'):
        run(opt)
    text = log_text(tmp_path / 'experiments/tiny')
    assert text.count('l_pix is not finite at iteration') == 1
    assert 'the periods end after 2 of 6 iterations' in text


def test_a_state_of_a_longer_run_is_refused(run, train_opt):
    run(train_opt())
    with pytest.raises(ValueError, match=r'has 6 iterations, more than train\.total_iter 3'):
        run(train_opt(train__total_iter=3), '--auto_resume')


def test_no_rank_is_reading_or_writing_while_rank_0_tidies_the_folder(run, train_opt, monkeypatch):
    order = []
    remove = monitor.remove_stale_temporaries
    monkeypatch.setattr(monitor, 'barrier', lambda: order.append('barrier'))
    monkeypatch.setattr(
        monitor, 'remove_stale_temporaries', lambda path: order.append('tidy') or remove(path)
    )
    load = SRModel.load_extra_state
    monkeypatch.setattr(
        SRModel, 'load_extra_state', lambda *args: order.append('load') or load(*args)
    )
    run(train_opt(train__total_iter=2))
    order.clear()
    run(train_opt(train__total_iter=3), '--auto_resume')
    assert order[:4] == ['load', 'barrier', 'tidy', 'barrier']


def test_a_finished_run_that_is_resumed_says_that_it_is_complete(run, train_opt):
    run(train_opt(train__total_iter=2))
    text = log_text(run(train_opt(train__total_iter=2), '--auto_resume'))
    assert 'This run is complete: a larger train.total_iter would continue it.' in text


def test_the_script_logs_under_the_name_of_the_package(repository, monkeypatch):
    monkeypatch.setattr('sys.path', ['', *sys.path])
    script = runpy.run_path(str(repository / 'basicsr/train.py'), run_name='script')
    assert script['logger'].name == 'basicsr.train'
