"""Load YAML option files safely, with the line of each key, rejecting duplicate keys.

An untrusted file cannot take much time or memory: limits on its size, its depth and the expansion
of its aliases lie far above what people write.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError
from .option_section import KeyPath

_MOST_BYTES = 2**18  # of a file: the largest published recipe has 4 kB
_DEEPEST = 40  # sections within sections
_MOST_VALUES = 50_000  # with every alias written out
_WINDOWS_PATH = re.compile(r'[A-Za-z]:.*[\t\n]', re.DOTALL)  # garbled by escapes
_BACKSLASHES = 'put a path with backslashes in single quotes, or write it with /'
_HINTS = {
    r"character '\t'": '; indent with spaces, not with tabs',
    'unknown escape character': f'; {_BACKSLASHES}',
}
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]')


class OptionError(UserError):
    """The mistakes in an option file or on the command line, one line each."""


class Loader(yaml.SafeLoader):
    """Safe YAML with the float rule of YAML 1.2 (``1e-4`` is a number), no key given twice."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _error_at(self.peek_event(), f'more than {_DEEPEST} sections within each other')
        node = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused later, as it cannot be hashed
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines and key.tag != 'tag:yaml.org,2002:merge':
                raise _error_at(
                    key, f'{key.value}: given twice, first in line {lines[name]}; remove one'
                )
            lines[name] = line
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        _check_size(node, {})
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if _CONTROL.search(node.value):
            raise _error_at(node, f'{_short(node.value)} has control characters')
        if node.style == '"' and _WINDOWS_PATH.match(node.value):
            raise _error_at(node, f'{_short(node.value)} has tabs or line breaks; {_BACKSLASHES}')
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # The text is not of the type that its tag or its first characters promise.
            kind = node.tag.rpartition(':')[2]
            raise _error_at(node, f'{_short(node.value)} is not a valid {kind}') from error
        is_infinite = (
            isinstance(value, float) and math.isinf(value) and 'inf' not in node.value.lower()
        )
        if is_infinite or (isinstance(value, int) and abs(value) >= 2**63):
            raise _error_at(node, f'the number {_short(node.value)} is too large')
        return value


def _error_at(place: Any, text: str) -> OptionError:
    """An error with the file and line of a node or event."""
    return OptionError(f'{place.start_mark.name}:{place.start_mark.line + 1}: {text}.')


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f'{text[:40]}…')


def _check_size(node: yaml.Node, known: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Number of values in a node with its aliases expanded, and its depth.

    Args:
        known: The results for nodes seen before; (0, 0) while a node is being measured.
    """
    if node in known:
        if known[node] == (0, 0):
            raise _error_at(node, 'a section contains itself')
        return known[node]
    known[node] = 0, 0
    children = [node.value] if isinstance(node, yaml.ScalarNode) else node.value
    count = depth = 0
    for child in children:
        for part in child if isinstance(child, tuple) else (child,):
            inner = _check_size(part, known) if isinstance(part, yaml.Node) else (0, 0)
            count, depth = count + inner[0], max(depth, inner[1])
    if count >= _MOST_VALUES:
        raise _error_at(node, f'more than {_MOST_VALUES} values, with the aliases in it')
    if depth >= _DEEPEST:
        raise _error_at(node, f'more than {_DEEPEST} sections within each other')
    known[node] = count + 1, depth + 1
    return known[node]


class Dumper(yaml.SafeDumper):
    """Safe YAML that keeps the order of keys, and quotes what Loader would not read as text."""


def _represent_in_order(dumper: yaml.SafeDumper, mapping: dict) -> yaml.Node:
    return dumper.represent_dict(mapping.items())


Dumper.add_representer(dict, _represent_in_order)
Dumper.add_multi_representer(dict, _represent_in_order)  # such as OrderedDict

_FLOAT = 'tag:yaml.org,2002:float'
# One table for both: resolvers added to one are known to the other.
Loader.yaml_implicit_resolvers = Dumper.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != _FLOAT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r'[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?$'
        r'|[-+]?[0-9]+[eE][-+]?[0-9]+$'
        r'|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$'
    ),
    list('-+0123456789.'),
)


def ordered_yaml() -> tuple[type, type]:
    """The (loader, dumper) classes of option files; both keep the order of keys."""
    return Loader, Dumper


def yaml_load(f: str | Path) -> dict:
    """Read an option file, or YAML text of a mapping.

    Raises:
        FileNotFoundError: ``f`` is neither a file nor text with a ``key: value``.
        OptionError: The YAML is malformed, gives a key twice, or is not a mapping.
    """
    is_text = isinstance(f, str) and ('\n' in f or ': ' in f) and not os.path.isfile(f)
    return _parse(str(f), '<text>')[0] if is_text else load_with_lines(f)[0]


def load_with_lines(file: str | Path) -> tuple[dict, dict[KeyPath, int]]:
    """The mapping of an option file, and the line of every key path in it."""
    if not Path(file).is_file():
        raise FileNotFoundError(f'no option file {file} (looked in {Path.cwd()}).')
    size = Path(file).stat().st_size
    if size > _MOST_BYTES:
        raise OptionError(
            f'{file}: {size:,} bytes are too many for an option file; at most {_MOST_BYTES:,}.'
        )
    try:
        return _parse(Path(file).read_text(encoding='utf-8'), str(file))
    except UnicodeDecodeError as error:
        raise OptionError(f'{file}: not UTF-8 text ({error}).') from None


def load_value(text: str, name: str) -> Any:
    """The value that YAML text stands for; errors as for ``yaml_load``."""
    return _read(text, name)[0]


def _parse(text: str, name: str) -> tuple[dict, dict[KeyPath, int]]:
    content, node = _read(text, name)
    if node is None or not isinstance(content, dict):
        raise OptionError(f'{name}: an option file is a mapping of keys to values.')
    return content, dict(_lines(node, ()))


def _read(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    loader = None
    try:
        loader = Loader(text)
        loader.name = name
        node = loader.get_single_node()
        return loader.construct_document(node) if node else None, node
    except yaml.reader.ReaderError as error:
        line = text.count('\n', 0, error.position) + 1
        raise OptionError(
            f'{name}:{line}: not valid YAML: special characters are not allowed.'
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        hint = next((hint for text, hint in _HINTS.items() if text in str(error.problem)), '')
        raise OptionError(f'{name}:{line}: not valid YAML: {error.problem}{hint}.') from None
    except OptionError:
        raise
    except (ValueError, OverflowError) as error:  # of PyYAML, such as for the escape \UFFFFFFFF
        line = loader.line + 1 if loader else 1
        raise OptionError(f'{name}:{line}: not valid YAML: {error}.') from None


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, str(index)), value.start_mark.line + 1
            yield from _lines(value, (*path, str(index)))
