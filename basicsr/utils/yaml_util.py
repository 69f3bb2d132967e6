"""Option files as YAML: read safely, each key with its line, nothing given twice."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str, ...]


class OptionError(ValueError):
    """What is wrong with an option file or the command line, one line per problem."""


class Loader(yaml.SafeLoader):
    """Safe YAML with the float rule of YAML 1.2 (``1e-4`` is a number), no key given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, (key.tag, str(key.value))
            if name in lines and key.tag != 'tag:yaml.org,2002:merge':
                raise OptionError(
                    f'{key.start_mark.name}:{line}: {key.value}: given twice, first in line '
                    f'{lines[name]}; remove one.'
                )
            lines[name] = line
        return node


class Dumper(yaml.SafeDumper):
    """Safe YAML that keeps the order of keys, and quotes what Loader would not read as text."""


def _represent_in_order(dumper: yaml.SafeDumper, mapping: dict) -> yaml.Node:
    return dumper.represent_dict(mapping.items())


Dumper.add_representer(dict, _represent_in_order)
Dumper.add_multi_representer(dict, _represent_in_order)  # such as OrderedDict

_FLOAT = 'tag:yaml.org,2002:float'
# One table for both: what is added to the one is known to the other.
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
    try:
        return _parse(Path(file).read_text(encoding='utf-8'), str(file))
    except UnicodeDecodeError as error:
        raise OptionError(f'{file}: not UTF-8 text ({error}).') from None


def _parse(text: str, name: str) -> tuple[dict, dict[KeyPath, int]]:
    try:
        loader = Loader(text)
        loader.name = name
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise OptionError(f'{name}:{line}: not valid YAML: {error.problem}.') from None
    except yaml.YAMLError as error:
        raise OptionError(f'{name}: not valid YAML: {" ".join(str(error).split())}') from None
    if node is None or not isinstance(content, dict):
        raise OptionError(f'{name}: an option file is a mapping of keys to values.')
    return content, dict(_lines(node, ()))


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, str(index)), value.start_mark.line + 1
            yield from _lines(value, (*path, str(index)))
