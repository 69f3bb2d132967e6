"""Registries: classes and functions that an option file names by ``type``.

A user's registration replaces a built-in of the same name, whichever is imported first. Built-ins
are imported on demand: a lookup that misses imports the file that defines the name, or else all
files of the registry's home package.
"""

import difflib
import importlib
import inspect
import math
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from .errors import ArgumentError, CheckError, MissingKeyError, MissingPackageError, UserError
from .text import did_you_mean

BUILDING = 'while building'  # start of the note on an error that options have caused
PLUGIN_SUFFIXES = ('_arch', '_dataset', '_loss', '_metric', '_model')

# Modules that import_plugins has imported; worker processes that start afresh import them again.
plugin_modules: list[str] = []


@contextmanager
def building(what: str) -> Iterator[None]:
    """Add a note that ``what`` was being built to errors raised in the block.

    Options of the wrong type or size make constructors fail anywhere, mostly inside torch.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f'{BUILDING} {what}')
        raise


class Registry:
    """A mapping from names to classes or functions of one kind.

    Args:
        name: Kind of the entries, for messages.
        home: Package that holds the built-in entries.
        suffix: Ending of the module names in ``home`` that register entries; '' for all of them.
        outside: ``module:function`` that finds entries of other packages by ``module:Name``.
    """

    def __init__(self, name: str, home: str | None = None, suffix: str = '', outside: str = ''):
        self._name = name
        self._home = home
        self._suffix = suffix
        self._outside = outside
        self._obj_map: dict[str, Any] = {}

    def register(self, obj: Any = None, suffix: str | None = None) -> Any:
        """Register ``obj``, or return a decorator that does.

        The stored name is ``obj.__name__``, with ``_<suffix>`` appended if a suffix is given.

        Raises:
            AssertionError: Two users' entries (or two built-ins) share a name.
        """
        if obj is None:

            def decorator(decorated: Callable) -> Callable:
                self.register(decorated, suffix)
                return decorated

            return decorator

        name = f'{obj.__name__}_{suffix}' if isinstance(suffix, str) else obj.__name__
        known = self._obj_map.get(name)
        if known is not None and not _same_definition(known, obj):
            if _is_builtin(obj) and not _is_builtin(known):
                return None  # a user's entry of this name came first and stays
            if _is_builtin(obj) == _is_builtin(known):
                raise CheckError(
                    f"An object named '{name}' was already registered in '{self._name}' registry: "
                    f'{_source_file(known)} and {_source_file(obj)} both define it; rename one.'
                )
        self._obj_map[name] = obj
        return None

    def get(self, name: str, suffix: str = 'basicsr') -> Any:
        """Return the entry called ``name``, else the one called ``<name>_<suffix>``.

        Where the registry takes classes of other packages, ``module:Class`` imports one.
        """
        if self._outside and ':' in str(name) and name not in self._obj_map:
            module, _, finder = self._outside.partition(':')
            self._obj_map[name] = getattr(importlib.import_module(module), finder)(name)
        own = re.escape(str(name).removesuffix(f'_{suffix}'))
        entry = self._registered(name, suffix)
        for content in (rf'^(class|def) {own}\b', ''):  # its own file, or else all, which is slow
            if entry is None:
                self._import_home(content)
                entry = self._registered(name, suffix)
        if entry is None:
            raise MissingKeyError(self._unknown(name, suffix))
        return entry

    def _registered(self, name: str, suffix: str) -> Any:
        return self._obj_map.get(name, self._obj_map.get(f'{name}_{suffix}'))

    def is_users(self, name: object) -> bool:
        """Whether a class or function from outside this package is registered by the name."""
        entry = self._obj_map.get(name) if isinstance(name, str) else None
        return entry is not None and not _is_builtin(entry)

    def wrong_kinds(self, opt: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Options whose values have a type that the entry cannot take, and why."""
        try:
            entry = self.get(opt['type'])
        except (KeyError, UserError):  # reported by problems()
            return
        yield from wrong_kinds(entry, opt)

    def problems(
        self, opt: Mapping[str, Any], given: Collection[str] = (), strict: bool = False
    ) -> list[str]:
        """What keeps ``build`` from calling the entry ``opt['type']`` with the other options.

        Args:
            given: Names of arguments that are not options.
            strict: Also refuse options that a class of this package accepts only to ignore them.
        """
        options = dict(opt)
        try:
            entry = self.get(options.pop('type'))
        except (KeyError, UserError) as error:
            return [error.args[0]]
        if self._name == 'metric':
            options.pop('better', None)  # read by keep_best, not by the metric
        return argument_problems(entry, options, given, strict)

    def build(self, opt: Mapping[str, Any], **given: Any) -> Any:
        """Call the entry ``opt['type']`` with the other options; ``opt`` is not modified.

        Args:
            given: Further arguments, which are not options.

        Raises:
            KeyError: ``opt`` has no type, or no entry has that name.
            TypeError: The entry does not accept one of the options, or lacks one.

        Errors of the entry have a note on what was being built.
        """
        options = deepcopy(dict(opt))
        if 'type' not in options:
            raise MissingKeyError(
                f"the options {options} have no 'type', the name of the {self._name}."
            )
        entry = self.get(options.pop('type'))
        with building(f"{self._name} '{opt['type']}' from {dict(opt)}"):
            if problems := self.problems(opt, given):
                raise ArgumentError(f'{opt["type"]}: {" ".join(problems)}')
            return entry(**given, **options)

    def __contains__(self, name: object) -> bool:
        self._import_home()
        return name in self._obj_map

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self._import_home()
        return iter(self._obj_map.items())

    def keys(self) -> Iterable[str]:
        """Names of all entries, built-in ones included."""
        self._import_home()
        return self._obj_map.keys()

    def _import_home(self, content: str = '') -> None:
        """Import the files of the built-in entries in which a pattern is found."""
        if self._home is None:
            return
        package = importlib.import_module(self._home)
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.endswith(self._suffix):
                source = Path(package.__path__[0], f'{module.name}.py')
                if re.search(content, source.read_text(encoding='utf-8'), re.MULTILINE):
                    importlib.import_module(f'{self._home}.{module.name}')

    def _unknown(self, name: str, suffix: str) -> str:
        names = sorted(key.removesuffix(f'_{suffix}') for key in self._obj_map)
        # All metrics share a prefix, which does not make them similar.
        own = {key.removeprefix('calculate_'): key for key in names}
        close = difflib.get_close_matches(str(name).removeprefix('calculate_'), own, n=3)
        hint = f' Did you mean {" or ".join(own[key] for key in close)}?' if close else ''
        package = Path(__file__).resolve().parents[1] / '__init__.py'
        return (
            f"No object named '{name}' found in '{self._name}' registry!{hint} "
            f'It knows {", ".join(names)}, with basicsr imported from {package}. To add your own, '
            f'decorate it with @{self._name.upper()}_REGISTRY.register() in a file '
            f'*_{self._name}.py and name its folder in the option file (plugins: [folder]).'
        )


