"""Reading and trying what the documentation shows."""

import re


def blocks(text, language):
    """The fenced code blocks of a Markdown text."""
    return re.findall(rf'^```{language}\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def merge(opt, new):
    """Put the sections of ``new`` into ``opt``; one with a ``type`` is a component, taken whole."""
    for key, value in new.items():
        if isinstance(value, dict) and 'type' not in value:
            merge(opt.setdefault(key, {}), value)
        else:
            opt[key] = value


def write_plugins(text, folder):
    """Write the Python blocks that register something into files named by what that is."""
    for number, code in enumerate(blocks(text, 'python')):
        for kind in re.findall(r'^@(\w+)_REGISTRY', code, re.MULTILINE):
            (folder / f'guide{number}_{kind.lower()}.py').write_text(code)
