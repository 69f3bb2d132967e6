"""Catalogue of the components that an option file can name: arguments, defaults and papers.

It is parsed from the source of this package, without importing torch.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import MissingKeyError
from .text import did_you_mean

# Folder of the package, and name of the registry, of each kind.
KINDS = {
    'networks': ('archs', 'ARCH_REGISTRY'),
    'losses': ('losses', 'LOSS_REGISTRY'),
    'metrics': ('metrics', 'METRIC_REGISTRY'),
    'datasets': ('data', 'DATASET_REGISTRY'),
    'models': ('models', 'MODEL_REGISTRY'),
}
_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_OPTIONS = {'self', 'opt', 'img', 'img2', 'optimizer', 'last_epoch'}  # given by the program
_ARGUMENT = re.compile(r' {4}([\w*]+(?:, [\w*]+)*): (.+)')

_Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Argument:
    """An option of a component.

    Attributes:
        type, default: As in the source; the default of a required argument is None.
    """

    name: str
    type: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class Component:
    """A class or function that options name by ``type``.

    Attributes:
        file: Below the package.
        text: Its docstring.
        papers: Links.
    """

    name: str
    file: str
    text: str
    papers: tuple[str, ...]
    arguments: tuple[Argument, ...]

    @property
    def summary(self) -> str:
        """The first sentences of the docstring."""
        return ' '.join(self.text.partition('\n\n')[0].replace('``', '').split())


@functools.cache
def components(kind: str) -> dict[str, Component]:
    """All components of a kind (see ``KINDS``), by name in alphabetical order."""
    folder, registry = KINDS[kind]
    found = {}
    for file, tree in _trees(folder).items():
        for node in tree.body:
            if isinstance(node, _Definition) and _is_registered(node, registry):
                found[node.name] = _component(folder, file, node)
    return dict(sorted(found.items()))


def component(kind: str, name: str) -> Component:
    """The component of a name.

    Raises:
        KeyError: There is none; the message suggests similar names.
    """
    known = components(kind)
    if name not in known:
        hint = did_you_mean(name, known)
        raise MissingKeyError(f"there is no '{name}' among the {kind}{hint}")
    return known[name]


def class_in(folder: str, name: str) -> Component | None:
    """A class in a folder of the package, registered or not, such as a scheduler; None if none."""
    if name not in _classes(folder):
        return None
    file, node = _classes(folder)[name]
    return _component(folder, file, node)


@functools.cache
def _trees(folder: str) -> dict[str, ast.Module]:
    files = sorted((_PACKAGE / folder).glob('*.py'))
    return {file.name: ast.parse(file.read_text(encoding='utf-8')) for file in files}


@functools.cache
def _classes(folder: str) -> dict[str, tuple[str, ast.ClassDef]]:
    return {
        node.name: (file, node)
        for file, tree in _trees(folder).items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


@functools.cache
def _constants(folder: str) -> dict[str, ast.expr]:
    """Module-level constants of the files in a folder, by name."""
    return {
        node.targets[0].id: node.value
        for tree in _trees(folder).values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _is_registered(node: _Definition, registry: str) -> bool:
    return any(registry in ast.unparse(decorator) for decorator in node.decorator_list)


def _component(folder: str, file: str, node: _Definition) -> Component:
    text = ast.get_docstring(node) or ''
    header = ast.get_docstring(_trees(folder)[file]) or ''
    papers = _links(text) or _links(header)
    return Component(node.name, f'{folder}/{file}', text, papers, _arguments(folder, node))


def _links(text: str) -> tuple[str, ...]:
    found = re.findall(r'https?://\S+', text)
    return tuple(dict.fromkeys(link.rstrip('.,;:)') for link in found))


def _arguments(folder: str, node: _Definition) -> tuple[Argument, ...]:
    """Arguments of a function or a constructor that options can give."""
    own = [node] if isinstance(node, ast.FunctionDef) else list(_with_bases(folder, node))
    meanings: dict[str, str] = {}
    for part in reversed(own):
        meanings |= _meanings(ast.get_docstring(part) or '')
    function = next((f for part in own if (f := _constructor(part))), None)
    arguments = (
        Argument(name, kind, default, meanings.get(name, ''))
        for name, kind, default in (_signature(folder, function) if function else ())
    )
    return tuple(argument for argument in arguments if argument.name not in _NOT_OPTIONS)


def _with_bases(folder: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """A class, then its bases in the same folder, in the order of method resolution."""
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in _classes(folder):
            yield from _with_bases(folder, _classes(folder)[base.id][1])


def _constructor(node: _Definition) -> ast.FunctionDef | None:
    if isinstance(node, ast.FunctionDef):
        return node
    methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
    return next((method for method in methods if method.name == '__init__'), None)


def _signature(folder: str, function: ast.FunctionDef) -> Iterator[tuple[str, str, str | None]]:
    """Name, type and default (None: required) of each named argument."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*required, *arguments.defaults, *arguments.kw_defaults]
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        kind = ast.unparse(argument.annotation) if argument.annotation else ''
        value = _constants(folder).get(getattr(default, 'id', ''), default)
        yield argument.arg, kind, ast.unparse(value) if value else None


def _meanings(text: str) -> dict[str, str]:
    """The description of each argument in the ``Args:`` section of a docstring."""
    section = re.split(r'\n(?=\S)', text.partition('Args:\n')[2])[0]
    found: dict[str, str] = {}
    last: list[str] = []
    for line in section.splitlines():
        if head := _ARGUMENT.match(line):
            last = head[1].replace('*', '').split(', ')
            found |= dict.fromkeys(last, head[2])
        else:
            found |= {name: f'{found[name]} {line.strip()}' for name in last}
    return {name: text.strip().replace('``', '') for name, text in found.items()}
