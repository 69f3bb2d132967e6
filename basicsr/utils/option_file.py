"""Read an option file, check it as a whole, and report every problem with its line."""

import argparse
import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .option_completion import (
    as_sections,
    complete_batch,
    complete_dataset,
    complete_loading,
    complete_paths,
    complete_training,
    usable_gpus,
    what_is_best,
)
from .option_schema import Section, is_plain_name
from .option_section import KeyPath, OptionSection
from .option_tables import DatasetOptions, TestOptions, TrainingOptions
from .registry import DATASET_REGISTRY, MODEL_REGISTRY
from .yaml_util import OptionError, load_value, load_with_lines


def _force(opt: dict, entry: str, table: type[Section]) -> KeyPath:
    """Apply ``a:b:c=value``, the value read as YAML; returns the key path."""
    keys, equals, text = entry.partition('=')
    if not equals:
        raise OptionError("write it as key:subkey=value, with an '='.")
    path = tuple(keys.strip().split(':'))
    section: Any = opt
    owner: type[Section] | None = table
    for depth, key in enumerate(path[:-1]):
        inner = owner.inner(key) if owner else None
        if inner and owner and key in owner.model_fields and isinstance(section, dict):
            # A section of the runner may be absent from the file.
            section[key] = {} if section.get(key) is None else section[key]
        section = section[_find_key(section, key, path[:depth], owner)]
        owner = inner
    key, may_be_new = path[-1], owner is None or owner.has_component or owner.is_known(path[-1])
    if not (may_be_new and isinstance(section, dict)):
        key = _find_key(section, key, path[:-1], owner)
    section[key] = load_value(text, 'the value')
    return path


def _find_key(section: Any, key: str, path: KeyPath, owner: type[Section] | None) -> str | int:
    """``key`` if the section at ``path`` has it; converted to an index if that is a list."""
    where = '.'.join(path) or 'the option file'
    if isinstance(section, list):
        if re.fullmatch('-?[0-9]{1,9}', key) and -len(section) <= int(key) < len(section):
            return int(key)
        raise OptionError(f'{where} is a list of length {len(section)}; give an index.')
    if not isinstance(section, dict):
        raise OptionError(f'{where} holds no keys.')
    if key not in section:
        known = [*map(str, section), *(owner.known() if owner else ())]
        close = difflib.get_close_matches(key, known, n=1)
        if key in known:
            at = ':'.join((*path, key))
            raise OptionError(f'the file does not give {at}: set it as a whole, {at}=….')
        hint = f"; did you mean '{close[0]}'?" if close else '.'
        raise OptionError(f"{where} has no key '{key}'{hint}")
    return key


@dataclass(frozen=True)
class Process:
    """The process of a run that options are completed for.

    Attributes:
        launcher: 'none', 'pytorch' or 'slurm'.
        cores: CPU cores that this process may use.
        seed: Used if the options give none.
    """

    launcher: str
    rank: int
    world_size: int
    cores: int
    seed: int


