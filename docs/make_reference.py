"""Write docs/options.md and docs/components.md from the code: python docs/make_reference.py"""

import re
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.utils import option_tables as options
from basicsr.utils.catalogue import KINDS, Component, components
from basicsr.utils.option_reference import meaning, meaning_of_argument, type_text

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

*This page is made by `python docs/make_reference.py`.*
"""


COMPONENTS_HEAD = """# Networks, losses, metrics, datasets, models

What an option file can name as `type`, with arguments, defaults and papers. `basicsr list` prints
the same. [Extending](extending.md) adds your own.

*This page is made by `python docs/make_reference.py`.*
"""


def reference() -> str:
    """The page of the options, from names, types, defaults and descriptions."""
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


def catalogue() -> str:
    """The page of the components, from their signatures and docstrings."""
    lines = [COMPONENTS_HEAD]
    for kind in KINDS:
        lines += [f'## {kind.capitalize()}', '']
        for entry in components(kind).values():
            lines += [f'### {entry.name}', '', *_described(entry, kind), '']
    return '\n'.join(lines)


def _described(entry: Component, kind: str) -> list[str]:
    text, _, keys = entry.text.partition('\nArgs:\n')
    text = text.partition('\nAttributes:')[0]
    lines = [_plain(text)]
    lines += (
        [f'Paper: {", ".join(f"<{link}>" for link in entry.papers)}', ''] if entry.papers else []
    )
    if not entry.arguments:  # options are read from the whole section
        keys = keys.removeprefix('    opt: ').replace('\n    ', '\n')
        return [*lines, _plain(re.sub(r'^ {4}', '', keys, flags=re.MULTILINE))]
    lines += ['| argument | type | default | meaning |', '|---|---|---|---|']
    for argument in entry.arguments:
        default = 'required' if argument.default is None else f'`{argument.default}`'
        kind_of = f'`{argument.type}`'.replace('|', '\\|') if argument.type else ''
        about = _plain(meaning_of_argument(argument, kind)).strip().replace('|', '\\|')
        lines.append(f'| `{argument.name}` | {kind_of} | {default} | {about} |')
    return lines


def _plain(text: str) -> str:
    """A docstring as Markdown."""
    return text.replace('``', '`').rstrip() + '\n'


PAGES = {'options.md': reference, 'components.md': catalogue}

if __name__ == '__main__':
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page(), encoding='utf-8')
