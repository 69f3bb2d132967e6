"""Files that are fetched, from a server on this machine: no network is needed."""

import hashlib
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from basicsr.utils import download_util
from basicsr.utils.download_util import (
    DownloadError,
    download_file_from_google_drive,
    get_confirm_token,
    load_file_from_url,
    save_response_content,
)

CONTENT = b'weights' * 10000
DIGITS = hashlib.sha256(CONTENT).hexdigest()[:8]
WARNING = """<!DOCTYPE html><html><head><title>Drive - Virus scan warning</title></head><body>
<form id="download-form" action="/download?export=download" method="get">
<input type="submit" value="Download anyway"/><input type="hidden" name="id" value="abc">
<input type="hidden" name="confirm" value="t"><input type="hidden" name="uuid" value="1-2"></form>
"""
QUOTA = '<html><head><title>Drive - Quota exceeded</title></head><body>Sorry</body></html>'
PAGE = {'Content-Type': 'text/html; charset=utf-8'}


@pytest.fixture(scope='module')
def server():
    """A server on the loopback: answers by path, and the paths that were asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append(self.path)
            status, content, headers = server.answers.get(self.path, (404, b'', {}))
            self.send_response(status)
            for name, value in ({'Content-Length': str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.url = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def serve(server, monkeypatch):
    """Set what a path is answered with; returns its address. Proxies are not asked."""
    monkeypatch.setenv('no_proxy', '*')
    monkeypatch.setattr(download_util, '_DRIVE', f'{server.url}/uc')
    server.answers, server.asked = {}, []

    def serve(path, content=CONTENT, status=200, **headers):
        headers = {name.replace('_', '-'): value for name, value in headers.items()}
        content = content if isinstance(content, bytes) else content.encode()
        server.answers[path] = (status, content, headers)
        return server.url + path

    return serve


def files_in(folder):
    return [file for file in folder.rglob('*') if file.is_file()]


# load_file_from_url


def test_a_file_arrives_whole_in_the_folder_and_under_the_name_that_are_given(
    serve, tmp_path, capsys
):
    url = serve('/v1/net.pth?raw=true')
    assert load_file_from_url(url, tmp_path / 'a' / 'b', False) == str(tmp_path / 'a/b/net.pth')
    assert load_file_from_url(url, str(tmp_path), file_name='my.pth') == str(tmp_path / 'my.pth')
    assert {file.read_bytes() for file in files_in(tmp_path)} == {CONTENT}
    shown = capsys.readouterr().err
    assert 'my.pth: 100%' in shown
    assert '70.0k/70.0k' in shown
    assert 'net.pth' not in shown


def test_the_default_folder_is_that_of_torch(serve, tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    path = load_file_from_url(serve('/net.pth'), progress=False)
    assert path == str(tmp_path / 'hub' / 'checkpoints' / 'net.pth')


@pytest.mark.parametrize('name', ['net.pth', f'net-{DIGITS}.pth', 'net-20220131.pth'])
def test_a_file_that_is_there_is_not_fetched_again(serve, server, tmp_path, name):
    (tmp_path / name).write_bytes(CONTENT)
    path = load_file_from_url(f'{server.url}/{name}', str(tmp_path))
    assert (path, server.asked) == (str(tmp_path / name), [])


@pytest.mark.parametrize(
    ('name', 'content'), [('net.pth', b''), (f'net-{DIGITS}.pth', CONTENT[:-1])]
)
def test_an_empty_or_damaged_file_is_fetched_again(serve, tmp_path, caplog, name, content):
    (tmp_path / name).write_bytes(content)
    load_file_from_url(serve(f'/{name}'), str(tmp_path), progress=False)
    assert (tmp_path / name).read_bytes() == CONTENT
    assert f'{name} is empty or damaged' in caplog.text


@pytest.mark.parametrize(
    ('name', 'answer', 'message'),
    [
        ('net.pth', {'Content_Length': '70001'}, '70000 of 70001 bytes arrived'),
        ('net.pth', {'content': b''}, '0 of some bytes arrived'),
        ('net-00abcdef.pth', {}, f'begins with {DIGITS}, not with 00abcdef as its name'),
        ('net.pth', {'content': QUOTA}, "gives a web page, 'Drive - Quota exceeded', instead"),
        ('net.pth', {'status': 503}, r'the server answers 503 \(Service Unavailable\)'),
        ('net.pth', {'status': 404}, r'answers 404 \(Not Found\). It was moved or removed'),
    ],
)
def test_what_is_not_the_whole_file_is_not_kept(serve, tmp_path, name, answer, message):
    """And what is there stays."""
    (tmp_path / name).touch()
    with pytest.raises(DownloadError, match=message) as info:
        load_file_from_url(serve(f'/{name}', **answer), str(tmp_path), progress=False)
    assert isinstance(info.value, OSError)
    assert 'cannot write' not in str(info.value)
    assert [(file.name, file.stat().st_size) for file in files_in(tmp_path)] == [(name, 0)]


def test_a_web_page_is_kept_where_it_is_asked_for(serve, tmp_path):
    load_file_from_url(serve('/page.html', QUOTA), str(tmp_path), progress=False)
    assert (tmp_path / 'page.html').read_text() == QUOTA


def test_more_than_any_file_has_is_not_kept(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(download_util, '_LARGEST', len(CONTENT) - 1)
    with pytest.raises(DownloadError, match='has more than 68.4 KB'):
        load_file_from_url(serve('/net.pth'), str(tmp_path), progress=False)
    assert files_in(tmp_path) == []


def test_without_network_an_error_says_so(server, tmp_path, monkeypatch):
    monkeypatch.setenv('no_proxy', '*')
    url = f'{server.url}/net.pth'.replace(str(server.server_port), '1')
    with pytest.raises(OSError, match=r'net.pth cannot be fetched: .*Check the connection'):
        load_file_from_url(url, str(tmp_path))


def test_a_way_out_of_https_is_not_taken(tmp_path, monkeypatch):
    answer = io.BytesIO(CONTENT)
    answer.geturl = lambda: 'http://example.org/net.pth'
    monkeypatch.setattr(download_util, 'urlopen', lambda *_, **__: answer)
    with pytest.raises(DownloadError, match='leads to http://example.org/net.pth, which is not'):
        load_file_from_url('https://example.org/net.pth', str(tmp_path))


@pytest.mark.parametrize('url', ['file:///etc/passwd', 'ftp://example.org/net.pth', '/net.pth'])
def test_only_addresses_of_the_web_are_taken(url, tmp_path):
    with pytest.raises(ValueError, match='is not an https or http URL'):
        load_file_from_url(url, str(tmp_path))


@pytest.mark.parametrize('url', ['https://example.org/', 'https://example.org/a/%2e%2e'])
def test_an_address_without_a_name_needs_one(url, tmp_path):
    with pytest.raises(ValueError, match='give one'):
        load_file_from_url(url, str(tmp_path))


# Google Drive


def test_a_small_file_of_google_drive_comes_at_once(serve, server, tmp_path):
    serve('/uc?id=abc&export=download')
    download_file_from_google_drive('abc', str(tmp_path / 'new' / f'net-{DIGITS}.pth'))
    assert (tmp_path / 'new' / f'net-{DIGITS}.pth').read_bytes() == CONTENT
    assert server.asked == ['/uc?id=abc&export=download']


def test_a_large_file_of_google_drive_is_confirmed_with_the_form(serve, server, tmp_path):
    serve('/uc?id=abc&export=download', WARNING, **PAGE)
    serve('/download?export=download&id=abc&confirm=t&uuid=1-2')
    download_file_from_google_drive('abc', tmp_path / 'net.pth')
    assert (tmp_path / 'net.pth').read_bytes() == CONTENT


@pytest.mark.parametrize('place', ['first', 'confirmed'])
def test_an_exceeded_quota_of_google_drive_is_told(serve, tmp_path, place):
    is_first = place == 'first'
    serve('/uc?id=abc&export=download', QUOTA if is_first else WARNING, **PAGE)
    serve('/download?export=download&id=abc&confirm=t&uuid=1-2', QUOTA, **PAGE)
    with pytest.raises(DownloadError, match='Quota exceeded.*download quota is exceeded'):
        download_file_from_google_drive('abc', tmp_path / 'net.pth')
    assert files_in(tmp_path) == []


def test_a_wrong_id_is_told(serve, tmp_path):
    with pytest.raises(DownloadError, match='id=gone.* 404 .*or is not shared'):
        download_file_from_google_drive('gone', tmp_path / 'net.pth')


def test_a_shared_web_page_of_google_drive_is_a_file(serve, tmp_path):
    disposition = {'Content_Disposition': 'attachment; filename="x.html"'}
    serve('/uc?id=abc&export=download', WARNING, **PAGE, **disposition)
    download_file_from_google_drive('abc', tmp_path / 'x.html')
    assert (tmp_path / 'x.html').read_text() == WARNING


# responses of requests


class OfRequests(SimpleNamespace):
    def iter_content(self, chunk_size):
        yield from (self.content[i : i + chunk_size] for i in range(0, len(self.content), 9000))


def test_a_confirmation_is_found_in_cookies_or_on_the_page():
    asked = OfRequests(cookies={'NID': 'x', 'download_warning_1': 'AbC'}, content=b'')
    assert get_confirm_token(asked) == 'AbC'
    assert get_confirm_token(OfRequests(cookies={}, content=WARNING.encode())) == 't'
    assert get_confirm_token(OfRequests(cookies={}, content=b'weights')) is None


def test_a_response_of_requests_is_saved(tmp_path):
    # Packed on its way, it has another length than the file.
    packed = {'Content-Length': '5', 'Content-Encoding': 'gzip'}
    response = OfRequests(url='https://example.org', content=CONTENT, headers=packed)
    save_response_content(response, str(tmp_path / 'x'), chunk_size=9000)
    assert (tmp_path / 'x').read_bytes() == CONTENT
    with pytest.raises(DownloadError, match='70000 of 70002 bytes'):
        save_response_content(response, str(tmp_path / 'y'), 70002, 9000)
