"""Restore and score images with a trained network: ``python basicsr/test.py -opt FILE``."""

import sys
from pathlib import Path

if __name__ == '__main__':  # Python put basicsr/ itself on the path; the package is one level up
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from basicsr.utils.openmp import spin_briefly
    from basicsr.utils.options import parse_args

    spin_briefly()
    parse_args(is_train=False)  # --help and mistyped flags are answered before torch is imported

import json
import math
from typing import Any

from basicsr.data import build_dataloader, build_dataset
from basicsr.models import build_model
from basicsr.models.preparation import warn_of_own_results
from basicsr.run.agreement import check_same_data
from basicsr.run.data_checks import try_metrics
from basicsr.run.option_checks import check_unread
from basicsr.run.program import log_setting, prepare
from basicsr.utils.dist_util import barrier, from_master
from basicsr.utils.errors import UserError
from basicsr.utils.logger import get_root_logger
from basicsr.utils.misc import atomic_path, claim_folder, get_time_str, make_exp_dirs
from basicsr.utils.text import some
from basicsr.utils.weights import describe_weights


def test_pipeline(root_path: str | Path) -> None:
    """Run every test set of the option file on the command line through the network.

    Args:
        root_path: Parent of ``results/``.

    Raises:
        ValueError: The option file names no weights without setting ``path.random_weights``, or
            some images failed; the remaining images are still written and scored.
    """
    opt, _ = prepare(root_path, is_train=False)
    path, logger = opt['path'], get_root_logger()
    log_setting(opt)

    loaders = []
    for _, dataset_opt in sorted(opt['datasets'].items()):
        dataset = build_dataset(dataset_opt)
        loaders.append(build_dataloader(dataset, dataset_opt, opt['num_gpu'], opt['dist']))
        logger.info('Number of test images in %s: %d', dataset_opt['name'], len(dataset))
    check_same_data({loader.dataset.opt['name']: loader.dataset for loader in loaders})
    model = build_model(opt)
    _check_weights(model)
    check_unread(opt)
    try_metrics(opt, loaders)
    warn_of_own_results(model)

    if opt['rank'] == 0:
        claim_folder(path['results_root'])
    make_exp_dirs(opt)  # moves earlier results aside, so only after everything has been built
    barrier()
    get_root_logger(log_file=Path(path['log']) / f'test_{opt["name"]}_{get_time_str()}.log')
    if not opt['val']['save_img']:
        logger.warning(
            'val.save_img is false: images are scored, but not written.'
            if opt['val']['metrics']
            else 'val.save_img is false, and val.metrics is empty: this test produces nothing.'
        )
    results, failed = {}, []
    for loader in loaders:
        name = loader.dataset.opt['name']
        logger.info('Testing %s...', name)
        model.validation(loader, opt['name'], None, opt['val']['save_img'])
        results[name] = {
            'metrics': dict(getattr(model, 'metric_results', {})),
            'images': getattr(model, 'image_results', {}),
            # A subclass with its own validation loop runs it on rank 0 only.
            'digest': getattr(getattr(model, 'set_records', {}).get(name), 'digest', ''),
            'failed': from_master(getattr(model, 'failed_images', {})),
        }
        failed += [f'{name}/{image} ({why})' for image, why in results[name]['failed'].items()]
    check_unread(opt, of_users=True)
    if opt['rank'] == 0:
        logger.info('%s', results_table(results))
        write_results(opt, results)
        logger.info('Results are in %s', path['results_root'])
    barrier()
    if failed:
        raise UserError(f'{len(failed)} images have no result: {some(failed)}')


def _check_weights(model: Any) -> None:
    """Refuse a network with random weights; one without weights, such as bicubic, needs none."""
    path = model.opt['path']
    net = getattr(model, 'net_g', None)
    has_weights = net is None or any(True for _ in net.parameters())
    if has_weights and not path.get('pretrain_network_g') and not path['random_weights']:
        raise UserError(
            'path.pretrain_network_g names no weights: the network would be untrained. '
            'Set it, or path.random_weights: true if that is intended.'
        )


def results_table(results: dict[str, Any]) -> str:
    """Format the scores of every set as a table with aligned columns."""
    metrics = list(dict.fromkeys(m for result in results.values() for m in result['metrics']))
    width = max([len('set'), *map(len, results)])
    lines = [f'{"set":<{width}}  images' + ''.join(f'{metric:>12}' for metric in metrics)]
    for name, result in results.items():
        scores = [result['metrics'].get(metric) for metric in metrics]
        cells = ''.join('           -' if s is None else f'{s:12.4f}' for s in scores)
        # A model with a validation loop of its own has no scores of single images.
        count = len(result['images']) if result['images'] or result.get('failed') else '-'
        lines.append(f'{name:<{width}}  {count:>6}{cells}')
    return '\n' + '\n'.join(lines)


def write_results(opt: dict, results: dict[str, Any]) -> None:
    """Write ``results.json``: scores per set and image, and how they were measured.

    Infinity and NaN, which JSON lacks, are written as null.
    """
    content = {
        'name': opt['name'],
        'network': opt.get('network_g'),
        'weights': opt['path'].get('pretrain_network_g'),
        'metric_options': opt['val']['metrics'],
        'protocol': _protocol(opt),
        'sets': results,
    }
    with atomic_path(Path(opt['path']['results_root']) / 'results.json') as temporary:
        temporary.write_text(json.dumps(_finite(content), indent=2), encoding='utf-8')


def _protocol(opt: dict) -> dict[str, Any]:
    """What scores depend on beside the metrics: for ``basicsr table``."""
    path, val = opt['path'], opt['val']
    file = path.get('pretrain_network_g')
    return {
        'scale': opt['scale'] or 1,
        'tile': val['tile'],
        'ensemble': val['self_ensemble'],
        'precision': 'float32',
        'weights': describe_weights(file, path.get('param_key_g') or 'params') if file else None,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == '__main__':
    from basicsr.run.program import run

    run(test_pipeline, Path(__file__).resolve().parents[1])
