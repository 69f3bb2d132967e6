"""Version of the package; committed, so that a bare copy of the folder can be imported."""

__version__ = '2.0.0'
__gitsha__ = 'unknown'
version_info = (2, 0, 0)