class OptionFile:
    """Turns an option file into complete options; collects every problem with its place.

    Args:
        edit: Changes the content of the file before ``force_yml`` is applied.
    """

    def __init__(
        self,
        file: str,
        is_train: bool = True,
        force_yml: Iterable[str] = (),
        edit: Callable[[dict], dict] = lambda opt: opt,
    ):
        self.is_train = is_train
        self._file, self._table = file, TrainingOptions if is_train else TestOptions
        content, self._lines = load_with_lines(file)
        self._opt = edit(content)
        self._forced: set[KeyPath] = set()
        self._problems: list[tuple[int, str]] = []
        for entry in force_yml:
            try:
                self._forced.add(_force(self._opt, entry, self._table))
            except OptionError as error:
                self._problems.append((0, f'--force_yml {entry}: {error}'))

    def plugin_folders(self) -> list[str]:
        """The folders of ``plugins``.

        Their modules must be imported before the options are checked, because classes in them may
        know other keys.
        """
        given = self._opt.get('plugins') or []
        if not isinstance(given, list) or not all(isinstance(folder, str) for folder in given):
            return []  # refused with the other values
        return [self._plugin_folder(folder, str(i)) for i, folder in enumerate(given)]

    def _plugin_folder(self, folder: str, index: str) -> str:
        """Plug-in folders are looked up beside the option file, then in the working directory."""
        beside, here = Path(self._file).parent / folder, Path(folder)
        for candidate in (beside, here):
            if candidate.expanduser().is_dir():
                return str(candidate.expanduser().resolve())
        _, place = self._place(('plugins', index))
        raise FileNotFoundError(
            f'{place}: plugins: no folder {beside.resolve()}, nor {here.resolve()}.'
        )

    def complete(
        self, opt: dict, args: argparse.Namespace, root_path: str | Path, process: Process
    ) -> OptionSection:
        """Checked options, completed from the flags, the folders and the process.

        Args:
            opt: The result of ``checked``; completed in place.
            root_path: Parent of ``experiments/`` and ``results/``.
        """
        opt['dist'] = process.launcher != 'none'
        opt['rank'], opt['world_size'] = process.rank, process.world_size
        opt['root_path'] = str(root_path)
        opt['option_file'], opt['force_yml'] = args.opt, args.force_yml
        opt['is_train'], opt['auto_resume'] = self.is_train, args.auto_resume
        if opt['manual_seed'] is None:
            opt['manual_seed'] = process.seed
        self._check_names(opt)
        if args.debug and not opt['name'].startswith('debug'):
            opt['name'] = f'debug_{opt["name"]}'
        asked, opt['num_gpu'] = opt['num_gpu'], usable_gpus(opt['num_gpu'])
        if self.is_train:
            complete_batch(opt, asked)
            complete_training(opt, process.cores)
        for key, dataset in opt['datasets'].items():
            complete_dataset(key, dataset, opt)
            complete_loading(dataset, opt['num_gpu'])
        complete_paths(opt, Path(root_path))
        if self.is_train and opt['logger']['keep_best']:
            opt['logger']['keep_best'] = what_is_best(opt)
        return self._sections(opt)

    @property
    def table(self) -> type[Section]:
        """The table of the top level."""
        return self._table

    def origin(self, path: KeyPath) -> str:
        """Where an option comes from: 'file:line', '--force_yml' or 'default'."""
        if any(path[:length] in self._forced for length in range(1, len(path) + 1)):
            return '--force_yml'
        section: Any = self._opt
        for key in path:
            if isinstance(section, list) and key.isdigit() and int(key) < len(section):
                section = section[int(key)]
            elif isinstance(section, dict) and key in section:
                section = section[key]
            else:
                return 'default'
        return self._place(path)[1]

    def _check_names(self, opt: dict) -> None:
        sets = {key: dataset for key, dataset in opt['datasets'].items() if key != 'train'}
        names = [dataset['name'] or key for key, dataset in sets.items()]
        if len(set(names)) < len(names):
            raise OptionError(
                f'{self._file}: datasets share a name: {", ".join(names)}; change one.'
            )
        if not names and not self.is_train:
            raise OptionError(f'{self._file}: datasets: there are none to test on.')

    def _sections(self, opt: dict) -> OptionSection:
        """The completed options as sections that record which keys are read."""
        places = {path: f'{self._file}:{line}' for path, line in self._lines.items()}
        places |= dict.fromkeys(self._forced, '--force_yml')
        return as_sections(opt, self._table, places)

    def checked(self) -> dict:
        """The options with their defaults, checked; they do not depend on this process yet.

        Raises:
            OptionError: All problems, one line each.
        """
        complete: dict = {}
        self._check_spelling(self._table, self._opt)
        self._check_components()
        self._check_datasets()
        try:
            options = self._table.model_validate(self._opt)
            complete = options.model_dump()
            for path, text in options.contradictions():
                self._add(path, text)
        except ValidationError as error:
            causes = defaultdict(list)
            for cause in error.errors():
                causes[_option_path(self._opt, cause['loc'])].append(cause)
            for path, found in causes.items():
                self._add(path, _explain(found))
        self._raise_problems()
        complete['plugins'] = self.plugin_folders()
        return complete

    def _check_spelling(self, table: type[Section], section: dict, path: KeyPath = ()) -> None:
        is_strict = self._opt.get('strict_options') is not False and not self._is_users(path)
        for key, value in section.items():
            key_path, inner = (*path, str(key)), table.inner(key)
            if inner and isinstance(value, dict):
                self._check_spelling(inner, value, key_path)
            if table.names_files(str(key)) and not is_plain_name(str(key)):
                self._add(key_path, 'files are named after this key: it must be a plain name')
            if table.is_known(str(key)):
                continue
            missing = table.known() - set(section)
            close = difflib.get_close_matches(str(key), missing, n=1, cutoff=0.85)
            if close and (is_strict or table.refusal):
                self._add(key_path, f"unknown key; did you mean '{close[0]}'?")
            elif table.refusal:
                self._add(key_path, table.refusal)

    def _is_users(self, path: KeyPath) -> bool:
        """Whether a section is read by a user's class, which may know other keys."""
        if path[:1] in (('logger',), ('dist_params',)):
            return False
        if len(path) < 2 or path[0] != 'datasets':
            return MODEL_REGISTRY.is_users(self._opt.get('model_type'))
        return DATASET_REGISTRY.is_users(self._opt['datasets'][path[1]].get('type'))

    def _check_components(self) -> None:
        """Check that every section that describes a component names its type."""
        train, val = (self._opt.get(key) for key in ('train', 'val'))
        components: dict[KeyPath, Any] = {
            (str(key),): value
            for key, value in self._opt.items()
            if str(key).startswith('network_')
        }
        for key, value in train.items() if isinstance(train, dict) else ():
            if key == 'scheduler' or str(key).startswith('optim_') or str(key).endswith('_opt'):
                components['train', str(key)] = value
        metrics = val.get('metrics') if isinstance(val, dict) else None
        for key, value in metrics.items() if isinstance(metrics, dict) else ():
            components['val', 'metrics', str(key)] = value
        losses = train.get('losses') if isinstance(train, dict) else None
        if losses is not None and not isinstance(losses, list) and not self._is_users(('train',)):
            self._add(('train', 'losses'), f'needs a list, such as [{{type: L1Loss}}]: {losses!r}')
        for index, value in enumerate(losses if isinstance(losses, list) else ()):
            if not self._is_users(('train',)):
                components['train', 'losses', str(index)] = value or str(value)
        for path, value in components.items():
            is_component = isinstance(value, dict) and isinstance(value.get('type'), str)
            if value is not None and not is_component:
                self._add(path, f'needs a section with a type, got {value!r}')

    def _check_datasets(self) -> None:
        """Check what the built-in datasets do not: flags, and the section of a backend."""
        datasets = self._opt.get('datasets')
        for key, dataset in datasets.items() if isinstance(datasets, dict) else ():
            path = 'datasets', str(key)
            if not (isinstance(key, str) and isinstance(dataset, dict)) or self._is_users(path):
                continue
            for name in DatasetOptions.flags.split():
                if not isinstance(dataset.get(name), bool | None):
                    self._add((*path, name), f'must be true or false, got {dataset[name]!r}')
            backend = dataset.get('io_backend')
            if not isinstance(backend, dict | None):
                self._add((*path, 'io_backend'), f'write it as {{type: disk}}, got {backend!r}')

    def _raise_problems(self) -> None:
        if self._problems:
            raise OptionError('\n'.join(text for _, text in sorted(self._problems)))

    def _add(self, path: KeyPath, text: str) -> None:
        line, place = self._place(path)
        self._problems.append((line, f'{place}: {".".join(path)}: {text}'))

    def _place(self, path: KeyPath) -> tuple[int, str]:
        """Line number, for sorting, and place of the longest part of ``path`` that was given."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._forced:
                return 0, '--force_yml'
            if path[:length] in self._lines:
                line = self._lines[path[:length]]
                return line, f'{self._file}:{line}'
        return 0, self._file


def _option_path(section: Any, location: tuple[str | int, ...]) -> KeyPath:
    """The option at pydantic's location, which also has the types of a union at the end."""
    path: KeyPath = ()
    for part in location:
        if isinstance(section, dict):
            section = section.get(part)
        elif isinstance(section, list) and isinstance(part, int):
            section = section[part]
        else:
            break
        path += (str(part),)
    return path


def _explain(causes: list[Any]) -> str:
    """Merge all of pydantic's messages about one option into one."""
    kind, given = causes[0]['type'], causes[0]['input']
    fixed = {'missing': 'required, and not given', 'extra_forbidden': 'unknown key'}
    if kind in fixed:
        return fixed[kind]
    if kind == 'value_error':  # raised by a validator of the tables
        return f'{causes[0]["ctx"]["error"]}, got {given!r}'
    if kind == 'model_type':
        return f'must be a section of keys, got {given!r}'
    texts = (cause['msg'][0].lower() + cause['msg'][1:] for cause in causes)
    return f'{" or ".join(texts)}, got {given!r}'
