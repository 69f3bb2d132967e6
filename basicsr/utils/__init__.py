"""Utilities; names imported from here are loaded lazily."""

from .lazy import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        'color_util': 'bgr2ycbcr rgb2ycbcr rgb2ycbcr_pt ycbcr2bgr ycbcr2rgb',
        'diffjpeg': 'DiffJPEG',
        'file_client': 'FileClient',
        'img_process_util': 'USMSharp usm_sharp',
        'img_util': 'crop_border imfrombytes img2tensor imwrite tensor2img',
        'logger': 'AvgTimer MessageLogger get_env_info get_root_logger init_tb_logger '
        'init_wandb_logger',
        'misc': 'check_resume get_time_str make_exp_dirs mkdir_and_rename scandir set_random_seed '
        'sizeof_fmt',
        'options': 'yaml_load',
    },
)
