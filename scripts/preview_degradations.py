"""Show what a training with RealESRGANDataset sees: its samples, and how often what is drawn."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.data import build_dataloader, build_dataset
from basicsr.data.realesrgan_dataset import RealESRGANDataset
from basicsr.data.samplers import build_sampler
from basicsr.run.program import prepare, run
from basicsr.utils.figures import write_contact_sheet, write_histograms
from basicsr.utils.img_util import tensor2img
from basicsr.utils.misc import atomic_path
from basicsr.utils.options import OptionError
from basicsr.utils.registry import DATASET_REGISTRY
from basicsr.utils.rng import seeded

# In a recipe: the name of the kernel, and how those of the other entries end.
STEPS = {'first': ('kernel1', ''), 'second': ('kernel2', '2')}
PARAMETERS = (
    'kernel',
    'kernel size',
    'sigma [pixels]',
    'sigma across [pixels]',
    'rotation [radians]',
    'beta',
    'sinc cutoff [radians]',
    'resize factor',
    'resize mode',
    'noise',
    'Gaussian sigma [1/255]',
    'Poisson scale',
    'noise colour',
    'JPEG quality',
    'order at the end',
)


def main(args: argparse.Namespace) -> str:
    for flag, lowest in (('num', 1), ('start', 0), ('draws', 1)):
        if getattr(args, flag) < lowest:
            raise OptionError(f'--{flag} is {getattr(args, flag)}; it must be at least {lowest}.')
    opt, _ = prepare(Path.cwd())
    dataset, loader = load_training_set(opt, args.start)
    panels, rows = [], []
    for number, sample in zip(range(args.start, args.start + args.num), loader, strict=False):
        path, recipe = sample['gt_path'][0], json.loads(sample['recipe'][0])
        rows.append({'sample': number, 'gt_path': path, **recipe})
        images = {key: tensor2img([sample[key]]) for key in ('gt', 'lq')}
        title = f'{number}: {Path(path).name}'
        panels.append({'name': title, **images, 'text': describe(recipe)})

    drawn = []
    for number in range(args.start, args.start + args.draws):
        with seeded(opt['manual_seed'], number):  # as the loader does
            drawn.append(parameters(dataset.draw()[1]))

    sheet = Path(args.output or f'preview_{opt["name"]}.png')
    sheet.parent.mkdir(parents=True, exist_ok=True)
    histograms = sheet.with_name(f'{sheet.stem}_histograms.png')
    write_contact_sheet(sheet, panels)
    write_histograms(histograms, by_parameter(drawn))
    recipes = sheet.with_suffix('.jsonl')
    with atomic_path(recipes) as temporary:
        temporary.write_text(''.join(f'{json.dumps(row)}\n' for row in rows), encoding='utf-8')
    return (
        f'Samples {args.start} to {args.start + args.num - 1} of seed {opt["manual_seed"]} are in '
        f'{sheet}, their recipes in {recipes}; histograms of {args.draws} are in {histograms}.'
    )


def load_training_set(opt: dict, start: int) -> tuple[RealESRGANDataset, Any]:
    """The training set of a run, and the loader of its samples, one by one from ``start`` on."""
    dataset_opt = opt['datasets']['train']
    if not issubclass(DATASET_REGISTRY.get(dataset_opt['type']), RealESRGANDataset):
        raise OptionError(
            f'datasets.train.type is {dataset_opt["type"]}, whose images are not degraded by '
            'recipes: there is no preview but of RealESRGANDataset.'
        )
    if opt.get('share_degradation'):
        raise OptionError(
            'share_degradation: true draws for a batch as a whole, and a preview for samples: add '
            '--force_yml share_degradation=false.'
        )
    alone = {'batch_size_per_gpu': 1, 'num_worker_per_gpu': 0, 'prefetch_mode': None}
    alone |= {'progressive': None, 'degrade_on': 'worker', 'cache': 'off'}
    dataset_opt = dataset_opt | alone
    dataset, seed = build_dataset(dataset_opt), opt['manual_seed']
    sampler = build_sampler(dataset, dataset_opt, seed=seed)
    return dataset, build_dataloader(dataset, dataset_opt, 0, False, sampler, seed, start)


def parameters(recipe: dict) -> dict[str, dict[str, Any]]:
    """What was drawn for a sample and has an effect: by step, then by parameter."""
    steps = {}
    for step, (kernel, end) in STEPS.items():
        is_blurred = not end or recipe['second_blur']
        level = {'gaussian': 'Gaussian sigma [1/255]', 'poisson': 'Poisson scale'}
        steps[step] = {
            **(_of_kernel(recipe[kernel]) if is_blurred else {'kernel': 'none'}),
            'resize factor': recipe[f'resize_factor{end}'],
            'resize mode': recipe[f'resize_mode{end}'],
            'noise': recipe[f'noise{end}'],
            level[recipe[f'noise{end}']]: recipe[f'noise_level{end}'],
            'noise colour': 'gray' if recipe[f'gray_noise{end}'] else 'colour',
            'JPEG quality': recipe[f'jpeg_quality{end}'],
        }
    steps['last'] = {
        **_of_kernel(recipe['sinc_kernel']),
        'resize mode': recipe['final_resize_mode'],
        'order at the end': 'sinc, JPEG' if recipe['jpeg_last'] else 'JPEG, sinc',
    }
    return steps


def by_parameter(drawn: list[dict]) -> dict[str, dict[str, list]]:
    """The results of ``parameters`` for many samples: by parameter, then by step, the values."""
    values: dict[str, dict[str, list]] = {name: {} for name in PARAMETERS}
    for step in (*STEPS, 'last'):
        for sample in drawn:
            for name, value in sample[step].items():
                values[name].setdefault(step, []).append(value)
    return {name: series for name, series in values.items() if series}


def _of_kernel(kernel: dict) -> dict[str, Any]:
    if kernel['kind'] == 'delta':
        return {'kernel': 'none'}
    names = {'kind': 'kernel', 'kernel_size': 'kernel size', 'sig_x': 'sigma [pixels]'}
    names |= {'beta': 'beta', 'cutoff': 'sinc cutoff [radians]'}
    if not kernel.get('isotropic', True):
        names |= {'sig_y': 'sigma across [pixels]', 'theta': 'rotation [radians]'}
    return {name: kernel[key] for key, name in names.items() if key in kernel}


def describe(recipe: dict) -> str:
    """The recipe as a small table."""
    columns = []
    for step, (kernel, end) in STEPS.items():
        is_blurred = not end or recipe['second_blur']
        tone = 'gray' if recipe[f'gray_noise{end}'] else 'colour'
        columns.append(
            [
                step,
                _blur(recipe[kernel]) if is_blurred else 'none',
                f'x{recipe[f"resize_factor{end}"]:.2f} {recipe[f"resize_mode{end}"]}',
                f'{recipe[f"noise{end}"]} {recipe[f"noise_level{end}"]:.3g} {tone}',
                f'quality {recipe[f"jpeg_quality{end}"]:.0f}',
            ]
        )
    names = ['', 'blur', 'resize', 'noise', 'JPEG']
    lines = [f'{n:8}{a:29}{b}' for n, a, b in zip(names, *columns, strict=True)]
    last = [f'{recipe["final_resize_mode"]} resize', _blur(recipe['sinc_kernel'])]
    last.insert(2 if recipe['jpeg_last'] else 0, 'JPEG')
    return '\n'.join([*lines, f'{"end":8}{", ".join(last)}'])


def _blur(kernel: dict) -> str:
    if kernel['kind'] == 'delta':
        return 'no sinc'
    if kernel['kind'] == 'sinc':
        return f'sinc {kernel["cutoff"]:.2f}'
    across = '' if kernel['isotropic'] else f'x{kernel["sig_y"]:.2f}'
    return f'{kernel["kind"]} {kernel["sig_x"]:.2f}{across}'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='--force_yml changes options as it does in a training.'
    )
    parser.add_argument('-opt', required=True, help='option file of the training')
    parser.add_argument('--num', type=int, default=16, help='samples to show')
    parser.add_argument('--start', type=int, default=0, help='number of the first one')
    parser.add_argument('--draws', type=int, default=500, help='samples of the histograms')
    parser.add_argument('--output', help='PNG file of the samples; default: preview_<name>.png')
    args, rest = parser.parse_known_args()
    sys.argv[1:] = ['-opt', args.opt, *rest]
    run(lambda _: print(main(args)), Path.cwd())
