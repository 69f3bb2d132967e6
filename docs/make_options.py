"""Write docs/options.md from the tables of the options: python docs/make_options.py"""

import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.utils import option_tables as options
from basicsr.utils.option_reference import meaning, type_text

TABLES = {
    '(top level)': options.Options,
    'datasets.train': options.TrainDatasetOptions,
    'datasets.train.progressive.*': options.StageOptions,
    'datasets.val, datasets.val_*, datasets.test, datasets.test_*': options.DatasetOptions,
    'path': options.PathOptions,
    'train': options.TrainOptions,
    'train.compile': options.CompileOptions,
    'train.swa': options.SwaOptions,
    'train.mixing': options.MixingOptions,
    'train.mixing.mixup, train.mixing.cutmix': options.MixOptions,
    'val': options.ValOptions,
    'logger': options.LoggerOptions,
    'logger.keep_best': options.BestOptions,
    'logger.wandb': options.WandbOptions,
    'dist_params': options.DistOptions,
}

HEAD = """# Option reference

This page lists the options of the runner, with types and defaults. Everything else
in an option file belongs to a component: `network_g` to the network's constructor, `optim_g` to the
optimizer, `pixel_opt` to the loss, and so on; their signatures are the reference. The keys of the
datasets are in [data.md](data.md).

*This page is made by `python docs/make_options.py`.*
"""


def reference() -> str:
    """The page, from names, types, defaults and descriptions."""
    lines = [HEAD]
    for title, table in TABLES.items():
        lines += [f'## {title}', '', '| key | type | default | meaning |', '|---|---|---|---|']
        for name, field in table.model_fields.items():
            if field.description is None:
                continue  # a section of its own
            kind = type_text(field.annotation)
            default = 'required' if field.is_required() else f'`{_default(field)}`'
            lines.append(f'| `{name}` | {kind} | {default} | {field.description} |')
        if table in (options.Options, options.PathOptions, options.TrainOptions):
            made = ('models', 'training_states', 'log', 'visualization')  # by the runner
            names = [name for name in table.also_known.split() if name not in made]
            path = () if title.startswith('(') else (title,)
            lines += [
                '',
                'Also read by the models, if given:',
                '',
                '| key | meaning |',
                '|---|---|',
            ]
            lines += [f'| `{name}` | {meaning((*path, name))} |' for name in names]
        lines.append('')
    return '\n'.join(lines)


def _default(field: FieldInfo) -> Any:
    value = field.default
    return '~' if value in (None, '') else str(value).lower() if isinstance(value, bool) else value


if __name__ == '__main__':
    Path(__file__).with_name('options.md').write_text(reference(), encoding='utf-8')
