"""Adversarial training on images that are degraded as they are needed."""

import pytest
import torch
from blind import blind, recipe_rows
from runs import checkpoint, differences, rows

from basicsr.models import build_model
from basicsr.models.srgan_model import SRGANModel
from basicsr.utils.img_process_util import USMSharp

PERCEPTUAL = {
    'type': 'PerceptualLoss',
    'vgg_type': 'vgg11',
    'layer_weights': {'conv1_1': 1.0},
    'weights': 'random',
}


@pytest.fixture
def model(train_opt):
    """A small RealESRGANModel without a run around it."""

    def make(**overrides):
        opt = blind(train_opt(train__losses=[{'type': 'MSELoss'}]), 'RealESRGANModel')
        opt['train'].update(perceptual_opt=PERCEPTUAL, ldl_opt={'type': 'L1Loss'})
        opt |= overrides
        return build_model(opt | {'dist': False, 'is_train': True})

    return make


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


@pytest.mark.parametrize(
    ('options', 'sharpened'),
    [
        ({}, {'pix', 'mse', 'percep'}),
        ({'l1_gt_usm': False}, {'percep'}),
        ({'percep_gt_usm': False}, {'pix', 'mse'}),
        ({'gan_gt_usm': True}, {'pix', 'mse', 'percep', 'gan'}),
        ({'l1_gt_usm': False, 'percep_gt_usm': False, 'gan_gt_usm': False}, set()),
    ],
)
def test_every_loss_sees_the_target_that_its_option_chooses(model, monkeypatch, options, sharpened):
    gan, pair = model(**options), {'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)}
    seen = {}

    def watch(loss, name):
        forward = loss.forward

        def watched(output, target, *args):
            seen[name] = target
            return forward(output, target, *args)

        monkeypatch.setattr(loss, 'forward', watched)

    watch(gan.cri_pix, 'pix')
    watch(gan.cri_perceptual, 'percep')
    watch(gan.cri_others['mse'], 'mse')
    judged = []
    gan.net_d.register_forward_pre_hook(lambda _, images: judged.append(images[0].detach()))
    monkeypatch.setattr(
        'basicsr.models.srgan_model.get_refined_artifact_map',
        lambda gt, *_: seen.update(ldl=gt) or torch.ones_like(gt),
    )
    gan.feed_data(pair)
    gan.optimize_parameters(1)
    seen['gan'] = judged[1]  # after the output in the generator's step
    sharp = USMSharp()(pair['gt'])
    assert not torch.equal(sharp, pair['gt'])
    assert set(seen) == {'pix', 'mse', 'percep', 'gan', 'ldl'}
    for name, target in seen.items():
        assert torch.equal(target, sharp if name in sharpened else pair['gt']), name


def test_the_option_of_the_other_model_is_refused(model):
    """Here it would sharpen twice."""
    with pytest.raises(ValueError, match='RealESRGANModel has l1_gt_usm, percep_gt_usm'):
        model(gt_usm=True)


def test_a_target_is_chosen_by_true_or_false(model):
    with pytest.raises(ValueError, match="l1_gt_usm must be true or false, got 'sharp'"):
        model(l1_gt_usm='sharp')


def test_all_losses_are_logged(run, train_opt):
    opt = blind(train_opt(train__total_iter=2), 'RealESRGANModel')
    opt['train'].update(ldl_opt={'type': 'L1Loss'}, perceptual_opt=PERCEPTUAL)
    logged = {name.removeprefix('losses/') for name in rows(run(opt))[0]}
    expected = {'l_g_pix', 'l_g_percep', 'l_g_ldl', 'l_g_gan', 'l_d_real', 'l_d_fake'}
    assert expected <= logged
    assert {name.removeprefix('metrics/') for name in logged} >= {'out_d_real', 'out_d_fake'}


@pytest.mark.parametrize(
    'options', [{'share_degradation': True, 'queue_size': 5}, {'queue_size': 4}, {}]
)
def test_a_run_interrupted_after_an_iteration_resumes_bit_for_bit(
    run, train_opt, monkeypatch, options
):
    """Both networks, the average, both optimizers, and the pool."""

    def make(name):
        opt = blind(train_opt(name=name), 'RealESRGANModel') | options | {'log_recipes': True}
        opt['train']['ldl_opt'] = {'type': 'L1Loss'}
        return opt

    whole, cut = run(make('whole')), make('cut')
    state = checkpoint(whole, '6.state')
    assert [len(pool['gt']) for pool in state.get('pools', [])] == [4] * bool(options)
    assert len(state['optimizers']) == 2
    for iteration in (5, 6):  # the second time nothing but the end is left
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(patch, iteration)
            run(cut, '--auto_resume')
    resumed = run(cut, '--auto_resume')
    assert differences(final_state(whole), final_state(resumed)) == []
    again = {row['sample']: row for row in recipe_rows(resumed)}
    assert again == {row['sample']: row for row in recipe_rows(whole)}


def test_the_second_stage_begins_with_the_weights_of_the_first(run, train_opt):
    """Its resume is independent of them."""
    first = run(blind(train_opt(name='first', train__total_iter=2)))
    opt = blind(train_opt(name='whole'), 'RealESRGANModel')
    opt['path'] = {
        'pretrain_network_g': str(first / 'models/net_g_latest.pth'),
        'param_key_g': 'params_ema',
        'strict_load_g': False,
    }
    whole = final_state(run(opt))
    cut = dict(opt, name='cut', train=dict(opt['train'], total_iter=4))
    run(cut)
    resumed = final_state(run(dict(opt, name='cut'), '--auto_resume'))
    assert differences(whole[:2], resumed[:2]) == []
    for key in ('optimizers', 'schedulers', 'samples'):
        assert differences(whole[2][key], resumed[2][key]) == []


def test_pairs_are_trained_on_without_options_of_a_degradation(run, train_opt):
    """With sharpening switched off, as SRGANModel trains on them."""
    opts = [blind(train_opt(name=name), 'RealESRGANModel') for name in ('blind', 'plain')]
    for opt in opts:
        opt['datasets']['train'] = dict(train_opt()['datasets']['train'])
    opts[0]['datasets']['train']['type'] = 'RealESRGANPairedDataset'
    opts[0].update(high_order_degradation=False, l1_gt_usm=False)
    opts[1]['model_type'] = 'SRGANModel'
    blind_run, plain = (final_state(run(opt)) for opt in opts)
    assert differences(blind_run, plain) == []


def test_gray_images_are_trained_with_one_channel(run, train_opt, image_pairs):
    gt, lq = image_pairs('gray', 4, (24, 28), channels=1)
    opt = blind(train_opt(train__total_iter=2), 'RealESRGANModel')
    opt['network_g'].update(num_in_ch=1, num_out_ch=1)
    opt['network_d']['num_in_ch'] = 1
    opt['train'].update(perceptual_opt=PERCEPTUAL, ldl_opt={'type': 'L1Loss'})
    opt['datasets']['train'].update(dataroot_gt=gt, color='gray')
    opt['datasets']['val'].update(dataroot_gt=gt, dataroot_lq=lq, color='gray')
    assert rows(run(opt))[1]['losses/l_g_percep'] > 0


OWN_MODEL = """
from basicsr.models.srgan_model import SRGANModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class RealESRGANModel(SRGANModel):
    def feed_data(self, data):
        if 'lq' not in data:
            data = {'lq': data['gt'][..., :8, :8], 'gt': data['gt'][..., :16, :16]}
        super().feed_data(data)
"""


def test_a_model_of_the_users_with_our_name_wins_and_ours_stays_there(run, train_opt, tmp_path):
    (tmp_path / 'own_model.py').write_text(OWN_MODEL)
    opt = blind(train_opt(plugins=['.']), 'RealESRGANModel') | {'log_recipes': True}
    folder = run(opt)
    assert not (folder / 'recipes_0.jsonl').exists()
    opt = dict(opt, model_type='RealESRGANModel_basicsr', name='ours')
    assert len(recipe_rows(run(opt))) == 12
