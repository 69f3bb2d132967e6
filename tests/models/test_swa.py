"""The mean of the weights of late iterations: what enters, at which rate, and its statistics."""

import pytest
import torch
from blind import adversarial
from norms import with_norms
from runs import checkpoint, differences, log_text, psnr_of, rows

from basicsr.models.averaging import StochasticAverage
from basicsr.models.sr_model import SRModel

SWA = {'start': 2, 'every': 2, 'bn_batches': 2}


@pytest.fixture
def norm_opt(train_opt, tmp_path):
    """A run of a network with normalisation layers."""
    return lambda **overrides: with_norms(train_opt(**overrides), tmp_path)


def rates(folder, name='lr'):
    return [row[name] for row in rows(folder) if name in row]


def test_the_average_is_the_mean_of_the_stored_weights_and_changes_nothing_else(run, train_opt):
    plain = run(train_opt(name='plain'))
    folder = run(train_opt(train__swa={**SWA, 'start': 0.6}))  # of 6 iterations: 4
    stored = [checkpoint(folder, f'net_g_{i}.pth') for i in (2, 4, 6)]
    assert 'params_swa' not in stored[0]
    assert differences(stored[1]['params_swa'], stored[1]['params']) == []
    for name, value in checkpoint(folder, 'net_g_latest.pth')['params_swa'].items():
        mean = torch.stack([state['params'][name] for state in stored[1:]]).double().mean(0)
        assert torch.allclose(value.double(), mean, atol=1e-7)
    for file in ('net_g_2.pth', 'net_g_6.pth'):
        ours, theirs = checkpoint(folder, file), checkpoint(plain, file)
        ours.pop('params_swa', None)
        assert differences(ours, theirs) == []
    assert rates(folder) == rates(plain)


def test_the_rate_goes_over_to_that_of_the_average(run, train_opt):
    """Until the start as scheduled, then linearly from there within two iterations."""
    swa = {**SWA, 'start': 3, 'lr': 2e-3, 'anneal_iters': 2, 'anneal': 'linear'}
    expected = [1e-3] * 4 + [1.5e-3, 2e-3, 2e-3, 2e-3]
    folder = run(train_opt(name='late', train__swa=swa, train__total_iter=8))
    assert rates(folder) == pytest.approx(expected)  # not halved, as scheduled, at 5
    milestones = {'type': 'MultiStepLR', 'milestones': [1], 'gamma': 0.5}
    folder = run(train_opt(name='early', train__swa=swa, train__scheduler=milestones))
    assert rates(folder) == pytest.approx([1e-3, 5e-4, 5e-4, 5e-4, 1.25e-3, 2e-3])
    opt = train_opt(name='cos', train__swa=swa | {'anneal': 'cos', 'anneal_iters': 4})
    folder = run(opt | {'train': opt['train'] | {'scheduler': None}})
    assert rates(folder) == pytest.approx([1e-3] * 4 + [1.1464466e-3, 1.5e-3])


def test_the_rate_is_that_of_the_generator_alone_and_scaled_as_others(run, train_opt):
    swa = {**SWA, 'lr': 4e-3, 'anneal_iters': 0}
    opt = adversarial(train_opt(train__swa=swa, train__scale_lr={'batch': 4}))
    folder = run(opt)
    assert rates(folder) == pytest.approx([5e-4, 5e-4, 2e-3, 2e-3, 2e-3, 2e-3])
    assert rates(folder, 'lr_1') == pytest.approx([5e-4] * 4 + [2.5e-4] * 2)
    stored = [checkpoint(folder, f'net_g_{i}.pth')['params'] for i in (2, 4, 6)]
    for name, value in checkpoint(folder, 'net_g_latest.pth')['params_swa'].items():
        mean = torch.stack([state[name] for state in stored]).double().mean(0)
        assert torch.allclose(value.double(), mean, atol=1e-7)


def test_batch_norms_take_their_statistics_from_the_batches_that_would_follow(
    run, norm_opt, monkeypatch
):
    """Means over batches, of the averaged network, of that which the layer sees."""
    seen = {}
    step = SRModel.optimize_parameters

    def noting_step(self, current_iter):
        seen[current_iter] = self.lq.clone()
        step(self, current_iter)

    with monkeypatch.context() as patch:
        patch.setattr(SRModel, 'optimize_parameters', noting_step)
        run(norm_opt(name='longer', train__total_iter=8))
    folder = run(norm_opt(train__swa=SWA))
    stored, latest = (checkpoint(folder, f'net_g_{label}.pth') for label in (6, 'latest'))
    state = latest['params_swa']
    features = [
        torch.nn.functional.conv2d(seen[i], state['head.weight'], state['head.bias'], padding=1)
        for i in (7, 8)
    ]
    means = torch.stack([x.mean((0, 2, 3)) for x in features]).mean(0)
    variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in features]).mean(0)
    torch.testing.assert_close(state['norms.batch.running_mean'], means)
    torch.testing.assert_close(state['norms.batch.running_var'], variances)
    assert state['norms.batch.num_batches_tracked'] == 2

    buffers = [name for name in state if 'running' in name or 'tracked' in name]
    assert len(buffers) == 6
    for name in buffers:  # until the end they are those of the trained network
        assert torch.equal(stored['params_swa'][name], stored['params'][name])
        assert torch.equal(latest['params'][name], stored['params'][name])


