"""The page on commands has each of them, with flags that there are and the output that there is."""

import re
import shlex
import sys

import pytest

from basicsr import cli


@pytest.fixture
def examples(page):
    """Command line and output of each example."""
    text = '\n'.join(re.findall(r'^```\n(.*?)^```$', page('docs/commands.md'), re.M | re.S))
    parts = re.split(r'^\$ basicsr ', text, flags=re.M)[1:]
    return [(shlex.split(line), output) for line, _, output in (p.partition('\n') for p in parts)]


def test_every_command_has_a_section_and_an_example(page, examples):
    headings = re.findall(r'^## (.+)$', page('docs/commands.md'), re.M)
    assert set(headings) == set(cli.COMMANDS)
    assert {arguments[0] for arguments, _ in examples} == set(cli.COMMANDS)


def test_every_example_has_flags_that_there_are(examples):
    for arguments, _ in examples:
        assert cli.parse(arguments).command == arguments[0]


def test_every_command_of_the_guide_has_flags_that_there_are(repository):
    pages = [repository / 'README.md', *(repository / 'docs').glob('*.md')]
    text = '\n'.join(page.read_text(encoding='utf-8') for page in pages)
    lines = re.findall(rf'^basicsr ((?:{"|".join(cli.COMMANDS)}) .*)$', text, re.M)
    assert len(lines) > 20
    for line in lines:
        arguments = shlex.split(line, comments=True)
        assert cli.parse(arguments).command == arguments[0]


def test_lists_and_explanations_print_what_the_page_shows(
    examples, repository, monkeypatch, capsys
):
    monkeypatch.chdir(repository)
    shown = [(a, output) for a, output in examples if a[0] in ('list', 'explain')]
    assert len(shown) == 4
    for arguments, output in shown:
        monkeypatch.setattr(sys, 'argv', ['basicsr', *arguments])
        cli.main()
        lines = capsys.readouterr().out.splitlines()
        expected = [line for line in output.splitlines() if line not in ('', '…')]
        missing = [line for line in expected if line not in lines]
        assert missing == [], arguments
