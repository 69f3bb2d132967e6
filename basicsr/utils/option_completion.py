"""Complete checked options: what follows from other options, the folders and the process."""

import logging
import math
import os
from pathlib import Path

from .option_schema import Section
from .option_section import KeyPath, OptionSection
from .option_tables import DEGRADATION_OPTIONS
from .yaml_util import OptionError

logger = logging.getLogger(__name__)


def as_sections(
    content: dict, table: type[Section], places: dict[KeyPath, str], path: KeyPath = ()
) -> OptionSection:
    sections = {
        key: as_sections(value, inner, places, (*path, key))
        if (inner := table.inner(key)) and isinstance(value, dict)
        else value
        for key, value in content.items()
    }
    return OptionSection(sections, places, path)


def usable_gpus(num_gpu: int | str | None) -> int:
    import torch

    available = torch.cuda.device_count()
    if num_gpu is None:
        return min(1, available)
    if num_gpu == 'auto':
        return available
    if int(num_gpu) > available:
        logger.warning(
            'num_gpu is %s, but torch sees %d CUDA devices: running on %s.',
            num_gpu,
            available,
            f'{available} of them' if available else 'the CPU',
        )
    return min(int(num_gpu), available)


def complete_batch(opt: dict, asked: int | str | None) -> None:
    """Divide the batch among the GPUs, and log where it differs from the option file.

    Args:
        asked: The option ``num_gpu``.
    """
    train_set = opt['datasets']['train']
    gpus = opt['world_size'] if opt['dist'] else max(opt['num_gpu'], 1)
    own, total = train_set['batch_size_per_gpu'], train_set['batch_size_total']
    if total is None:
        if isinstance(asked, int) and asked not in (0, gpus):
            logger.warning(
                'The option file has num_gpu: %d, and this run trains on %d: %d samples per '
                'iteration instead of %d. datasets.train.batch_size_total: %d keeps the total.',
                *(asked, gpus, own * gpus, own * asked, own * asked),
            )
        return
    if total % gpus:
        raise OptionError(
            f'datasets.train.batch_size_total: {total} samples cannot be divided evenly among '
            f'{gpus} GPUs or processes.'
        )
    train_set['batch_size_per_gpu'] = total // gpus
    opt['train']['accumulate'] *= max(math.ceil(total / gpus / own), 1)
    logger.info(
        'batch_size_total %d: %d samples on each of %d, in %d micro-batches.',
        *(total, total // gpus, gpus, opt['train']['accumulate']),
    )


def complete_training(opt: dict, cores: int) -> None:
    train_set = opt['datasets']['train']
    if train_set['num_worker_per_gpu'] is None:
        train_set['num_worker_per_gpu'] = min(4, cores)
    if 'debug' in opt['name']:
        opt['logger'].update(print_freq=1, save_checkpoint_freq=8)
        if opt['val']:
            opt['val']['val_freq'] = 8


def complete_dataset(key: str, dataset: dict, opt: dict) -> None:
    dataset['phase'] = key.partition('_')[0]
    dataset['name'] = dataset['name'] or key
    if opt['scale'] is not None:
        dataset['scale'] = opt['scale']
    if key == 'train':
        for name in DEGRADATION_OPTIONS.split():
            if name in opt:
                dataset.setdefault(name, opt[name])
    _expand_roots(dataset)
    for part in dataset.get('parts') or ():  # of a ConcatDataset
        _expand_roots(part)


def _expand_roots(dataset: dict) -> None:
    for root in ('dataroot_gt', 'dataroot_lq'):
        if isinstance(dataset.get(root), str):
            dataset[root] = os.path.expanduser(dataset[root])
        elif isinstance(dataset.get(root), list) and all(isinstance(f, str) for f in dataset[root]):
            dataset[root] = [os.path.expanduser(folder) for folder in dataset[root]]


def complete_loading(dataset: dict, num_gpu: int) -> None:
    """Choose how batches are transferred, if the file does not say."""
    if dataset['pin_memory'] is None:
        dataset['pin_memory'] = num_gpu > 0
    if dataset['phase'] == 'train' and dataset['prefetch_mode'] is None:
        if num_gpu > 0 and dataset['pin_memory']:
            dataset['prefetch_mode'] = 'cuda'
        elif dataset['num_worker_per_gpu'] > 0:
            dataset['prefetch_mode'] = 'cpu'


def complete_paths(opt: dict, root: Path) -> None:
    path = opt['path']
    for key, value in path.items():
        if isinstance(value, str) and ('resume_state' in key or 'pretrain_network' in key):
            path[key] = os.path.expanduser(value)
    if opt['is_train']:
        folder = Path(path['experiments_root'] or root / 'experiments').expanduser() / opt['name']
        path['experiments_root'] = str(folder)
        path['models'] = str(folder / 'models')
        path['training_states'] = str(folder / 'training_states')
    else:
        for key in ('models', 'training_states'):  # of training runs; unused here
            path.pop(key, None)
        folder = Path(path['results_root'] or root / 'results').expanduser() / opt['name']
        path['results_root'] = str(folder)
    in_the_way = next((f for f in (folder, *folder.parents) if f.exists()), folder)
    if not in_the_way.is_dir() and os.path.lexists(in_the_way):
        raise OptionError(f'{in_the_way} is not a folder: results go to {folder}; choose another.')
    path['log'] = str(folder)
    path['visualization'] = str(folder / 'visualization')


def what_is_best(opt: dict) -> dict[str, str]:
    """``logger.keep_best`` as a metric and a validation set; the first of each if not given."""
    given = opt['logger']['keep_best']
    given = {} if given is True else given
    sets = [dataset['name'] for dataset in opt['datasets'].values() if dataset['phase'] == 'val']
    metric = given.get('metric') or next(iter(opt['val']['metrics']))
    return {'metric': metric, 'dataset': given.get('dataset') or sets[0]}