@pytest.mark.parametrize(
    'how', [{'train__norms': 'frozen'}, {'train__swa': SWA | {'bn_batches': 0}}]
)
def test_statistics_stay_where_they_are_frozen_or_shall_not_be_computed(run, norm_opt, how):
    folder = run(norm_opt(**{'train__swa': SWA, **how}))
    latest = checkpoint(folder, 'net_g_latest.pth')
    for name in ('running_mean', 'running_var'):
        name = f'norms.batch.{name}'
        assert torch.equal(latest['params_swa'][name], latest['params'][name])
    assert 'statistics of batch norms' not in log_text(folder)


def test_the_last_validation_scores_the_average_as_a_test_does(run, norm_opt):
    for ema_decay in (0.9, 0):
        name = f'decay{ema_decay}'
        opt = norm_opt(name=name, train__swa=SWA, train__ema_decay=ema_decay)
        folder = run(opt)
        tag = 'metrics/val (SWA)/psnr'
        assert [row['iter'] for row in rows(folder) if tag in row] == [6]
        assert [row['iter'] for row in rows(folder) if 'metrics/val/psnr' in row] == [3, 6]
        *_, average, usual = rows(folder)
        file, key = folder / 'models/net_g_latest.pth', 'params_ema' if ema_decay else 'params'
        assert psnr_of(run, opt, file, 'params_swa') == average[tag]
        assert psnr_of(run, opt, file, key) == usual['metrics/val/psnr']
        assert average[tag] != usual['metrics/val/psnr']


def test_a_start_that_is_not_in_the_run_is_refused(run, train_opt):
    for start, message in (
        (7, 'train.swa.start is 7: .* 6'),
        (2.5, '2.5: give a fraction'),
    ):
        with pytest.raises(ValueError, match=message):
            run(train_opt(train__swa={'start': start}))
    with pytest.raises(ValueError, match=r'train\.swa\.anneal'):
        run(train_opt(train__swa={'anneal': 'exp'}))
    average = StochasticAverage(torch.nn.Identity(), {**SWA, 'start': 0.01}, 6)
    assert average.start == 1


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize('workers', [0, 2])
def test_a_run_with_all_averages_resumes_bit_for_bit(run, norm_opt, monkeypatch, workers):
    options = {
        'train__swa': SWA | {'start': 3, 'every': 1, 'lr': 5e-4, 'anneal_iters': 3},
        'train__posthoc_ema': True,
        'datasets__train__num_worker_per_gpu': workers,
    }
    whole = run(norm_opt(name='whole', **options))
    update = SRModel.update_averages
    for iteration in (3, 5, 6) if workers == 0 else (5,):
        opt = norm_opt(name=f'cut{iteration}', **options)

        def dying_update(self, current_iter, last=iteration):
            update(self, current_iter)
            if current_iter == last:
                raise Interrupted

        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(SRModel, 'update_averages', dying_update)
            run(opt)
        cut = run(opt, '--auto_resume')
        files = {file.name for file in (whole / 'models').iterdir()}
        assert {'averages_6.pth', 'net_g_latest.pth'} <= files
        for file in (*files, '6.state'):
            assert differences(checkpoint(whole, file), checkpoint(cut, file)) == [], file
        assert rows(whole) == rows(cut)


def test_a_run_goes_on_after_its_end_as_if_it_had_been_longer(run, norm_opt):
    whole = run(norm_opt(name='whole', train__swa=SWA))
    run(norm_opt(name='longer', train__swa=SWA, train__total_iter=3))
    longer = run(norm_opt(name='longer', train__swa=SWA), '--auto_resume')
    for file in ('net_g_4.pth', 'net_g_latest.pth'):
        assert differences(checkpoint(whole, file), checkpoint(longer, file)) == []


@pytest.mark.parametrize('kind', ['SequentialLR', 'ChainedScheduler'])
def test_its_rate_follows_no_schedule_that_is_made_of_several(run, train_opt, kind):
    parts = [{'type': 'LinearLR', 'total_iters': 2}, {'type': 'ExponentialLR', 'gamma': 0.9}]
    scheduler = {'type': kind, 'schedulers': parts}
    scheduler |= {'milestones': [2]} if kind == 'SequentialLR' else {}
    swa = {'start': 3, 'lr': 1e-4}
    with pytest.raises(ValueError, match=f'cannot take over from a {kind}: leave lr out'):
        run(train_opt(train__scheduler=scheduler, train__swa=swa))
