"""basicsr: train and test image and video restoration networks from one option file."""

from .version import __version__

__all__ = ['__version__']
