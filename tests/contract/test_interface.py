"""The interface of upstream BasicSR 1.4.2: what is there, and how it can be called.

``api.json`` holds upstream's public functions, classes and methods with their signatures, what its
packages re-export, and what its registries hold. Left out are names that only its own files used:
autograd functions of compiled code, and imports of each other by modules that are no packages.
"""

import ast
import importlib
import importlib.util
import inspect
import json
from inspect import Parameter
from pathlib import Path

import pytest
from blind import blind

import basicsr
from basicsr.archs import build_network
from basicsr.models import build_model
from basicsr.utils import registry

API = json.loads((Path(__file__).parent / 'api.json').read_text(encoding='utf-8'))

# Parts that are not built yet; what has come to exist must go from here.
MODULES_NOT_YET = {
    'archs': """
        dfdnet_arch dfdnet_util hifacegan_arch hifacegan_util inception stylegan2_arch
        stylegan2_bilinear_arch
    """,
    'data': """
        ffhq_dataset reds_dataset video_test_dataset
        vimeo90k_dataset
    """,
    'metrics': 'fid',
    'models': """
        edvr_model hifacegan_model
        stylegan2_model video_base_model video_gan_model video_recurrent_gan_model
        video_recurrent_model
    """,
    'ops': 'fused_act upfirdn2d',
    'utils': 'flow_util',
}

NAMES_NOT_YET = {}

REGISTERED_NOT_YET = {
    'DATASET_REGISTRY': """
        FFHQDataset REDSDataset REDSRecurrentDataset
        VideoRecurrentTestDataset VideoTestDUFDataset
        VideoTestDataset VideoTestVimeo90KDataset Vimeo90KDataset Vimeo90KRecurrentDataset
    """,
    'ARCH_REGISTRY': """
        DFDNet HiFaceGAN HiFaceGANDiscriminator StyleGAN2Discriminator StyleGAN2Generator
        StyleGAN2GeneratorBilinear_basicsr
    """,
    'MODEL_REGISTRY': """
        EDVRModel HiFaceGANModel
        StyleGAN2Model VideoBaseModel VideoGANModel VideoRecurrentGANModel
        VideoRecurrentModel
    """,
    'LOSS_REGISTRY': '',
    'METRIC_REGISTRY': '',
}

# Upstream's abstract method takes nothing, but every model's takes current_iter.
OTHERWISE = {'basicsr.models.base_model:BaseModel.optimize_parameters': '(self, current_iter)'}


EXISTING = [module for module in API['modules'] if importlib.util.find_spec(module) is not None]


