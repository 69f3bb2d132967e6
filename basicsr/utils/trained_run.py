"""Test a trained run by its own option file: on its validation sets, with its own weights."""

import os
from pathlib import Path
from typing import Any

from .errors import UserError

# The top-level options of a test, besides its networks.
_KEPT = (
    *('name', 'model_type', 'scale', 'num_gpu', 'manual_seed', 'deterministic'),
    *('strict_options', 'plugins', 'val', 'dist_params'),
)
_WEIGHTS = {'best': ('best',), 'last': ('latest',), None: ('best', 'latest')}


def option_file_in(path: str | Path) -> str:
    """``path`` itself or, if it is a run folder, the newest option file in it.

    Raises:
        FileNotFoundError: There is none in the folder.
    """
    if not Path(path).is_dir():
        return str(path)
    files = sorted(Path(path).glob('[!.]*.yml'), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f'{path} is not a run folder: it has no option file.')
    return str(files[-1])


def as_test(opt: dict, option_file: str, root: str | Path, weights: str | None) -> dict:
    """Turn the options of a training into those of a test of it; a test's are left unchanged.

    The datasets are those of its validation. The weights are those of the run: in the folder that
    the file lies in, else in ``experiments/<name>``. Results are saved.

    Args:
        opt: Content of the option file.
        root: Parent of ``experiments/``.
        weights: 'best' or 'last'; None: the best, if the run kept it.

    Raises:
        FileNotFoundError: The run has no such weights.
        ValueError: ``weights`` is given, and the file is not that of a training.
    """
    train, sets = opt.get('train'), opt.get('datasets')
    if not (isinstance(train, dict) and isinstance(sets, dict) and 'train' in sets):
        if weights:
            raise UserError(
                f'--weights selects weights of a training, but {option_file} describes a test: set '
                'path.pretrain_network_g.'
            )
        return opt
    path, name = opt.get('path') or {}, opt.get('name')
    folder = Path(option_file).resolve().parent
    if not (folder / 'models').is_dir():
        folder = Path(path.get('experiments_root') or Path(root, 'experiments')).expanduser()
        folder /= str(name)
    own_path: dict[str, Any] = {
        key: path[key] for key in ('results_root',) if path.get(key) is not None
    }
    networks = [key for key in opt if key.startswith('network_') and key != 'network_d']
    for network in networks:
        label = network.removeprefix('network_')
        own_path[f'pretrain_{network}'] = _file_of(folder / 'models', label, weights)
        own_path[f'param_key_{label}'] = 'params_ema' if train.get('ema_decay') else 'params'
    test = {key: opt[key] for key in (*_KEPT, *networks) if key in opt}
    test['path'] = own_path
    test['datasets'] = {key: value for key, value in sets.items() if key != 'train'}
    own_val = test.get('val') or {}
    if isinstance(own_val, dict):
        test['val'] = {k: v for k, v in own_val.items() if k != 'val_freq'} | {'save_img': True}
    return test


def _file_of(models: Path, label: str, weights: str | None) -> str:
    """The file of a network of a run."""
    wanted = [
        models / f'net_{label}_{ending}{suffix}'
        for ending in _WEIGHTS[weights]
        for suffix in ('.pth', '.safetensors')
    ]
    if weights != 'best':  # of a run that has not ended
        saved = [f for f in models.glob(f'net_{label}_*') if f.stem.rpartition('_')[2].isdigit()]
        wanted += sorted(saved, key=lambda file: -int(file.stem.rpartition('_')[2]))
    for file in wanted:
        if file.is_file():
            return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
    reason = 'logger.keep_best writes it' if weights == 'best' else 'the option file is a training'
    raise FileNotFoundError(f'{models} has no net_{label}_{weights or "latest"}: {reason}.')
