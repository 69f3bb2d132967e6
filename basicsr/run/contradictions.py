"""Find options that are valid by themselves but do not fit together, before a training starts."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from basicsr.data.progressive import crop_sizes
from basicsr.utils.text import some

from .explanation import argument

Problem = tuple[tuple[str, ...], str]  # key path, and what is wrong

_WITH_BORDER = ('calculate_psnr', 'calculate_ssim', 'calculate_psnr_pt', 'calculate_ssim_pt')


def contradictions(opt: Mapping[str, Any], datasets: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the key path and text of each contradiction.

    Args:
        opt: Complete options of a training.
        datasets: Datasets by key; an error in place of one that cannot be built.
    """
    yield from _of_lengths(opt)
    yield from _of_schedule(opt)
    yield from _of_sizes(opt)
    yield from _of_metrics(opt)
    yield from _of_files(opt)
    yield from _of_images(opt, datasets)


def _of_lengths(opt: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that would take effect only after the end of the run."""
    train, total = opt['train'], opt['train']['total_iter']
    lengths: dict[tuple[str, ...], tuple[int | None, str]] = {
        ('train', 'warmup_iter'): (train['warmup_iter'], 'the warm-up never ends'),
        ('val', 'val_freq'): ((opt['val'] or {}).get('val_freq'), 'only the end is validated'),
        ('logger', 'save_checkpoint_freq'): (
            opt['logger']['save_checkpoint_freq'],
            'there is no checkpoint before the end',
        ),
        ('logger', 'print_freq'): (opt['logger']['print_freq'], 'no losses are logged'),
        ('train', 'net_d_init_iters'): (
            (train.get('net_d_init_iters') or 0) + 1,
            'the generator is never trained',
        ),
    }
    for path, (length, then) in lengths.items():
        if length is not None and length > total:
            given = length - (path[-1] == 'net_d_init_iters')
            yield path, f'{given} is not within total_iter {total}: {then}'
    for index, rule in enumerate(train['freeze'] or ()):
        if rule['until'] >= total:
            where = 'train', 'freeze', str(index), 'until'
            yield where, f'{rule["until"]} is the end (total_iter {total}): never trained'
    start = (train['swa'] or {}).get('start', 0)
    if start >= 1 and start > total:
        yield ('train', 'swa', 'start'), f'{start} is after total_iter {total}: nothing is averaged'
    decay = train['ema_decay']
    if decay and not train['ema_warmup'] and 1 / (1 - decay) > total:
        yield (
            ('train', 'ema_decay'),
            f'{decay} averages over about {1 / (1 - decay):.0f} iterations, and the run has '
            f'{total}: the average is near the first weights (ema_warmup: true helps)',
        )


def _of_schedule(opt: Mapping[str, Any]) -> Iterator[Problem]:
    options, total = opt['train'].get('scheduler') or {}, opt['train']['total_iter']
    for key in ('milestones', 'restarts'):
        late = [m for m in options.get(key) or () if m > total]  # at the end: constant, on purpose
        if late:
            listed = some(list(map(str, late)))
            yield ('train', 'scheduler', key), f'{listed}: after the end, total_iter {total}'
    length = sum(options.get('periods') or ())
    if length and length != total:
        then = 'the last rates stay at eta_min' if length < total else 'eta_min is not reached'
        where = 'train', 'scheduler', 'periods'
        yield where, f'{length} iterations together, and total_iter is {total}: {then}'
    steps = options.get('T_max') if options.get('type') == 'CosineAnnealingLR' else None
    if steps and steps != total:
        then = 'the rate rises again' if steps < total else 'the lowest rate is not reached'
        yield ('train', 'scheduler', 'T_max'), f'{steps}, and total_iter is {total}: {then}'


def _of_sizes(opt: Mapping[str, Any]) -> Iterator[Problem]:
    scale, network = opt['scale'] or 1, opt.get('network_g') or {}
    own = 'gt_size' in opt and 'gt_size' not in opt['datasets']['train']
    path = ('gt_size',) if own else ('datasets', 'train', 'gt_size')
    if opt['datasets']['train'].get('progressive'):
        path = 'datasets', 'train', 'progressive'
    sizes = crop_sizes(opt['datasets']['train']) or [opt.get('gt_size')]
    window = argument(network, 'window_size') if 'type' in network else None
    for size in filter(None, sizes):
        if size % scale:
            yield path, f'{size} is not a multiple of scale {scale}'
        elif isinstance(window, int) and size % (window * scale):
            near = size // (window * scale) * window * scale or window * scale
            yield (
                path,
                f'{size} is not a multiple of {window * scale}, window_size {window} times scale '
                f'{scale}: crops are padded; {near} is one',
            )
    for name in ('upscale', 'scale'):
        factor = argument(network, name) if 'type' in network else None
        if isinstance(factor, int) and factor != scale and network.get('upsampler', None) != '':
            yield ('network_g', name), f'{factor}, and the scale of the file is {scale}'


def _of_metrics(opt: Mapping[str, Any]) -> Iterator[Problem]:
    scale, val = opt['scale'] or 1, opt['val'] or {}
    for name, options in (val.get('metrics') or {}).items():
        border = options.get('crop_border')
        if options['type'] in _WITH_BORDER and border is not None and scale > 1 and border != scale:
            where = 'val', 'metrics', name, 'crop_border'
            yield where, f'{border}, and published numbers leave out scale = {scale} pixels'
    has_sets = any(options['phase'] == 'val' for options in opt['datasets'].values())
    if has_sets and not opt['val']:
        yield ('datasets',), 'there are validation sets, and no section val: nothing is validated'
    if opt['val'] and not has_sets:
        yield ('val',), 'there is no validation set: nothing is validated'
    if has_sets and opt['val'] and not val.get('metrics'):
        yield ('val', 'metrics'), 'there are none: validations give images without scores'


def _of_files(opt: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in opt['path'].items():
        is_file = key.startswith('pretrain_network_') or key == 'resume_state'
        if is_file and isinstance(value, str) and not Path(value).is_file():
            yield ('path', key), f'there is no file {value}'


def _of_images(opt: Mapping[str, Any], datasets: Mapping[str, Any]) -> Iterator[Problem]:
    """Images that are used both in training and in validation."""
    trained = _images(opt, datasets, 'train')
    for key in datasets:
        shared = sorted(_images(opt, datasets, key) & trained) if key != 'train' else []
        if shared:
            yield ('datasets', key), f'{len(shared)} images are also trained on: {some(shared, 3)}'


def _images(opt: Mapping[str, Any], datasets: Mapping[str, Any], key: str) -> set[str]:
    """The files of a set, with links resolved; empty if its images are not files."""
    options = opt['datasets'].get(key) or {}
    if (options.get('io_backend') or {}).get('type', 'disk') != 'disk':
        return set()
    found = set()
    sets = [datasets[key]]
    for dataset in sets:
        sets += getattr(dataset, 'parts', [])
        for item in getattr(dataset, 'paths', ()):
            paths = item.values() if isinstance(item, dict) else [item]
            found |= {os.path.realpath(path) for path in paths}
    return found
