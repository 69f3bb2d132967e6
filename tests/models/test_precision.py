"""Mixed precision, loss scaling, clipping, and batches computed in parts."""

import math

import pytest
import torch
from blind import adversarial, blind
from runs import checkpoint, differences, log_text, rows
from torch import nn

from basicsr.models import build_model
from basicsr.models.base_model import BaseModel
from basicsr.models.sr_model import SRModel
from basicsr.models.step import Stepper

CPU = torch.device('cpu')


@pytest.fixture
def model(train_opt, tmp_path):
    def make(change=dict, **overrides):
        opt = change(train_opt(**overrides))
        opt.update(dist=False, is_train=True)
        opt['path'].setdefault('visualization', str(tmp_path / 'vis'))
        torch.manual_seed(0)
        return build_model(opt)

    return make


def batch(size=6):
    generator = torch.Generator().manual_seed(1)
    lq = torch.rand(size, 3, 8, 8, generator=generator)
    return {'lq': lq, 'gt': torch.rand(size, 3, 16, 16, generator=generator)}


def after_steps(model, count=3):
    """The weights and the last log after some steps on one batch."""
    for iteration in range(1, count + 1):
        model.feed_data(batch())
        model.optimize_parameters(iteration)
    nets = [net for net in (model.net_g, getattr(model, 'net_d', None)) if net is not None]
    return [p for net in nets for p in net.state_dict().values()], model.get_current_log()


@pytest.mark.parametrize('parts', [2, 4, 6, 50])
def test_a_batch_in_parts_gives_the_step_of_the_whole(model, parts):
    """Parts of unequal size and more parts than samples included."""
    whole, log = after_steps(model())
    split, split_log = after_steps(model(train__accumulate=parts))
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert split_log == pytest.approx(log, rel=1e-5)


def test_both_networks_of_adversarial_training_are_computed_in_parts(model):
    """The logits of U-Net discriminators are means over samples, too."""
    for change in (adversarial, lambda opt: blind(opt, 'RealESRGANModel')):
        gans = model(change), model(change, train__accumulate=3)
        for gan in gans:  # in train mode a step of the spectral norm is made with every part
            gan.net_d.eval()
        (whole, log), (split, split_log) = map(after_steps, gans)
        assert split_log == pytest.approx(log, rel=1e-4, abs=1e-6)
        for a, b in zip(whole, split, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_sharpened_target_is_split_with_the_batch(model):
    gan = model(lambda opt: blind(opt, 'RealESRGANModel'), train__accumulate=4)
    sizes, compute = [], gan.fidelity_losses
    gan.fidelity_losses = lambda: (
        sizes.append((len(gan.lq), len(gan.gt), len(gan.target('pix')), len(gan.output)))
        or compute()
    )
    after_steps(gan, 1)
    assert sizes == [(2,) * 4] * 3
    assert torch.equal(gan.target('pix'), gan.usm_sharpener(gan.gt))


def test_a_loss_that_is_a_sum_cannot_be_computed_in_parts(model):
    pixel_opt = {'type': 'L1Loss', 'reduction': 'sum'}
    with pytest.raises(ValueError, match='cri_pix is a sum'):
        model(train__accumulate=2, train__pixel_opt=pixel_opt)
    model(train__pixel_opt=pixel_opt)


def test_after_a_step_in_parts_the_batch_is_whole(model):
    sr = model(train__accumulate=4)
    after_steps(sr, 1)
    assert len(sr.lq) == len(sr.gt) == len(sr.output) == 6
    assert sr.output.shape == sr.gt.shape


def test_bf16_computes_the_network_in_bf16_and_follows_float32(model):
    exact, log = after_steps(model(), 5)
    sr = model(train__amp='bf16')
    seen = []
    sr.net_g.body[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    rough, rough_log = after_steps(sr, 5)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in sr.net_g.parameters())
    assert rough_log['l_pix'] == pytest.approx(log['l_pix'], rel=0.02)
    assert differences(exact, rough) != []


def test_fp16_scales_the_loss_and_a_step_that_overflows_is_left_out(model):
    sr = model(train__amp='fp16')
    before = [p.clone() for p in sr.net_g.parameters()]
    sr.feed_data({key: value * 1e30 for key, value in batch().items()})
    sr.optimize_parameters(1)
    assert differences(before, list(sr.net_g.parameters())) == []
    scale = sr.stepper.state_dict()['scalers']['g']['scale']
    assert scale == 2.0**15, 'half of the first'
    sr.feed_data(batch())
    sr.optimize_parameters(2)
    # This is the first step of Adam, which moves by the learning rate.
    moved = [(p - old).abs().max() for p, old in zip(sr.net_g.parameters(), before, strict=True)]
    assert max(moved).item() == pytest.approx(1e-3, rel=2e-3)


@pytest.mark.parametrize('parts', [1, 3])
def test_adversarial_training_in_fp16_follows_float32(model, parts):
    _, log = after_steps(model(adversarial))
    gan = model(adversarial, train__amp='fp16', train__accumulate=parts, train__clip_grad_norm=1e9)
    _, rough = after_steps(gan)
    assert rough.pop('grad_norm_g') < 100 > rough.pop('grad_norm_d'), 'of gradients as they are'
    assert rough == pytest.approx(log, rel=0.05, abs=5e-3)
    assert gan.stepper.state_dict()['scalers'].keys() == {'g', 'd'}


class OneWeight:
    """What a step needs of a model: here a network of one weight."""

    batch_tensors, current_iter = (), 1

    def __init__(self):
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, stepper, factor):
        losses = lambda: {'l': self.net.weight.sum() * factor}  # noqa: E731
        return stepper.step(self, 'g', [self.net], self.optimizer, losses)


