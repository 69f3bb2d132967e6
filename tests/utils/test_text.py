"""Words for messages."""

from basicsr.utils.logger import get_root_logger
from basicsr.utils.text import printable


def test_what_a_terminal_would_obey_is_written_out():
    assert printable('a\tb\nä 猫') == 'a\tb\nä 猫'
    assert printable('\x1b[2J\x07\r\x9b\x7f\u202e\ud800') == (
        '\\x1b[2J\\x07\\r\\x9b\\x7f\\u202e\\ud800'
    )


def test_log_lines_do_not_act_on_the_terminal(tmp_path, capsys):
    get_root_logger(log_file=tmp_path / 'x.log').warning('cannot read %s', '\x1b[2Jx.png')
    for text in (capsys.readouterr().err, (tmp_path / 'x.log').read_text()):
        assert 'cannot read \\x1b[2Jx.png' in text and '\x1b' not in text
