"""Packaging of basicsr; nothing is compiled, and nothing heavy is imported."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
version = re.search(r"__version__ = '(.+)'", (here / 'basicsr/version.py').read_text())[1]

setup(
    name='basicsr',
    version=version,
    description='Train and test image and video restoration networks from one option file',
    long_description=(here / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    packages=find_packages(include=['basicsr', 'basicsr.*']),
    package_data={'basicsr': ['data/*.yml', 'metrics/*.npz', 'run/*.html', 'py.typed']},
    python_requires='>=3.11',
    install_requires=(here / 'requirements.txt').read_text().split(),
    extras_require={
        'safetensors': ['safetensors>=0.5.0'],
        'schedule-free': ['schedulefree>=1.4.1'],
        'tar': ['webdataset>=1.0.2'],
        'export': [
            *('onnx>=1.17.0', 'onnxruntime>=1.20.0', 'spandrel>=0.4.0'),
            *('ncnn>=1.0.20250503', 'pnnx>=20250530'),
        ],
        'test': [
            *('pytest>=8', 'pytest-xdist>=3.8', 'ruff>=0.14', 'setuptools>=77'),
            *('safetensors>=0.5.0', 'schedulefree>=1.4.1', 'webdataset>=1.0.2'),
            *('spandrel>=0.4.0', 'torchmetrics>=1.7.0', 'onnx>=1.17.0', 'onnxruntime>=1.20.0'),
        ],
        'docs': ['sphinx>=8', 'myst-parser>=4', 'furo>=2024.8'],
    },
    entry_points={'console_scripts': ['basicsr = basicsr.cli:main']},
)
