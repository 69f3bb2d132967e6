"""Validate an option file against the signatures of its classes, and find unused options."""

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from basicsr.metrics.metric import metric_problems
from basicsr.models.lr_scheduler import scheduler_problems
from basicsr.models.optimization import optimizer_problems
from basicsr.utils.option_schema import Section
from basicsr.utils.option_section import OptionSection, place_of
from basicsr.utils.option_tables import TestOptions, TrainingOptions
from basicsr.utils.registry import (
    ARCH_REGISTRY,
    DATASET_REGISTRY,
    LOSS_REGISTRY,
    MODEL_REGISTRY,
    Registry,
)
from basicsr.utils.text import some
from basicsr.utils.yaml_util import OptionError

logger = logging.getLogger(__name__)

_LOSSES = ('pixel_opt', 'perceptual_opt', 'gan_opt', 'ldl_opt')


def check_components(opt: dict) -> None:
    """Check every component of the options against the signature of its class before building.

    Raises:
        OptionError: All mistakes, one line each: unknown names, unexpected and missing arguments.
    """
    _raise(
        f'{place_of(opt, *path)}: {problem}'
        for path, problems in _problems_of_components(opt)
        for problem in problems
    )


def _raise(problems: Iterator[str]) -> None:
    lines = list(dict.fromkeys(problems))
    if lines:
        raise OptionError('\n'.join(sorted(lines, key=_line_number)))


def _line_number(text: str) -> int:
    found = re.search(r':(\d+): ', text)
    return int(found[1]) if found else 0


def _problems_of_components(opt: dict) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Key path and problems of each component."""
    train, val = opt.get('train') or {}, opt.get('val') or {}
    yield ('model_type',), _unknown_name(MODEL_REGISTRY, opt['model_type'])
    for key, dataset in dict.items(opt['datasets']):
        yield ('datasets', key, 'type'), _unknown_name(DATASET_REGISTRY, dataset['type'])
    for key, network in dict.items(opt):
        if key.startswith('network_') and isinstance(network, dict):
            is_strict = opt.get('strict_options') == 'all'
            yield (key,), ARCH_REGISTRY.problems(network, strict=is_strict)
            yield from _wrong_kinds(ARCH_REGISTRY, network, key)
    for key, options in dict.items(train):
        if not isinstance(options, dict):
            continue
        if key in _LOSSES or (key.endswith('_opt') and options.get('type') in LOSS_REGISTRY):
            yield ('train', key), LOSS_REGISTRY.problems(options)
            yield from _wrong_kinds(LOSS_REGISTRY, options, 'train', key)
        elif key.startswith('optim_'):
            yield ('train', key), optimizer_problems(options)
        elif key == 'scheduler':
            yield ('train', key), scheduler_problems(options)
    losses = dict.get(train, 'losses')
    for index, options in enumerate(losses if isinstance(losses, list) else []):
        if isinstance(options, dict) and 'type' in options:
            own = {name: value for name, value in options.items() if name != 'name'}
            yield ('train', 'losses', str(index)), LOSS_REGISTRY.problems(own)
            yield from _wrong_kinds(LOSS_REGISTRY, own, 'train', 'losses', str(index))
    for key, options in (dict.get(val, 'metrics') or {}).items():
        yield ('val', 'metrics', key), metric_problems(options)


def _wrong_kinds(
    registry: Registry, options: Mapping[str, Any], *path: str
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    for key, problem in registry.wrong_kinds(options):
        yield (*path, key), [problem]


def _unknown_name(registry: Registry, name: str) -> list[str]:
    try:
        registry.get(name)
    except KeyError as error:
        return [error.args[0]]
    return []


def check_unread(opt: dict, of_users: bool = False) -> None:
    """Report options that nothing has read, once all components have been built.

    A likely misspelling in a section of a class of this package is an error, as is every unread
    key with ``strict_options: all``; the remaining unread keys are listed in one warning.

    Args:
        of_users: Warn of keys in the sections of users' classes, which may read them as late as the
            first steps, so call this after some. Otherwise of keys in all other sections.

    Raises:
        OptionError: All rejected keys, one line each.
    """
    if not isinstance(opt, OptionSection):
        return
    strict = opt['strict_options']
    problems, others = [], []
    for section, table, reader in _sections(opt):
        for key in section.unread():
            if key in table.model_fields:
                continue
            where, path = place_of(section, key), '.'.join((*section.path, key))
            close = _near(key, section, table)
            hint = f"; did you mean '{close[0]}'?" if close else '.'
            if not of_users and (strict == 'all' or (strict and close and not reader[1])):
                problems.append(f'{where}: {reader[0]} does not read this key{hint}')
            elif of_users == reader[1]:
                others.append(f'{path} ({reader[0]}{f", {close[0]}?" if close else ""})')
    _raise(iter(problems))
    if others:
        logger.warning('Options that nothing reads: %s', some(others, 20))


def _near(key: str, section: OptionSection, table: type[Section]) -> list[str]:
    """The known key that an unknown key most likely misspells, if any."""
    if key in table.known():
        return []
    known = (section.asked | table.known()) - {key}
    if key.startswith(table.families):  # network_d is not meant to be network_g
        return [name for name in known if name.lower() == key.lower()]
    return difflib.get_close_matches(key, known, n=1, cutoff=0.85)


def _sections(
    opt: OptionSection,
) -> Iterator[tuple[OptionSection, type[Section], tuple[str, bool]]]:
    """Each section, its table, and the class that reads it: name, and whether it is a user's.

    Sections that are read only when a run starts to log are skipped.
    """
    table = TrainingOptions if opt['is_train'] else TestOptions
    model = opt['model_type'], MODEL_REGISTRY.is_users(opt['model_type'])
    yield opt, table, model
    for key in ('path', 'train', 'val'):
        inner, section = table.inner(key), dict.get(opt, key)
        if inner is not None and isinstance(section, OptionSection):
            yield section, inner, model
    datasets: Mapping[str, Any] = dict.get(opt, 'datasets', {})
    of_datasets: Any = table.inner('datasets')
    for key, section in dict.items(datasets):
        name = section['type']
        yield section, of_datasets.inner(key), (name, DATASET_REGISTRY.is_users(name))
