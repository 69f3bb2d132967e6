"""Adversarial training."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from blind import adversarial
from runs import checkpoint, differences, log_text, rows

from basicsr.models import build_model
from basicsr.models.srgan_model import SRGANModel

G_LOSSES = {'l_g_pix', 'l_g_gan'}
D_LOSSES = {'l_d_real', 'out_d_real', 'l_d_fake', 'out_d_fake'}


@pytest.fixture
def model(train_opt):
    """A small SRGANModel without a run around it."""

    def make(**overrides):
        opt = adversarial(train_opt())
        for keys, value in overrides.items():
            *parents, last = keys.split('__')
            section = opt
            for key in parents:
                section = section[key]
            section[last] = value
        return build_model(opt | {'dist': False, 'is_train': True})

    return make


def batch():
    return {'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)}


def weights(net):
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def test_five_iterations_equal_a_plain_loop(model):
    """Both networks, the average, and every logged value."""
    gan = model()
    net_g, net_d, ema = (copy.deepcopy(net) for net in (gan.net_g, gan.net_d, gan.net_g_ema))
    adam_g, adam_d = (torch.optim.Adam(n.parameters(), 1e-3, fused=True) for n in (net_g, net_d))
    real, fake = torch.ones(2, 1, 16, 16), torch.zeros(2, 1, 16, 16)

    for iteration in range(1, 6):
        data = batch()
        gan.feed_data(data)
        gan.optimize_parameters(iteration)

        output = net_g(data['lq'])
        l_g_pix = (output - data['gt']).abs().mean()
        l_g_gan = 0.1 * F.binary_cross_entropy_with_logits(net_d(output), real)
        adam_g.zero_grad()
        (l_g_pix + l_g_gan).backward()
        adam_g.step()
        adam_d.zero_grad()
        pred_real = net_d(data['gt'])
        l_d_real = F.binary_cross_entropy_with_logits(pred_real, real)
        pred_fake = net_d(output.detach())
        l_d_fake = F.binary_cross_entropy_with_logits(pred_fake, fake)
        (l_d_real + l_d_fake).backward()
        adam_d.step()
        with torch.no_grad():
            for average, current in zip(ema.parameters(), net_g.parameters(), strict=True):
                average.mul_(0.9).add_(0.1 * current)

        expected = {'l_g_pix': l_g_pix, 'l_g_gan': l_g_gan}
        expected |= {'l_d_real': l_d_real, 'out_d_real': pred_real.mean()}
        expected |= {'l_d_fake': l_d_fake, 'out_d_fake': pred_fake.mean()}
        assert gan.get_current_log() == {
            name: pytest.approx(value.item(), abs=1e-6) for name, value in expected.items()
        }
        pairs = ((gan.net_g, net_g), (gan.net_d, net_d), (gan.net_g_ema, ema))
        for ours, plain in pairs:
            torch.testing.assert_close(weights(ours), weights(plain), atol=1e-6, rtol=0)


def test_each_network_is_trained_at_its_iterations_and_all_losses_stay_in_the_log(model):
    gan = model(train__net_d_iters=2, train__net_d_init_iters=2)
    trained, named, values = {'g': [], 'd': []}, [], []
    for iteration in range(1, 8):
        before = {'g': weights(gan.net_g), 'd': weights(gan.net_d)}
        gan.feed_data(batch())
        gan.optimize_parameters(iteration)
        for label, net in (('g', gan.net_g), ('d', gan.net_d)):
            if differences(before[label], weights(net)):
                trained[label].append(iteration)
        named.append(set(gan.get_current_log()))
        values.append(gan.get_current_log().get('l_g_gan'))
    assert trained == {'g': [4, 6], 'd': [1, 2, 3, 4, 5, 6, 7]}
    assert named == [D_LOSSES] * 3 + [G_LOSSES | D_LOSSES] * 4
    assert values[3] == values[4] != values[5] == values[6]


def test_the_generators_step_leaves_no_gradient_in_the_discriminator(model):
    """And gives every parameter back as it was, also where it was frozen on purpose."""
    gan = model()
    gan.net_d.conv9.requires_grad_(False)
    gan.feed_data(batch())
    gan.step('g', gan.restore_and_compare)
    assert all(parameter.grad is None for parameter in gan.net_d.parameters())
    frozen = {name for name, p in gan.net_d.named_parameters() if not p.requires_grad}
    assert frozen == {'conv9.weight', 'conv9.bias'}


def test_an_error_in_the_generators_step_gives_the_parameters_back(model):
    gan = model()
    with pytest.raises(RuntimeError, match='no'), gan.frozen(gan.net_d):
        raise RuntimeError('no')
    assert all(parameter.requires_grad for parameter in gan.net_d.parameters())


def test_frozen_parameters_of_the_discriminator_are_named_and_not_trained(
    model, monkeypatch, caplog
):
    from basicsr.archs.discriminator_arch import UNetDiscriminatorSN

    original = UNetDiscriminatorSN.__init__

    def freeze(self, **kwargs):
        original(self, **kwargs)
        self.conv0.requires_grad_(False)

    monkeypatch.setattr(UNetDiscriminatorSN, '__init__', freeze)
    gan = model()
    assert 'Params conv0.weight, conv0.bias will not be optimized' in caplog.text
    before = weights(gan.net_d.conv0)
    gan.feed_data(batch())
    gan.optimize_parameters(1)
    assert differences(before, weights(gan.net_d.conv0)) == []


def test_an_adversarial_loss_among_the_others_is_refused(model):
    losses = [{'type': 'GANLoss', 'gan_type': 'vanilla', 'name': 'other'}]
    with pytest.raises(ValueError, match=r'its own place, train\.gan_opt'):
        model(train__losses=losses)


@pytest.mark.parametrize(
    ('option', 'value'),
    [('net_d_iters', 0), ('net_d_iters', '2'), ('net_d_iters', 1.5), ('net_d_init_iters', None)],
)
def test_turns_of_the_networks_are_whole_numbers(model, option, value):
    with pytest.raises(ValueError, match=rf'train\.{option} must be an integer of at least'):
        model(**{f'train__{option}': value})


def test_networks_of_other_channels_are_refused_with_both_options(model):
    net = {'type': 'UNetDiscriminatorSN', 'num_in_ch': 1, 'num_feat': 4}
    with pytest.raises(ValueError, match=r'network_d\.num_in_ch is 1, .* 3 channels'):
        model(network_d=net, network_g__num_out_ch=3)


def test_a_loss_that_is_not_adversarial_is_refused(model):
    with pytest.raises(ValueError, match=r'train\.gan_opt: L1Loss is not an adversarial loss'):
        model(train__gan_opt={'type': 'L1Loss'})


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('network_d', 'network_d: required'),
        ('train__gan_opt', r'train\.gan_opt: required'),
        ('train__optim_d', r'train\.optim_d: needs a type'),
        ('train__optim_g', r'train\.optim_g: needs a type'),
    ],
)
def test_what_adversarial_training_needs_is_named_before_the_first_step(model, option, message):
    with pytest.raises(ValueError, match=message):
        model(**{option: None})


def test_a_fidelity_loss_is_not_needed(model):
    gan = model(train__pixel_opt=None)
    gan.feed_data(batch())
    gan.optimize_parameters(1)
    assert set(gan.get_current_log()) == {'l_g_gan'} | D_LOSSES


def test_a_discriminator_for_patches_of_another_size_is_refused_with_both_sizes(model):
    vgg = {'type': 'VGGStyleDiscriminator', 'num_in_ch': 3, 'num_feat': 1, 'input_size': 128}
    with pytest.raises(ValueError, match=r'network_d\.input_size is 128, but gt_size is 16'):
        model(network_d=vgg)
    with pytest.raises(ValueError, match=r'input_size is 128, but gt_size is 192'):
        model(network_d=vgg, gt_size=192)
    gan = model(network_d=vgg, datasets__train__gt_size=128)
    gan.feed_data({'lq': torch.rand(2, 3, 64, 64), 'gt': torch.rand(2, 3, 128, 128)})
    gan.optimize_parameters(1)
    assert set(gan.get_current_log()) == G_LOSSES | D_LOSSES


# LDL


def test_ldl_compares_with_the_average(model):
    with pytest.raises(ValueError, match=r'train\.ldl_opt .*train\.ema_decay'):
        model(train__ldl_opt={'type': 'L1Loss'}, train__ema_decay=0)


def test_ldl_is_the_loss_where_the_output_varies_more_than_it_should(model):
    gan = model(train__ldl_opt={'type': 'L1Loss', 'loss_weight': 2.0})
    with torch.no_grad():
        for parameter in gan.net_g_ema.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    data = batch()
    with torch.no_grad():
        output, averaged = (net(data['lq']).numpy() for net in (gan.net_g, gan.net_g_ema))
    gan.feed_data(data)
    gan.optimize_parameters(1)

    gt, losses = data['gt'].numpy(), []
    for image, mean, target in zip(output, averaged, gt, strict=True):
        residual = np.abs(target - image).sum(0)
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(residual, 3, 'reflect'), (7, 7))
        weight = residual.var(ddof=1) ** 0.2 * windows.var(axis=(-1, -2), ddof=1)
        weight[residual < np.abs(target - mean).sum(0)] = 0
        assert 0 < (weight == 0).mean() < 1
        losses.append(np.abs(weight * image - weight * target).mean())
    assert gan.get_current_log()['l_g_ldl'] == pytest.approx(2 * np.mean(losses), abs=1e-6)


# train.losses


def test_more_losses_are_named_and_added(model):
    vgg = {'vgg_type': 'vgg11', 'layer_weights': {'conv1_1': 1}, 'weights': 'random'}
    more = [
        {'type': 'MSELoss', 'loss_weight': 3},
        {'type': 'WeightedTVLoss', 'name': 'smooth'},
        {'type': 'PerceptualLoss', 'name': 'small', 'style_weight': 2.0, **vgg},
        {'type': 'PerceptualLoss', 'name': 'plain', **vgg},
    ]
    gan, data = model(train__losses=more, train__pixel_opt=None), batch()
    with torch.no_grad():
        output = gan.net_g(data['lq'])
    gan.feed_data(data)
    gan.optimize_parameters(1)
    log = gan.get_current_log()
    names = {'l_g_mse', 'l_g_smooth', 'l_g_small', 'l_g_small_style', 'l_g_plain', 'l_g_gan'}
    assert set(log) == names | D_LOSSES
    assert log['l_g_mse'] == pytest.approx(3 * F.mse_loss(output, data['gt']).item(), abs=1e-6)
    steps = output.diff(dim=-1).abs().mean() + output.diff(dim=-2).abs().mean()
    assert log['l_g_smooth'] == pytest.approx(steps.item(), abs=1e-6)
    assert log['l_g_small_style'] > 0


def test_a_loss_of_the_list_trains_as_the_option_of_its_own_does(model):
    torch.manual_seed(1)
    listed = model(train__pixel_opt=None, train__losses=[{'type': 'L1Loss', 'name': 'listed'}])
    torch.manual_seed(1)
    usual, data = model(), batch()
    for gan in (listed, usual):
        gan.feed_data(data)
        gan.optimize_parameters(1)
    assert differences(weights(listed.net_g), weights(usual.net_g)) == []


@pytest.mark.parametrize(
    ('losses', 'message'),
    [
        ([{'type': 'L1Loss'}, {'type': 'L1Loss'}], "two are called 'l1'"),
        ([{'type': 'L1Loss', 'name': 'pix'}], "'pix'"),
        ([{'type': 'L1Loss', 'name': 'gan'}], "'gan'"),
        ([{'type': 'L1Loss', 'name': 'ldl'}], "'ldl'"),
        ({'type': 'L1Loss'}, 'must be a list of losses'),
        (['L1Loss'], 'must be a list of losses'),
        ([3], 'must be a list of losses'),
        ([{'loss_weight': 1}], 'must be a list of losses'),
    ],
)
def test_losses_that_cannot_be_told_apart_or_are_none_are_refused(model, losses, message):
    with pytest.raises(ValueError, match=rf'train\.losses.*{message}'):
        model(train__losses=losses)


# runs


def final_state(folder):
    """All that a run of six iterations ends with."""
    names = ('net_g_latest.pth', 'net_d_latest.pth', '6.state')
    return [checkpoint(folder, name) for name in names] + rows(folder)


class Interrupted(BaseException):
    pass


def interrupt_after(monkeypatch, iteration):
    step = SRGANModel.optimize_parameters

    def dying_step(self, current_iter):
        step(self, current_iter)
        if current_iter == iteration:
            raise Interrupted

    monkeypatch.setattr(SRGANModel, 'optimize_parameters', dying_step)


@pytest.mark.parametrize('model_type', ['SRGANModel', 'ESRGANModel'])
def test_a_run_interrupted_after_an_iteration_resumes_bit_for_bit(
    run, train_opt, monkeypatch, model_type
):
    """Both networks, the average, and both optimizers."""
    schedule = {'train__net_d_iters': 2}
    whole = final_state(run(adversarial(train_opt(name='whole', **schedule), model_type)))
    assert len(whole[2]['optimizers']) == len(whole[2]['schedulers']) == 2
    for iteration in (3, 5):
        opt = adversarial(train_opt(name=f'cut{iteration}', **schedule), model_type)
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(patch, iteration)
            run(opt)
        assert differences(whole, final_state(run(opt, '--auto_resume'))) == []


def test_resume_does_not_depend_on_what_was_pretrained(run, train_opt, monkeypatch):
    """File, key and strictness of the first start belong to that start alone."""
    first = run(adversarial(train_opt(name='first', train__total_iter=2)))
    pretrained = {
        'path__pretrain_network_g': str(first / 'models/net_g_latest.pth'),
        'path__param_key_g': 'params_ema',
        'path__strict_load_g': False,
        'path__pretrain_network_d': str(first / 'models/net_d_latest.pth'),
        'path__strict_load_d': False,
    }
    whole = final_state(run(adversarial(train_opt(name='whole', **pretrained))))
    cut = adversarial(train_opt(name='cut', **pretrained))
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(patch, 3)
        run(cut)
    resumed = run(cut, '--auto_resume')
    assert differences(whole, final_state(resumed)) == []
    assert 'with param key: [params_ema]' in log_text(resumed)  # of net_g_ema
    steps = [state['state'][0]['step'] for state in whole[2]['optimizers']]
    assert steps == [6, 6]


def test_a_state_of_a_run_without_a_discriminator_is_refused(run, train_opt):
    run(train_opt(train__total_iter=2))
    with pytest.raises(
        (ValueError, FileNotFoundError),
        match='has 1 optimizers, this model 2: it belongs to another kind',
    ):
        run(adversarial(train_opt()), '--auto_resume')


def test_scores_and_images_need_no_discriminator(run, train_opt):
    opt = adversarial(train_opt())
    folder = run(opt)
    test_opt = {key: opt[key] for key in ('name', 'model_type', 'scale', 'num_gpu', 'network_g')}
    test_opt |= {
        'datasets': {'val': opt['datasets']['val']},
        'path': {'pretrain_network_g': str(folder / 'models/net_g_latest.pth')},
        'val': opt['val'],
    }
    assert (run(test_opt, pipeline='test') / 'results.json').is_file()
