import io
import os
import sys

import pytest

from basicsr.utils.progress_bar import progress_bar


def test_a_bar_goes_on_when_its_reader_is_gone(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, 'stderr', os.fdopen(writer, 'w', buffering=1))
    assert list(progress_bar(range(3), disable=False, mininterval=0)) == [0, 1, 2]
    with pytest.raises(BrokenPipeError):
        os.write(writer, b'x')
    monkeypatch.setattr(sys, 'stderr', io.StringIO())


@pytest.mark.parametrize('disable', [None, False])
def test_without_standard_error_there_is_no_bar(monkeypatch, disable):
    monkeypatch.setattr(sys, 'stderr', None)
    assert list(progress_bar(range(3), disable=disable)) == [0, 1, 2]


def test_a_bar_is_drawn_on_standard_error(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', text := io.StringIO())
    list(progress_bar(range(3), disable=False, unit='image', mininterval=0))
    assert '3/3' in text.getvalue() and 'image' in text.getvalue()


def test_a_bar_is_of_blocks_where_they_can_be_printed(monkeypatch):
    for encoding, block in (('utf-8', '█'), ('ascii', '#')):
        text = io.BytesIO()
        monkeypatch.setattr(sys, 'stderr', io.TextIOWrapper(text, encoding, write_through=True))
        list(progress_bar(range(3), disable=False))
        assert block in text.getvalue().decode(encoding)
