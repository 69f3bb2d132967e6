"""What projects that depend on basicsr import, and such a project at work."""

import pytest

# Taken from GFPGAN, HAT, Real-ESRGAN, VQFR, AnimeSR, MM-RealSR, DRCT, PLKSR, BasicSR-examples.
IMPORTED = {
    'archs': 'build_network',
    'archs.arch_util': (
        'DCNv2Pack ResidualBlockNoBN Upsample default_init_weights flow_warp make_layer '
        'pixel_unshuffle resize_flow to_2tuple trunc_normal_'
    ),
    'archs.rrdbnet_arch': 'RRDB RRDBNet ResidualDenseBlock',
    'archs.spynet_arch': 'SpyNet',
    'archs.srvgg_arch': 'SRVGGNetCompact',
    'archs.stylegan2_arch': (
        'ConvLayer EqualConv2d EqualLinear ResBlock ScaledLeakyReLU StyleGAN2Discriminator '
        'StyleGAN2Generator'
    ),
    'data': 'build_dataloader build_dataset degradations',
    'data.data_util': (
        'paired_paths_from_folder paired_paths_from_lmdb paths_from_folder paths_from_lmdb scandir'
    ),
    'data.degradations': (
        'circular_lowpass_kernel random_add_gaussian_noise_pt random_add_poisson_noise_pt '
        'random_mixed_kernels'
    ),
    'data.transforms': 'augment mod_crop paired_random_crop',
    'losses': 'build_loss',
    'losses.losses': 'CharbonnierLoss GANLoss L1Loss MSELoss PerceptualLoss WeightedTVLoss',
    'metrics': 'calculate_metric',
    'models': 'build_model lr_scheduler',
    'models.base_model': 'BaseModel',
    'models.sr_model': 'SRModel',
    'models.video_base_model': 'VideoBaseModel',
    'ops.fused_act': 'FusedLeakyReLU fused_leaky_relu',
    'test': 'test_pipeline',
    'train': 'train_pipeline',
    'utils': (
        'DiffJPEG FileClient USMSharp get_root_logger imfrombytes img2tensor imwrite scandir '
        'tensor2img'
    ),
    'utils.dist_util': 'get_dist_info',
    'utils.download_util': 'load_file_from_url',
    'utils.matlab_functions': 'bgr2ycbcr imresize rgb2ycbcr ycbcr2bgr ycbcr2rgb',
    'utils.options': 'dict2str parse_options',
    'utils.registry': (
        'ARCH_REGISTRY DATASET_REGISTRY LOSS_REGISTRY METRIC_REGISTRY MODEL_REGISTRY'
    ),
}

# Parts that are not built yet; a name that has come to exist must go from here.
NOT_YET = {
    'archs.stylegan2_arch': IMPORTED['archs.stylegan2_arch'],
    'models.video_base_model': 'VideoBaseModel',
    'ops.fused_act': 'FusedLeakyReLU fused_leaky_relu',
}


def import_from(module, name):
    """``from basicsr.<module> import <name>``"""
    package = __import__(f'basicsr.{module}', fromlist=[name])
    try:
        return getattr(package, name)
    except AttributeError as error:
        raise ImportError(name) from error


@pytest.mark.parametrize(
    ('module', 'name'),
    [(module, name) for module, names in IMPORTED.items() for name in names.split()],
)
def test_a_name_that_dependents_import_is_there(module, name):
    if name not in NOT_YET.get(module, '').split():
        assert import_from(module, name) is not None
        return
    with pytest.raises(ImportError, match=rf"^({name}|No module named 'basicsr\.{module}')$"):
        import_from(module, name)