def problems(function, signature):
    """Why a call that upstream's signature accepts may not be accepted, or mean something else."""
    upstream = ast.parse(f'def f{signature.removeprefix("staticmethod ")}: pass').body[0].args
    parameters = list(inspect.signature(function).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    takes_all = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds
    named = [p for p in parameters if p.kind <= Parameter.POSITIONAL_OR_KEYWORD]
    required = len(upstream.args) - len(upstream.defaults)
    for position, argument in enumerate(upstream.args):
        if position >= len(named):
            if not takes_all:
                yield f'no parameter {argument.arg}'
            continue
        own = named[position]
        if own.name != argument.arg:
            yield f'parameter {position} is {own.name}, not {argument.arg}'
        if position >= required:
            yield from default_problems(own, upstream.defaults[position - required])
    for own in parameters:
        known = own in named[: len(upstream.args)] or own.kind in (
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        )
        if not known and own.default is Parameter.empty:
            yield f'needs {own.name}'
    if upstream.vararg and Parameter.VAR_POSITIONAL not in kinds:
        yield 'no *args'
    if upstream.kwarg and Parameter.VAR_KEYWORD not in kinds:
        yield 'no **kwargs'


def default_problems(own, upstream):
    if own.default is Parameter.empty:
        yield f'{own.name} has no default'
        return
    try:
        value = ast.literal_eval(upstream)
    except ValueError:
        return  # a class or a function
    if value != own.default:
        yield f'{own.name} is {own.default!r} by default, not {value!r}'


def test_modules_of_upstream_are_there_or_listed_as_not_yet_built():
    missing = sorted(set(API['modules']) - set(EXISTING))
    listed = [
        f'basicsr.{p}.{name}' for p, names in MODULES_NOT_YET.items() for name in names.split()
    ]
    assert missing == sorted(listed)


@pytest.mark.parametrize('module', EXISTING)
def test_every_call_that_upstream_accepts_is_accepted(module):
    names, found = vars(importlib.import_module(module)), {}
    assert [name for name in API['modules'][module] if name not in names] == [
        name for name in NAMES_NOT_YET.get(module, []) if name in API['modules'][module]
    ]
    for name, value in API['modules'][module].items():
        if name not in names:
            continue
        calls = {name: value} if isinstance(value, str) else value
        for call, signature in calls.items():
            function = names[name] if isinstance(value, str) else getattr(names[name], call)
            signature = OTHERWISE.get(f'{module}:{name}.{call}', signature)
            found[f'{name}.{call}'] = list(problems(function, signature))
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize('package', API['exports'])
def test_packages_export_what_upstreams_export(package):
    module, not_yet = importlib.import_module(package), NAMES_NOT_YET.get(package, [])
    assert [name for name in API['exports'][package] if not hasattr(module, name)] == not_yet


@pytest.mark.parametrize('name', API['registries'])
def test_registries_hold_the_names_of_upstream_with_their_suffixes(name):
    known = getattr(registry, name).keys()
    missing = [entry for entry in API['registries'][name] if entry not in known]
    assert sorted(missing) == sorted(REGISTERED_NOT_YET[name].split())


def test_everything_that_packages_export_loads_only_when_it_is_asked_for():
    assert {name for name in API['exports']['basicsr'] if name in vars(basicsr)} == set()
    assert basicsr.scandir is importlib.import_module('basicsr.utils.misc').scandir
    with pytest.raises(AttributeError, match="module 'basicsr' has no attribute 'no_such_name'"):
        _ = basicsr.no_such_name


# What subclasses and tests of dependents read, by class.
ATTRIBUTES = {
    'PairedImageDataset': """
        opt io_backend_opt file_client mean std gt_folder lq_folder filename_tmpl paths
    """,
    'RealESRGANPairedDataset': """
        opt io_backend_opt file_client mean std gt_folder lq_folder filename_tmpl paths
    """,
    'SingleImageDataset': 'opt io_backend_opt file_client mean std lq_folder paths',
    'RealESRGANDataset': """
        opt io_backend_opt file_client gt_folder paths
        blur_kernel_size kernel_list kernel_prob blur_sigma betag_range betap_range sinc_prob
        blur_kernel_size2 kernel_list2 kernel_prob2 blur_sigma2 betag_range2 betap_range2
        sinc_prob2 final_sinc_prob
    """,
    'SRModel': """
        opt device is_train schedulers optimizers optimizer_g net_g net_g_ema ema_decay
        cri_pix cri_perceptual log_dict best_metric_results
    """,
    'RealESRNetModel': """
        opt device is_train schedulers optimizers optimizer_g net_g net_g_ema ema_decay
        cri_pix cri_perceptual log_dict best_metric_results queue_size usm_sharpener jpeger
    """,
    'RealESRGANModel': """
        opt device is_train schedulers optimizers optimizer_g optimizer_d net_g net_g_ema net_d
        net_d_iters net_d_init_iters ema_decay cri_pix cri_perceptual cri_gan cri_ldl log_dict
        best_metric_results queue_size usm_sharpener jpeger
    """,
    'EDSR': 'img_range mean conv_first body conv_after_body upsample conv_last',
    'RCAN': 'img_range mean conv_first body conv_after_body upsample conv_last',
    'MSRResNet': 'upscale conv_first body upconv1 conv_hr conv_last lrelu',
    'RRDBNet': 'scale conv_first body conv_body conv_up1 conv_up2 conv_hr conv_last lrelu',
    'BasicVSR': """
        num_feat spynet backward_trunk forward_trunk fusion upconv1 upconv2 conv_hr conv_last
        pixel_shuffle lrelu
    """,
    'EDVR': """
        center_frame_idx hr_in with_predeblur with_tsa feature_extraction pcd_align fusion
        reconstruction upconv1 upconv2 pixel_shuffle conv_hr conv_last lrelu
    """,
    'SRVGGNetCompact': 'num_in_ch num_out_ch num_feat num_conv upscale act_type body upsampler',
    'SwinIR': """
        img_range mean upscale upsampler window_size conv_first num_layers embed_dim ape patch_norm
        num_features mlp_ratio patch_embed patch_unembed pos_drop layers norm conv_after_body
    """,
}
NETWORK_OPTIONS = {
    'EDSR': {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 1},
    'RCAN': {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 16, 'num_group': 1, 'num_block': 1},
    'MSRResNet': {'num_feat': 4, 'num_block': 1},
    'RRDBNet': {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 1},
    'BasicVSR': {'num_feat': 4, 'num_block': 1},
    'EDVR': {'num_feat': 8, 'num_reconstruct_block': 1},
    'SRVGGNetCompact': {'num_feat': 4, 'num_conv': 1},
    'SwinIR': {'img_size': 8, 'window_size': 4, 'embed_dim': 8, 'depths': [1], 'num_heads': [2]},
}


def built(name, opt):
    """A small object of a class, as an option file makes it."""
    if name in NETWORK_OPTIONS:
        return build_network({'type': name, **NETWORK_OPTIONS[name]})
    if name.endswith('Model'):
        opt = opt if name == 'SRModel' else blind(opt, name)
        opt['train']['ema_decay'] = 0.9
        return build_model(opt | {'model_type': name, 'dist': False, 'is_train': True})
    opt = (blind(opt) if name == 'RealESRGANDataset' else opt) | {'dist': False}
    dataset = opt['datasets']['train'] | {'type': name, 'phase': 'train', 'scale': 2}
    return registry.DATASET_REGISTRY.get(name)(dataset)


@pytest.mark.parametrize('name', ATTRIBUTES)
def test_attributes_that_dependents_read_are_there(name, train_opt):
    made = built(name, train_opt())
    assert [key for key in ATTRIBUTES[name].split() if not hasattr(made, key)] == []


def test_kernels_are_drawn_from_the_attributes_of_a_dataset(train_opt):
    dataset = built('RealESRGANDataset', train_opt())
    dataset.sinc_prob = dataset.sinc_prob2 = 0
    dataset.kernel_list = dataset.kernel_list2 = ['plateau_aniso']
    dataset.kernel_prob = dataset.kernel_prob2 = [1]
    drawn = [dataset.draw()[1] for _ in range(20)]
    assert {recipe[key]['kind'] for recipe in drawn for key in ('kernel1', 'kernel2')} == {
        'plateau_aniso'
    }


def test_differences_between_signatures_are_found():
    def found(function, signature):
        return list(problems(function, signature))

    assert found(lambda a, b=1, *, c=2: 0, '(a, b=1)') == []
    assert found(lambda *args, **kwargs: 0, '(a, b=1)') == []
    assert found(lambda a, b=1: 0, '(a, b=1, *args, **kwargs)') == ['no *args', 'no **kwargs']
    assert found(lambda b, a=2: 0, '(a, b=1)') == [
        'parameter 0 is b, not a',
        'parameter 1 is a, not b',
        'a is 2 by default, not 1',
    ]
    assert found(lambda a, b: 0, '(a, b=1)') == ['b has no default']
    assert found(lambda a, b, *, c: 0, '(a)') == ['needs b', 'needs c']
    assert found(lambda a: 0, '(a, b=1)') == ['no parameter b']