def argument_problems(
    entry: Callable,
    options: Collection[str],
    given: Collection[str] = (),
    strict: bool = False,
) -> list[str]:
    """What keeps ``entry`` from being called with keyword arguments of these names.

    Args:
        options: Names that an option file gives.
        given: Names of arguments that are not options.
        strict: Also refuse options that a class of this package accepts only to ignore them.
    """
    try:
        parameters = inspect.signature(entry).parameters
    except (TypeError, ValueError):  # compiled ones may have no signature
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [n for n, p in parameters.items() if p.kind in named and n not in given]
    unknown = [key for key in options if key not in known]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        is_refused = strict and _is_builtin(entry)
        unknown = [key for key in unknown if is_refused or _is_misspelt(key, known, entry)]
    problems = [
        f"no argument '{key}'{did_you_mean(key, known)} {entry.__name__} takes "
        f'{", ".join(known) or "none"}.'
        for key in unknown
    ]
    missing = [
        name
        for name in known
        if parameters[name].default is inspect.Parameter.empty and name not in options
    ]
    return problems + [f"{entry.__name__} needs the argument '{name}'." for name in missing]


def wrong_kinds(entry: Callable, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that are not a number, boolean or list where ``entry`` takes one; and why.

    The type is that of the annotation or, for classes of this package without one, of the default.
    """
    try:
        parameters = inspect.signature(entry).parameters
    except (TypeError, ValueError):  # compiled ones may have none
        return
    for key, value in options.items():
        if key not in parameters:
            continue
        is_users = not _is_builtin(entry) and not entry.__module__.startswith('torch.')
        if is_users and (value is None or isinstance(value, bool)):
            continue  # which users' classes may take for 0 and 1, or for a default
        kind, default = parameters[key].annotation, parameters[key].default
        if kind is inspect.Parameter.empty:
            if not _is_builtin(entry) or value is None:
                continue
            kind = type(default)
        parts = _parts(kind)
        if value is None and (default is None or parts & {'bool', 'NoneType'}):
            continue
        if problem := _wrong_kind(kind, parts - {'NoneType'}, value):
            yield key, problem


def _wrong_kind(kind: Any, parts: set[str], value: Any) -> str:
    """Why a value is not the number, boolean or list that an annotation asks for, or ''."""
    if parts == {'bool'} and not (isinstance(value, bool) or value in (0, 1)):
        return f'must be true or false, got {value!r}'
    if parts and parts <= {'int', 'float'} and not _can_be_number(value):
        is_quoted = isinstance(value, str) and _is_number(value)
        quotes = ': write it without quotes' if is_quoted else ''
        return f'must be a number, got {value!r}{quotes}'
    if not parts or not parts <= {'Sequence', 'list', 'tuple'}:
        return ''
    if isinstance(value, str | dict) or not isinstance(value, Iterable):
        return f'must be a list, got {value!r}'
    inner = [_parts(part) for part in get_args(kind) if part is not Ellipsis]
    has_numbers = inner and all(part <= {'int', 'float', 'Tensor'} for part in inner)
    if has_numbers and not all(map(_can_be_number, value)):
        return f'must be a list of numbers, got {value!r}'
    return ''


def _parts(kind: Any) -> set[str]:
    """Names of the types of which a value may have any."""
    union = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    return {str(getattr(part, '__name__', part)) for part in union}


def _can_be_number(value: Any) -> bool:
    """False for option values that are not a number; a user's own objects are accepted."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return not (is_nan or value is None or isinstance(value, bool | str | dict | list))


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _is_misspelt(key: str, known: list[str], entry: Callable) -> bool:
    """Whether an argument that ends up in ``**kwargs`` of ``entry`` is a mistake.

    Metrics of this package accept them only for ``better``, SwinIR for keys in published option
    files of other versions.
    """
    if not _is_builtin(entry) or inspect.isfunction(entry):
        return _is_builtin(entry)
    return bool(difflib.get_close_matches(key, known, n=1, cutoff=0.85))


def import_name(name: str, option: str, kind: type | None = None) -> Any:
    """Import ``module:name``: a class or function of a plug-in folder or an installed package.

    Args:
        option: The key that holds ``name``, for messages.
        kind: Class that it must be a subclass of; None: it must be a function defined in Python.

    Raises:
        ValueError: It cannot be imported, or is of another kind. Modules of the standard library
            are refused: no option needs them, and some can run programs.
    """
    module, _, attribute = name.partition(':')
    if module.partition('.')[0] in sys.stdlib_module_names:
        raise UserError(
            f"{option} '{name}' is part of Python; name a {kind.__name__ if kind else 'function'} "
            'of a plug-in or an installed package.'
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"{option} '{name}' cannot be imported: {error}. Write it as module:name; the module "
            'must be installed, or in a folder of plugins.'
        ) from error
    if kind is None and not inspect.isfunction(found):
        raise UserError(f"{option} '{name}' is not a function: {found!r}.")
    if kind is not None and not (inspect.isclass(found) and issubclass(found, kind)):
        raise UserError(f"{option} '{name}' must be a subclass of {kind.__name__}: {found!r}.")
    return found


def check_known(name: object, registry: Registry) -> None:
    """Refuse to import ``module:Name`` because a file of weights says so: imports run code.

    Raises:
        ValueError: It is of another package, and has not been imported by an option file or code.
    """
    is_outside = ':' in str(name) and not str(name).startswith('spandrel:')
    if is_outside and name not in registry:
        raise UserError(
            f"a file of weights must not import '{name}'. If you trust it, give an option file "
            'with that network_g (--opt), or call build_network with it first.'
        )


def _is_builtin(obj: Any) -> bool:
    return obj.__module__.partition('.')[0] == 'basicsr'


def _source_file(obj: Any) -> str:
    try:
        return inspect.getsourcefile(obj) or obj.__module__
    except (TypeError, OSError):
        return obj.__module__


def _same_definition(a: Any, b: Any) -> bool:
    """Whether both are the same definition, imported twice (as a script and as a module, say)."""
    return a is b or (a.__qualname__ == b.__qualname__ and _source_file(a) == _source_file(b))


def import_plugins(folders: Iterable[str | Path]) -> None:
    """Import every ``*_arch.py *_dataset.py *_loss.py *_metric.py *_model.py`` of the folders.

    The folders are added to ``sys.path``, where spawned workers find the modules again.

    Raises:
        FileNotFoundError: A folder does not exist.
        ImportError: A file has the name of another module.
    """
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise FileNotFoundError(f'plugins: no folder {folder}.')
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for file in sorted(folder.glob('*.py')):
            if not file.stem.endswith(PLUGIN_SUFFIXES):
                continue
            module = importlib.import_module(file.stem)
            if Path(module.__file__ or '').resolve() != file.resolve():
                raise MissingPackageError(
                    f'plugins: {file} has the module name of {module.__file__}; rename one.'
                )
            if file.stem not in plugin_modules:
                plugin_modules.append(file.stem)


ARCH_REGISTRY = Registry(
    'arch', 'basicsr.archs', '_arch', outside='basicsr.archs.outside:network_class'
)
DATASET_REGISTRY = Registry('dataset', home='basicsr.data', suffix='_dataset')
LOSS_REGISTRY = Registry('loss', home='basicsr.losses', suffix='_loss')
METRIC_REGISTRY = Registry('metric', home='basicsr.metrics')
MODEL_REGISTRY = Registry('model', home='basicsr.models', suffix='_model')
