"""``basicsr explain -opt options/quickstart.yml``: what a run of an option file would be."""

import argparse
import difflib
import logging
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from basicsr.utils.errors import UserError
from basicsr.utils.option_reference import Entry, entries, meaning
from basicsr.utils.options import OptionError, OptionFile, Process, yaml_load
from basicsr.utils.registry import import_plugins
from basicsr.utils.text import sizeof_fmt, write_out

_BARS = '▁▂▃▄▅▆▇█'
_WIDTH = 60  # of the curve
_LONGEST = 60  # of a value
_MOST_MACS = 2e11  # for a receptive field: some seconds
_SECONDS = 5.0  # of the steps that are measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        'Examples: basicsr explain -opt options/quickstart.yml; '
        'basicsr explain -opt options/quickstart.yml train.optim_g.lr'
    )
    add = parser.add_argument
    add('-opt', required=True, metavar='FILE', help='option file (YAML)')
    add('key', nargs='?', metavar='KEY.PATH', help='explain this option, or this section, alone')
    add('--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='set options of the file')
    text = 'measure what takes a while: the time of some steps, receptive fields of large networks'
    add('--measure', action='store_true', help=text)
    parser.set_defaults(auto_resume=False, debug=False)


def main(args: argparse.Namespace) -> int | None:
    """Explain a file, or a key of it, which takes no import of torch."""
    if args.key is not None:
        try:
            write_out(_key(args))
        except (UserError, OSError) as error:
            sys.stderr.write(f'{error}\n')
            return 2 if isinstance(error, OptionError) else 1
        return None
    from basicsr.run.program import run

    def write(root: Path) -> None:
        logger = logging.getLogger('basicsr')
        level = logger.level
        logger.setLevel(logging.WARNING)  # what is built here is no event
        try:
            for line in _all(args, root):
                write_out(f'{line}\n')
        finally:
            logger.setLevel(level)

    run(write, Path.cwd())
    return None


def _read(args: argparse.Namespace) -> tuple[OptionFile, dict]:
    given = yaml_load(Path(args.opt))
    sets = given.get('datasets')
    is_train = 'train' in given or (isinstance(sets, dict) and 'train' in sets)
    file = OptionFile(args.opt, is_train, args.force_yml)
    if folders := file.plugin_folders():
        import_plugins(folders)
    return file, file.checked()


def _key(args: argparse.Namespace) -> str:
    """The text on one option, or on those of a section."""
    file, opt = _read(args)
    path, found = tuple(re.split('[.:]', args.key)), list(entries(opt, file.table))
    chosen = [entry for entry in found if entry.path[: len(path)] == path]
    if not chosen and (text := meaning(path)):
        return f'{args.key}: not given\n    {text}\n'
    if not chosen:
        known = {'.'.join(e.path[:n]) for e in found for n in range(1, len(e.path) + 1)}
        close = difflib.get_close_matches('.'.join(path), sorted(known), n=3)
        hint = f'; did you mean {" or ".join(close)}?' if close else '.'
        raise OptionError(f'{args.opt}: there is no option {args.key}{hint}')
    lines = (line for entry in chosen for line in _entry(entry, file, longest=1000))
    return '\n'.join([*lines, ''])


def _entry(entry: Entry, file: OptionFile, longest: int = _LONGEST) -> Iterator[str]:
    """The lines on an option: path, value and origin; type and meaning."""
    origin = file.origin(entry.path)
    yield f'{".".join(entry.path) + ": " + shown(entry.value, longest):<64}  {origin}'
    about = f'{entry.type}; {entry.meaning}' if entry.type and entry.meaning else ''
    about = about or entry.type or entry.meaning
    indent = ' ' * 4
    yield from textwrap.wrap(about, 100, initial_indent=indent, subsequent_indent=indent)


def shown(value: Any, longest: int = _LONGEST) -> str:
    """A value as it is written in an option file, in one line."""
    if value is None:
        return '~'
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix('...\n').strip()
    return text if len(text) <= longest else f'{text[: longest - 1]}…'


def _all(args: argparse.Namespace, root: Path) -> Iterator[str]:
    """The whole explanation, line by line."""
    from basicsr.run.cores import usable_cores
    from basicsr.run.option_checks import check_components

    file, opt = _read(args)
    yield f'Options of {args.opt}'
    yield ''
    for entry in entries(opt, file.table):
        yield from _entry(entry, file)
    if not file.is_train:
        return
    process = Process('none', 0, 1, len(usable_cores()), seed=0)
    opt = file.complete(opt, args, root, process)
    check_components(opt)
    from basicsr.run.explanation import datasets

    sets = dict(datasets(opt))
    for section in (_rates(opt), _networks(opt, args.measure), _amounts(opt, sets)):
        yield ''
        yield from section
    yield ''
    yield from _contradictions(opt, sets)
    if args.measure:
        yield ''
        yield _time(opt)


def _rates(opt: dict) -> Iterator[str]:
    from basicsr.run.explanation import learning_rates

    rates = learning_rates(opt)
    yield 'Learning rates'
    if not rates.names:
        return
    yield ''
    total, points = opt['train']['total_iter'], list(rates.at)
    chosen = [
        max((p for p in points if p <= 1 + (total - 1) * i / (_WIDTH - 1)), default=points[0])
        for i in range(min(_WIDTH, total))
    ]
    curve = [rates.at[point][0] for point in chosen]
    yield f'  {sparkline(curve)}  {rates.names[0]}, 0 to {max(curve):g}'
    yield f'  {"from iteration":>14}' + ''.join(f'{name:>14}' for name in rates.names)
    for point in rates.rows:
        yield f'  {point:>14}' + ''.join(f'{rate:>14.6g}' for rate in rates.at[point])


def sparkline(values: list[float]) -> str:
    """The values as bars of eight heights, from 0 to the largest."""
    top = max(values) or 1.0
    return ''.join(_BARS[min(int(8 * max(value, 0) / top), 7)] for value in values)


def _networks(opt: dict, measure: bool) -> Iterator[str]:
    from basicsr.run.explanation import halo, size_of

    yield 'Networks'
    for key in [key for key in opt if key.startswith('network_') and opt[key]]:
        label = key.removeprefix('network_')
        yield ''
        try:
            size = size_of(opt, label)
        except UserError as error:
            yield f'  {key}: {opt[key]["type"]}: {error}'
            continue
        batch, channels, side, _ = size.input
        output = 'x'.join(map(str, size.output[1:]))
        yield f'  {key}: {opt[key]["type"]}, {channels}x{side}x{side} to {output}'
        frozen = size.parameters - size.trained
        text = f', {frozen:,} of them not trained' if frozen else ''
        yield f'    parameters       {size.parameters:,}{text}'
        yield f'    multiply-adds    {size.macs:,} for such an image, at inference'
        if label == 'g':
            yield f'    receptive field  {_halo(halo, opt, size.macs, measure)}'
        parts = f'{sizeof_fmt(size.state)} of weights, gradients, moments and averages'
        yield (
            f'    memory           about {sizeof_fmt(size.state + size.activations)} in float32: '
            f'{parts}, {sizeof_fmt(size.activations)} for the backward pass of {batch} images'
        )


def _halo(halo: Any, opt: dict, macs: int, measure: bool) -> str:
    try:
        pixels = halo(opt, macs, float('inf') if measure else _MOST_MACS)
    except UserError as error:
        return f'not measured: {error}'
    if pixels is None:
        return 'the whole image, or more than 500 LQ pixels to each side'
    return f'at most {pixels} LQ pixels to each side'


def _amounts(opt: dict, sets: Mapping[str, Any]) -> Iterator[str]:
    from basicsr.run.explanation import amounts

    yield 'Amounts'
    yield ''
    yield f'  iterations       {opt["train"]["total_iter"]:,}'
    for key, found in sets.items():
        if isinstance(found, Exception):
            yield f'  {key:<17}cannot be read: {found}'
    total = amounts(opt, None if isinstance(sets['train'], Exception) else sets['train'])
    rate = f'{total.samples_per_iteration} in the first iteration'
    yield f'  samples          {total.samples:,}, {rate}'
    if total.epochs is not None:
        yield f'  epochs           {total.epochs:,.1f} of {total.images:,} images'
    for key, found in sets.items():
        if key != 'train' and not isinstance(found, Exception):
            yield f'  {key:<17}{len(found):,} images'


def _time(opt: dict) -> str:
    """The time of the training, from some steps of it."""
    from basicsr.run.loaders import schedule_of_all_ranks

    from .trial import on_few_images, train_shortly

    samples = schedule_of_all_ranks(opt).samples(opt['train']['total_iter'])
    with TemporaryDirectory(prefix='basicsr_explain_') as cache:
        speed = train_shortly(on_few_images(opt, cache), _SECONDS)['speed']
    return (
        f'Time: about {samples / speed / 3600:.2g} h at {speed:.1f} samples per second, without '
        'validations and checkpoints'
    )


def _contradictions(opt: dict, sets: Mapping[str, Any]) -> Iterator[str]:
    from basicsr.run.contradictions import contradictions
    from basicsr.utils.option_section import place_of

    found = [f'{place_of(opt, *path)}: {text}' for path, text in contradictions(opt, sets)]
    yield f'Contradictions: {len(found) or "none found"}'
    yield from (f'  {line}' for line in found)