def test_a_network_that_overflows_in_fp16_continues_in_bf16_and_says_so(caplog):
    stepper, model = Stepper({'amp': 'fp16'}, CPU), OneWeight()
    for _ in range(20):
        model.step(stepper, math.inf)
    stepper.check()
    assert stepper.amp == 'bf16'
    assert 'continuing in bf16' in caplog.text
    model.step(stepper, 1)
    assert model.net.weight.item() == pytest.approx(0.9)
    resumed = Stepper({'amp': 'fp16'}, CPU)
    resumed.load_state_dict(stepper.state_dict())
    assert resumed.amp == 'bf16'


def test_two_steps_of_a_label_in_an_iteration_both_count():
    stepper, model = Stepper({}, CPU), OneWeight()
    model.step(stepper, torch.tensor(math.nan))
    nn.init.ones_(model.net.weight)
    model.step(stepper, 2)
    found = stepper.take()['g']
    assert found[:2].tolist() == [1, 1]
    assert stepper.take() == {}


def test_gradients_are_clipped_by_norm_and_the_norm_before_is_logged(model):
    sr = model(train__clip_grad_norm=1e-3, train__accumulate=2)
    _, log = after_steps(sr, 1)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in sr.net_g.parameters()))
    assert norm == pytest.approx(1e-3, rel=1e-3)
    free = model(train__clip_grad_norm=1e9)
    _, free_log = after_steps(free, 1)
    assert log['grad_norm_g'] == pytest.approx(free_log['grad_norm_g'], rel=1e-5)
    assert log['grad_norm_g'] > 1e-3


def test_gradients_are_clipped_by_value(model):
    sr = model(train__clip_grad_value=1e-4)
    after_steps(sr, 1)
    largest = max(float(p.grad.abs().max()) for p in sr.net_g.parameters())
    assert largest == pytest.approx(1e-4)


def test_both_norms_are_logged_in_adversarial_training(model):
    _, log = after_steps(model(adversarial, train__clip_grad_norm=10.0), 1)
    assert log['grad_norm_g'] > 0 < log['grad_norm_d']


def test_lbfgs_asks_for_the_loss_several_times_and_lowers_it(model):
    sr = model(train__optim_g={'type': 'LBFGS', 'lr': 0.5, 'max_iter': 5}, train__ema_decay=0)
    calls = []
    compute = sr.restore_and_compare
    sr.restore_and_compare = lambda: calls.append(1) or compute()
    _, first = after_steps(sr, 1)
    _, last = after_steps(sr, 3)
    assert len(calls) > 4 and last['l_pix'] < first['l_pix']


