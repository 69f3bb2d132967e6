"""Every command that the guide shows has flags and files that there are."""

import re
import shlex

import pytest
from guide import blocks

from basicsr import cli
from basicsr.utils.options import parse_args


@pytest.fixture
def commands(repository):
    """The command lines of all pages."""
    pages = [repository / 'README.md', *sorted((repository / 'docs').glob('*.md'))]
    pages += [repository / 'options/README.md', *sorted((repository / 'options').rglob('*.yml'))]
    found = []
    for file in pages:
        text = file.read_text(encoding='utf-8')
        if file.suffix == '.yml':
            texts = re.findall(r'^#   (.+)$', text, re.MULTILINE)
        else:
            texts = blocks(text, '')
        lines = '\n'.join(texts).replace('\\\n', ' ').splitlines()
        found += [(file.name, line) for line in lines]
    return found


def arguments_of(line, program):
    """What follows a program in a command line; None for other lines."""
    if not re.match(rf'(\$ )?(\S+ )*{program} ', line):
        return None
    words = shlex.split(line.removeprefix('$ ').partition(' && ')[0], comments=True)
    return words[words.index(program) + 1 :] if program in words else None


@pytest.mark.parametrize('program', ['train', 'test'])
def test_trainings_and_tests_have_option_files_and_flags(commands, repository, program):
    count = 0
    for page, line in commands:
        arguments = arguments_of(line, f'basicsr/{program}.py')
        if arguments is None:
            continue
        args = parse_args(arguments, is_train=program == 'train')
        is_example = args.opt.startswith(('options/x', 'x.yml', 'experiments/'))
        assert is_example or (repository / args.opt).exists(), f'{page}: {line}'
        count += 1
    assert count >= (40 if program == 'train' else 5)


def test_sub_commands_have_flags(commands):
    count = 0
    for page, line in commands:
        if re.match(r'(\$ )?basicsr [a-z-]+ ', line) and '…' not in line:
            arguments = arguments_of(line, 'basicsr')
            assert cli.parse(arguments).command in (*cli.COMMANDS, 'infer'), f'{page}: {line}'
            count += 1
    assert count > 25
