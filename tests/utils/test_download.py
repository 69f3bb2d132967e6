"""Files that are fetched; no network is needed."""

import hashlib
import io
from urllib.error import URLError

import pytest

from basicsr.utils import download as module
from basicsr.utils.download import download

CONTENT = b'weights' * 1000
DIGITS = hashlib.sha256(CONTENT).hexdigest()[:8]
URL = f'https://example.org/net-{DIGITS}.pth'


class Answer(io.BytesIO):
    url = URL

    @property
    def headers(self):
        return {'Content-Length': str(len(CONTENT))}

    def geturl(self):
        return self.url


@pytest.fixture
def answer(monkeypatch):
    """What comes back."""
    answer = Answer(CONTENT)
    monkeypatch.setattr(module, 'urlopen', lambda url: answer)
    return answer


def test_a_file_arrives_whole(answer, tmp_path, capsys):
    download(URL, tmp_path / 'cache/net.pth', show_progress=False)
    assert (tmp_path / 'cache/net.pth').read_bytes() == CONTENT
    assert capsys.readouterr().err == ''


def no_file(tmp_path):
    return not any(file.is_file() for file in tmp_path.rglob('*'))


def test_another_content_is_not_kept(answer, tmp_path):
    with pytest.raises(OSError, match=f'begins with {DIGITS}, not 00000000'):
        download('https://example.org/net-00000000.pth', tmp_path / 'net.pth')
    assert no_file(tmp_path)


def test_too_much_is_not_kept(answer, tmp_path, monkeypatch):
    """Whatever length was told."""
    monkeypatch.setattr(module, '_LARGEST', len(CONTENT) - 1)
    monkeypatch.setattr(module, '_BLOCK', 100)
    with pytest.raises(OSError, match='it has more than 6.8 KB'):
        download(URL, tmp_path / 'net.pth')
    assert no_file(tmp_path)


def test_a_way_out_of_https_is_not_taken(answer, tmp_path):
    answer.url = 'http://example.org/net'
    with pytest.raises(OSError, match='leads to http://example.org/net, which is not https'):
        download(URL, tmp_path / 'net.pth')
    assert no_file(tmp_path)


@pytest.mark.parametrize('url', [f'http://example.org/net-{DIGITS}.pth', 'https://a.org/net.pth'])
def test_an_address_without_https_or_checksum_is_refused(url, tmp_path):
    with pytest.raises(ValueError, match='is no address of https with a checksum'):
        download(url, tmp_path / 'net.pth')


def test_no_network_is_an_error_that_names_the_file(monkeypatch, tmp_path):
    def offline(url):
        raise URLError('no route to host')

    monkeypatch.setattr(module, 'urlopen', offline)
    with pytest.raises(OSError, match='cannot write .*net.pth.*no route to host'):
        download(URL, tmp_path / 'net.pth')
