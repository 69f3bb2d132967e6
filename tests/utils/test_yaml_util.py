"""Option files from anywhere: read in little time and memory, or refused with the line."""

import time
import tracemalloc

import pytest

from basicsr.utils.yaml_util import OptionError, load_value, load_with_lines, yaml_load


def nested(first, step, levels=12):
    """Sections that each hold the one before nine times, through aliases."""
    lines = [f'a0: &a0 {first}']
    for level in range(1, levels):
        lines.append(f'a{level}: &a{level} {step.format(", ".join([f"*a{level - 1}"] * 9))}')
    return '\n'.join(lines) + '\n'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (nested('[x, x]', '[{}]'), ':6: more than 50000 values'),
        (nested('{x: 1}', '{{<<: [{}]}}'), ':6: more than 50000 values'),
        ('a: ' + '[' * 5000, ':1: more than 40 sections within each other'),
        ('a: ' + '{a: ' * 5000, ':1: more than 40 sections within each other'),
        ('- ' * 5000, ':1: more than 40 sections within each other'),
        ('a: &a {b: *a}\n', ':1: a section contains itself'),
        ('a: 1\nb: 1e999999\n', ":2: the number '1e999999' is too large"),
        ('a: 1\nb: ' + '9' * 100_000, ":2: '9{40}…' is not a valid int"),
        ('b: 0x' + 'f' * 100_000, ':1: the number .* is too large'),
        ('b: 9223372036854775808', ':1: the number .* is too large'),
        ('a: 1\nb: "\\0"\n', r":2: '\\x00' has control characters"),
        ('a: "\\e[2J"\n', r':1: .* has control characters'),
        ('a: "\\ud800"\n', r':1: .* has control characters'),
        ('"\\e": 1\n', r':1: .* has control characters'),
        ('a: "\\UFFFFFFFF"\n', ':1: not valid YAML'),
        ('a: 1\nb: x\0\n', ':2: not valid YAML: special characters are not allowed'),
        ('a:\n\tb: 1\n', ':2: not valid YAML'),
        ('a: !!int x\n', ":1: 'x' is not a valid int"),
        ('a: !!float ""\n', ":1: '' is not a valid float"),
        ('a: !!timestamp x\n', ":1: 'x' is not a valid timestamp"),
        ('a: 2026-99-99\n', ":1: '2026-99-99' is not a valid timestamp"),
        ('a: !!python/object/apply:os.getcwd []\n', ':1: not valid YAML: could not determine'),
        ('a: {x: 1, x: 2}\n', ':1: x: given twice'),
    ],
)
def test_what_would_take_long_or_much_or_cannot_be_meant_is_refused_with_its_line(
    text, message, tmp_path
):
    file = tmp_path / 'x.yml'
    file.write_text(text)
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(OptionError, match=f'^{file}{message}') as error:
        yaml_load(file)
    assert time.process_time() - begin < 3
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
    assert '\n' not in str(error.value) and len(str(error.value)) < 400


def test_a_file_much_larger_than_any_option_file_is_not_read(tmp_path):
    file = tmp_path / 'x.yml'
    with file.open('wb') as opened:
        opened.truncate(2**33)
    with pytest.raises(OptionError, match='8,589,934,592 bytes are too many for an option file'):
        load_with_lines(file)


def test_anchors_merge_keys_and_long_lists_go_on_working():
    text = 'base: &base {lr: 1e-4, betas: [0.9, 0.99]}\na: {<<: *base, lr: 2e-4}\nb: *base\n'
    base = {'lr': 1e-4, 'betas': [0.9, 0.99]}
    assert yaml_load(text) == {'base': base, 'a': base | {'lr': 2e-4}, 'b': base}
    assert load_value(f'[{", ".join(map(str, range(5000)))}]', 'x') == list(range(5000))
    assert load_value('[-.inf, 9223372036854775807, "ä\\t\\n"]', 'x') == [
        float('-inf'),
        2**63 - 1,
        'ä\t\n',
    ]


@pytest.mark.parametrize(
    ('text', 'hint'),
    [
        ('a:\n\tb: 1\n', '; indent with spaces, not with tabs'),
        ('a: "D:\\data"\n', '; put a path with backslashes in single quotes'),
        ('a: "D:\\new\\train"\n', "'D:\\\\new\\\\train' has tabs or line breaks; put a path with"),
    ],
)
def test_what_editors_and_windows_paths_do_to_yaml_comes_with_a_remedy(text, hint):
    with pytest.raises(OptionError) as error:
        yaml_load(text)
    assert hint.replace('\\\\n', '\\n').replace('\\\\t', '\\t') in str(error.value)
    assert yaml_load("a: 'D:\\new\\train'\n") == {'a': 'D:\\new\\train'}