def test_one_evaluation_of_lbfgs_is_a_step_of_gradient_descent(model):
    """Its first step is along the gradient, shortened to a 1-norm of at most 1."""
    lbfgs, sgd = (
        model(train__optim_g={'type': name, 'lr': 0.01, **more})
        for name, more in (('LBFGS', {'max_iter': 1}), ('SGD', {}))
    )
    sgd.feed_data(batch())
    sgd.optimizer_g.zero_grad()
    sum(sgd.restore_and_compare().values()).backward()
    norm = sum(float(p.grad.abs().sum()) for p in sgd.net_g.parameters())
    sgd.optimizer_g.param_groups[0]['lr'] *= min(1, 1 / norm)
    for a, b in zip(after_steps(lbfgs, 1)[0], after_steps(sgd, 1)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_lbfgs_trains_a_discriminator(model):
    gan = model(adversarial)
    optim_d = {'type': 'LBFGS', 'lr': 0.1, 'max_iter': 4}
    _, log = after_steps(model(adversarial, train__net_d_init_iters=9), 1)
    gan = model(lambda opt: adversarial(opt) | {'train': {**opt['train'], 'optim_d': optim_d}})
    after_steps(gan, 4)
    _, later = after_steps(gan, 1)
    assert later['l_d_real'] + later['l_d_fake'] < log['l_d_real'] + log['l_d_fake']


@pytest.mark.parametrize('option', [{'train__amp': 'fp16'}, {'train__clip_grad_norm': 1.0}])
def test_lbfgs_with_gradients_that_are_changed_is_refused(model, option):
    sr = model(train__optim_g={'type': 'LBFGS', 'lr': 0.5}, **option)
    with pytest.raises(ValueError, match='LBFGS compares gradients'):
        after_steps(sr, 1)


def test_the_average_begins_with_fewer_iterations(model):
    """ema_i = d ema + (1 - d) net with d = min(0.9, (1 + i) / (10 + i))."""
    sr = model(train__ema_warmup=True)
    expected = sr.net_g.body[0].weight.clone()
    for iteration in (1, 2, 90):
        sr.update_learning_rate(iteration)
        sr.feed_data(batch())
        sr.optimize_parameters(iteration)
        decay = min(0.9, (1 + iteration) / (10 + iteration))
        expected = decay * expected + (1 - decay) * sr.net_g.body[0].weight.detach()
        torch.testing.assert_close(sr.net_g_ema.body[0].weight, expected)


def test_options_that_a_step_of_the_users_own_passes_by_are_named(model, train_opt, caplog):
    class OwnStep(SRModel):
        def optimize_parameters(self, current_iter):
            pass

    opt = train_opt(train__amp='bf16', train__accumulate=2) | {'dist': False, 'is_train': True}

    class CallsStep(SRModel):
        def optimize_parameters(self, current_iter):
            self.step('g', self.restore_and_compare)

    for cls, is_told in ((OwnStep, True), (CallsStep, False), (SRModel, False)):
        sr = cls(opt)
        for iteration in (1, 2):
            sr.begin_iteration(batch(), iteration)
            sr.optimize_parameters(iteration)
            sr.end_iteration(iteration)
        text = f'{cls.__name__} has an optimize_parameters of its own, which does not call'
        assert caplog.text.count(text) == is_told
    assert 'train.amp, train.accumulate have no effect' in caplog.text


GROUPS = [{'pattern': 'body.0', 'lr': 1e-4}]


@pytest.mark.parametrize(
    'options',
    [
        {'amp': 'bf16', 'clip_grad_value': 1e-3},
        {'amp': 'fp16'},
        {'accumulate': 2, 'clip_grad_norm': 0.1, 'ema_warmup': True},
        {'channels_last': True, 'checkpoint_activations': True, 'norms': 'frozen', 'tf32': False},
        {'compile': {'backend': 'eager'}, 'scale_lr': {'batch': 4}},
        {'optim_g': {'type': 'LBFGS', 'lr': 0.5, 'max_iter': 3}, 'clip_grad_norm': None},
        {'optim_g': {'type': 'AdamW', 'lr': 1e-3, 'decay_norms': False, 'groups': GROUPS}},
        {'optim_g': {'type': 'torch.optim.sgd:SGD', 'lr': 1e-2, 'momentum': 0.9}},
    ],
    ids=['bf16', 'fp16', 'parts', 'layout', 'compile', 'lbfgs', 'groups', 'class'],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(
    run, train_opt, monkeypatch, options
):
    options = {f'train__{key}': value for key, value in options.items()}
    resumes_exactly(run, monkeypatch, lambda name: train_opt(name=name, **options))


@pytest.mark.parametrize('options', [{'amp': 'fp16', 'net_d_iters': 4}, {'accumulate': 2}])
def test_a_resumed_adversarial_run_ends_with_the_same_bits(run, train_opt, monkeypatch, options):
    """Of the generator, which is trained in the fourth iteration, the last norm is logged too."""
    options = {f'train__{key}': value for key, value in options.items()}
    options['train__clip_grad_norm'] = 0.1
    folder = resumes_exactly(
        run, monkeypatch, lambda name: adversarial(train_opt(name=name, **options)), stop_after=5
    )
    assert [row for row in rows(folder) if 'lr' in row][-1]['grad_norm_g'] > 0


def resumes_exactly(run, monkeypatch, make_opt, stop_after=3):
    """Check that a run that was stopped ends as one that was not; returns its folder."""

    class Stop(BaseException):
        pass

    whole = run(make_opt('whole'))
    begin = BaseModel.update_learning_rate

    def stop(self, iteration, *args):
        if iteration > stop_after:
            raise Stop
        begin(self, iteration, *args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(BaseModel, 'update_learning_rate', stop)
        run(make_opt('cut'))
    cut = run(make_opt('cut'), '--auto_resume')
    assert 'not used' not in log_text(cut)
    for file in (whole / 'models').iterdir():
        assert differences(checkpoint(whole, file.name), checkpoint(cut, file.name)) == []
    assert differences(checkpoint(whole, '6.state'), checkpoint(cut, '6.state')) == []
    assert rows(whole) == rows(cut)
    return cut


def test_the_precision_of_a_state_wins_and_is_named(run, train_opt):
    run(train_opt(train__total_iter=2, train__amp='bf16'))
    folder = run(train_opt(train__total_iter=4), '--auto_resume')
    assert checkpoint(folder, '4.state')['precision']['amp'] == 'bf16'
    assert 'train.amp stays bf16' in log_text(folder)
