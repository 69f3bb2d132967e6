import io

import pytest

from basicsr.utils import download_util

SCRIPT = 'scripts/download_gdrive.py'


def test_a_shared_file_is_downloaded_by_its_id(script, tmp_path, monkeypatch):
    def urlopen(url, timeout):
        answer = io.BytesIO(b'weights')
        answer.headers, answer.geturl = {'Content-Length': '7'}, lambda: url
        asked.append(url)
        return answer

    asked = []
    monkeypatch.setattr(download_util, 'urlopen', urlopen)
    target = tmp_path / 'new' / 'net.pth'
    assert script(SCRIPT, '--id', 'abc', '--output', target) == (
        f'{target}: 7 bytes of the file abc.\n'
    )
    assert target.read_bytes() == b'weights'
    assert asked == ['https://drive.google.com/uc?id=abc&export=download']


def test_without_network_it_ends_in_a_message(script, tmp_path, monkeypatch, capsys):
    def urlopen(url, timeout):
        raise download_util.URLError('no route to host')

    monkeypatch.setattr(download_util, 'urlopen', urlopen)
    with pytest.raises(SystemExit) as info:
        script(SCRIPT, '--id', 'abc', '--output', tmp_path / 'net.pth')
    assert info.value.code == 1
    shown = capsys.readouterr().err
    assert 'cannot be fetched: no route to host' in shown
    assert 'Traceback' not in shown
