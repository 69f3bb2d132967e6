"""Utilities; names that dependents import from here are loaded when first asked for."""

from importlib import import_module
from typing import Any

_HOMES = {
    'color_util': 'bgr2ycbcr rgb2ycbcr rgb2ycbcr_pt ycbcr2bgr ycbcr2rgb',
    'file_client': 'FileClient',
    'img_util': 'crop_border imfrombytes img2tensor imwrite tensor2img',
    'logger': 'AvgTimer MessageLogger get_env_info get_root_logger init_tb_logger '
    'init_wandb_logger',
    'misc': 'check_resume get_time_str make_exp_dirs mkdir_and_rename scandir set_random_seed '
    'sizeof_fmt',
    'options': 'yaml_load',
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll] (served by __getattr__)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'.{_HOME_OF[name]}', __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
