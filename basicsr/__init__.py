"""basicsr: train and test image and video restoration networks from one option file.

Names imported from here are loaded lazily.
"""

from .utils.lazy import lazy_exports
from .version import __version__

__all__ = ['__version__']

__getattr__ = lazy_exports(
    __name__,
    {
        'archs': 'build_network',
        'data': 'build_dataloader build_dataset',
        'data.data_sampler': 'EnlargedSampler',
        'data.prefetch_dataloader': 'CPUPrefetcher CUDAPrefetcher',
        'losses': 'build_loss',
        'losses.gan_loss': 'g_path_regularize gradient_penalty_loss r1_penalty',
        'metrics.niqe': 'calculate_niqe',
        'metrics.psnr_ssim': 'calculate_psnr calculate_ssim',
        'models': 'build_model',
        'test': 'test_pipeline',
        'train': 'create_train_val_dataloader init_tb_loggers load_resume_state train_pipeline',
        'utils.color_util': 'bgr2ycbcr rgb2ycbcr rgb2ycbcr_pt ycbcr2bgr ycbcr2rgb',
        'utils.diffjpeg': 'DiffJPEG',
        'utils.file_client': 'FileClient',
        'utils.img_process_util': 'USMSharp usm_sharp',
        'utils.img_util': 'crop_border imfrombytes img2tensor imwrite tensor2img',
        'utils.logger': 'AvgTimer MessageLogger get_env_info get_root_logger init_tb_logger '
        'init_wandb_logger',
        'utils.misc': 'check_resume get_time_str make_exp_dirs mkdir_and_rename scandir '
        'set_random_seed sizeof_fmt',
        'utils.options': 'copy_opt_file dict2str parse_options yaml_load',
    },
)
