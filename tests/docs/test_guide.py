"""What the guide shows runs, and what it links to is there."""

import re
import runpy
import sys

import pytest
from runs import rows

from basicsr.utils import yaml_load
from basicsr.utils.options import DatasetOptions, TrainDatasetOptions
from basicsr.utils.registry import ARCH_REGISTRY

LINK = re.compile(r'\]\(([^)\s]+)\)')


def blocks(text, language):
    """The fenced code blocks of a Markdown text."""
    return re.findall(rf'^```{language}\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def section(text, title):
    return re.split(r'^## ', text, flags=re.MULTILINE)[
        [part.partition('\n')[0] for part in re.split(r'^## ', text, flags=re.MULTILINE)].index(
            title
        )
    ]


def merge(opt, new):
    """Put the sections of ``new`` into ``opt``; one with a ``type`` is a component, and whole."""
    for key, value in new.items():
        if isinstance(value, dict) and 'type' not in value and isinstance(opt.get(key), dict):
            merge(opt[key], value)
        else:
            opt[key] = value
