"""Two processes on gloo: they train, validate and resume as one process does."""

import json

import pytest
import torch
from blind import adversarial, blind, recipe_rows
from norms import with_norms
from runs import TORCHRUN, checkpoint, differences, log_text, psnr_of, rows


def test_two_processes_equal_one(run, run_program, two_val_opt, write, tmp_path, repository):
    """Training, validation and exact resume on two processes, against one with twice the batch."""
    bigger = {'datasets__train__batch_size_per_gpu': 4, 'datasets__train__dataset_enlarge_ratio': 2}
    one = run(two_val_opt(name='one', **bigger), draw=True)
    options = {'datasets__train__dataset_enlarge_ratio': 2}
    whole, cut = (two_val_opt(name=name, **options) for name in ('whole', 'cut'))
    test_opt = {key: whole[key] for key in ('model_type', 'scale', 'num_gpu', 'network_g', 'val')}
    test_opt |= {'path': {'pretrain_network_g': str(one / 'models/net_g_6.pth')}}
    sets = {key: value for key, value in whole['datasets'].items() if key != 'train'}
    test_one, test_two = (dict(test_opt, name=name, datasets=sets) for name in ('t_one', 't_two'))
    scores_one = run(test_one, pipeline='test')

    plan = [
        {'pipeline': 'train', 'argv': ['-opt', write(whole)], 'die_after': None},
        {'pipeline': 'train', 'argv': ['-opt', write(cut)], 'die_after': 5},
        {'pipeline': 'train', 'argv': ['-opt', write(cut), '--auto_resume'], 'die_after': None},
        {'pipeline': 'test', 'argv': ['-opt', write(test_two)], 'die_after': None},
    ]
    (tmp_path / 'plan.json').write_text(json.dumps(plan))
    program = repository / 'tests' / 'distributed_program.py'
    result = run_program(*TORCHRUN, program, 'plan.json')
    assert result.returncode == 0, result.stderr

    whole, cut = tmp_path / 'experiments/whole', tmp_path / 'experiments/cut'
    assert 'Processes: 2 (backend gloo)' in log_text(whole)
    for name in ('net_g_latest.pth', '6.state'):
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == []
    assert rows(whole) == rows(cut)

    for key in ('params', 'params_ema'):
        ours, theirs = (checkpoint(f, 'net_g_6.pth')[key] for f in (whole, one))
        for name in theirs:
            assert torch.allclose(ours[name], theirs[name], atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(rows(whole), rows(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)

    images = {p.relative_to(one) for p in one.rglob('*.png')}
    assert images == {p.relative_to(whole) for p in whole.rglob('*.png')}
    assert len([p for p in images if p.parts[0] == 'visualization']) == 2 * (3 + 1)
    scores_two = tmp_path / 'results/t_two/results.json'
    one_text = (scores_one / 'results.json').read_text().replace('t_one', 't_two')
    assert scores_two.read_text() == one_text


def restoring(train_opt, model_type, name, **overrides):
    """Four iterations of a model, without validation."""
    opt = train_opt(name=name, train__total_iter=4, val=None, model_type=model_type, **overrides)
    del opt['datasets']['val']
    opt['datasets']['train']['dataset_enlarge_ratio'] = 2  # as many samples for one rank as for two
    return opt


def small(train_opt, model_type, name, **overrides):
    """The same of an adversarial or blind one."""
    opt = restoring(train_opt, model_type, name, **overrides)
    if model_type.startswith('RealESR'):
        pool = {'share_degradation': True, 'queue_size': 3} if 'GAN' in model_type else {}
        return blind(opt, model_type) | pool | {'log_recipes': True}
    if model_type == 'ESRGANModel':
        opt['train']['net_d_iters'] = 2
    return adversarial(opt, model_type)


ADVERSARIAL_AND_BLIND = ['SRGANModel', 'ESRGANModel', 'RealESRNetModel', 'RealESRGANModel']


@pytest.mark.slow
def test_two_processes_train_and_resume_every_model_alike(run, train_in_two, train_opt):
    """All ranks end with the same weights, also after a stop; losses that are means over the batch
    make the update of one process with twice the batch.
    """
    parts = []
    for model_type in ADVERSARIAL_AND_BLIND:
        whole, cut = (small(train_opt, model_type, f'{n}_{model_type}') for n in ('whole', 'cut'))
        parts += [(whole, None), (cut, 3), (cut, None)]
    folder = train_in_two(*parts)
    for model_type in ADVERSARIAL_AND_BLIND:
        whole, cut = (folder / f'{name}_{model_type}' for name in ('whole', 'cut'))
        ranks = [torch.load(whole / f'rank_{rank}.pth', weights_only=True) for rank in (0, 1)]
        assert ('net_d' in ranks[0]) == ('GAN' in model_type)
        assert differences(*ranks) == [], model_type
        for file in (whole / 'models').iterdir():
            assert differences(*(checkpoint(f, file.name) for f in (whole, cut))) == []
        assert differences(*(checkpoint(f, '4.state') for f in (whole, cut))) == []
        assert rows(whole) == rows(cut)

    pools = checkpoint(folder / 'whole_RealESRGANModel', '4.state')['pools']
    assert [len(pool['gt']) for pool in pools] == [2, 2]
    assert differences(*pools)

    bigger = {'datasets__train__batch_size_per_gpu': 4}
    for model_type in ('SRGANModel', 'RealESRNetModel'):
        one = run(small(train_opt, model_type, f'one_{model_type}', **bigger))
        two = folder / f'whole_{model_type}'
        for file in (one / 'models').glob('*_4.pth'):
            ours, theirs = (checkpoint(f, file.name) for f in (one, two))
            assert ours.pop('basicsr') == theirs.pop('basicsr')
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        for ours, theirs in zip(rows(two), rows(one), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    rows_of_both = [row for rank in (0, 1) for row in recipe_rows(two, rank)]
    rows_of_both.sort(key=lambda row: row['sample'])
    assert rows_of_both == recipe_rows(one)
    assert [row['sample'] for row in rows_of_both] == list(range(16))


@pytest.mark.slow
def test_two_processes_accumulate_and_average_once_a_step(run, train_in_two, train_opt):
    """Two parts of two ranks make the step of the whole batch; LBFGS sees the loss of all ranks."""
    optim_g = {'type': 'LBFGS', 'lr': 0.5, 'max_iter': 3, 'line_search_fn': 'strong_wolfe'}
    lbfgs = {'train__optim_g': optim_g, 'train__ema_decay': 0}
    kinds = {
        'plain': ('SRModel', {}),
        'parts': ('SRModel', {'train__accumulate': 2, 'train__clip_grad_norm': 0.1}),
        'lbfgs': ('SRModel', lbfgs),
        'gan': ('SRGANModel', {}),
        'gan_parts': ('SRGANModel', {'train__accumulate': 2}),
    }
    make = {'SRModel': restoring, 'SRGANModel': small}
    batch = {'datasets__train__batch_size_per_gpu': 4}
    folder = train_in_two(
        *(
            (make[kind](train_opt, kind, n, **batch, **more), None)
            for n, (kind, more) in kinds.items()
        )
    )
    reductions = {}
    for name in kinds:
        ranks = [
            torch.load(folder / name / f'rank_{rank}.pth', weights_only=True) for rank in (0, 1)
        ]
        assert differences(*ranks) == [], name
        reductions[name] = ranks[0]['reductions']
    # A step of a discriminator has two backward passes.
    assert reductions['parts'] == reductions['plain'] == 4
    assert reductions['gan_parts'] == reductions['gan'] == 4 + 2 * 4

    batch = {'datasets__train__batch_size_per_gpu': 8}
    for name, tolerance in (('plain', 1e-6), ('parts', 1e-6), ('lbfgs', 1e-3)):
        kind, more = kinds[name]  # a line search makes much of a rounding
        one = run(make[kind](train_opt, kind, 'one', **batch, **{**more, 'train__accumulate': 1}))
        ours, theirs = (checkpoint(f, 'net_g_4.pth')['params'] for f in (folder / name, one))
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
        for ours, theirs in zip(rows(folder / name), rows(one), strict=True):
            assert ours == pytest.approx(theirs, rel=100 * tolerance)


@pytest.mark.slow
def test_two_processes_agree_on_networks_with_normalisation(run, train_in_two, train_opt, tmp_path):
    """Layer norms train as in one process; of running statistics rank 0's count, also in averages
    and where images of a validation are shared.
    """
    averages = {
        'train__swa': {'start': 2, 'every': 1, 'bn_batches': 3},
        'train__posthoc_ema': True,
        'datasets__train__dataset_enlarge_ratio': 2,
    }
    whole, cut = (with_norms(train_opt(name=n, **averages), tmp_path) for n in ('whole', 'cut'))
    layer = with_norms(restoring(train_opt, 'SRModel', 'layer'), tmp_path, 'layer')
    folder = train_in_two((layer, None), (whole, None), (cut, 5), (cut, None))

    batch = {'datasets__train__batch_size_per_gpu': 4}
    one = run(with_norms(restoring(train_opt, 'SRModel', 'one', **batch), tmp_path, 'layer'))
    ours, theirs = (checkpoint(f, 'net_g_4.pth') for f in (folder / 'layer', one))
    assert ours.pop('basicsr') == theirs.pop('basicsr')
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

    whole, cut = folder / 'whole', folder / 'cut'
    ranks = [torch.load(whole / f'rank_{rank}.pth', weights_only=True) for rank in (0, 1)]
    assert differences(ranks[0]['swa'], checkpoint(whole, 'net_g_latest.pth')['params_swa']) == []
    for name in {*differences(*ranks)}:
        assert 'running' in name, name
    batch_statistics = [name for name in differences(*ranks) if '/swa/norms.batch' in name]
    assert batch_statistics == [], 'of the batches of both'
    for file in (*(f.name for f in (whole / 'models').iterdir()), '6.state'):
        assert differences(*(checkpoint(f, file) for f in (whole, cut))) == []
    assert rows(whole) == rows(cut)

    *_, swa, ema = rows(whole)
    opt, file = with_norms(train_opt(), tmp_path), whole / 'models/net_g_latest.pth'
    assert psnr_of(run, opt, file, 'params_swa') == swa['metrics/val (SWA)/psnr']
    assert psnr_of(run, opt, file, 'params_ema') == ema['metrics/val/psnr']


@pytest.mark.slow
def test_two_processes_crop_in_stages_and_mix_batches_alike(train_in_two, train_opt):
    """All ranks end with the same weights, also after a stop."""
    stages = [{'iters': 2, 'gt_size': [8, 24]}, {'gt_size': 12, 'batch_size_per_gpu': 1}]
    mixing = {'mixup': {'prob': 0.5}, 'cutmix': {'prob': 0.5}}
    options = {'datasets__train__progressive': stages, 'train__mixing': mixing}
    options['train__accumulate'] = 2
    whole, cut = (restoring(train_opt, 'SRModel', name, **options) for name in ('whole', 'cut'))
    folder = train_in_two((whole, None), (cut, 3), (cut, None))
    ranks = [torch.load(folder / f'whole/rank_{rank}.pth', weights_only=True) for rank in (0, 1)]
    assert differences(*ranks) == []
    for name in ('net_g_latest.pth', '4.state'):
        assert differences(*(checkpoint(folder / run, name) for run in ('whole', 'cut'))) == []
    assert checkpoint(folder / 'whole', '4.state')['samples'] == 2 * (2 + 2 + 1 + 1)
    assert rows(folder / 'whole') == rows(folder / 'cut')


FAILING = """
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class FailingDataset(PairedImageDataset):
    def __getitem__(self, index):
        if get_dist_info()[0] == 1:
            raise ValueError('this image is broken')
        return super().__getitem__(index)
"""


@pytest.mark.slow
def test_torchrun_alone_starts_the_script_and_an_error_on_one_rank_ends_all(
    run_program, train_opt, write, tmp_path, repository
):
    (tmp_path / 'failing_dataset.py').write_text(FAILING)
    opt = train_opt(plugins=['.'])
    opt['datasets']['val']['type'] = 'FailingDataset'
    result = run_program(
        *TORCHRUN,
        repository / 'basicsr/train.py',
        '-opt',
        write(opt),
        '--force_yml',
        f'path:experiments_root={tmp_path}',
    )
    assert result.returncode != 0
    assert 'this image is broken' in result.stderr
    assert result.stderr.count('INFO: Data: ') == 1, 'rank 0 alone speaks'
