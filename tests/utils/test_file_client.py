import json
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from golden import params, recipe
from torch.utils.data import DataLoader, Dataset

from basicsr.data.data_util import paired_paths_from_lmdb, paths_from_lmdb
from basicsr.utils.file_client import (
    BaseStorageBackend,
    FileClient,
    LmdbBackend,
    MemcachedBackend,
)
from basicsr.utils.img_util import imfrombytes
from basicsr.utils.lmdb_util import LmdbMaker

GOLDEN = Path(recipe.__file__).parent


@pytest.fixture
def lmdb_folder(tmp_path):
    """A small database written by the reference, in a place of its own."""
    return shutil.copytree(GOLDEN / 'lmdb' / 'lq.lmdb', tmp_path / 'lq.lmdb')


# ---------------------------------------------------------------------------- disk


def test_files_are_read_as_bytes_and_as_text(tmp_path):
    (tmp_path / 'ä.txt').write_bytes('grün'.encode())
    client = FileClient()
    for path in (tmp_path / 'ä.txt', str(tmp_path / 'ä.txt')):
        assert client.get(path) == 'grün'.encode()
        assert client.get_text(path) == 'grün'
    with pytest.raises(FileNotFoundError, match='none.txt'):
        client.get(tmp_path / 'none.txt')


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'disc' is unknown; choose from disk, memcached, lmdb"):
        FileClient('disc')


def test_dependents_may_add_backends(tmp_path):
    class Upper(BaseStorageBackend):
        def get(self, filepath):
            return filepath.upper()

    class MyClient(FileClient):
        _backends = {**FileClient._backends, 'upper': Upper}  # noqa: RUF012 (as the class does)

    client = MyClient('upper')
    assert client.get('x') == 'X'
    with pytest.raises(NotImplementedError, match='Upper cannot read texts'):
        client.get_text('x')
    (tmp_path / 'x').write_bytes(b'on the disk')
    assert MyClient('disk').get(tmp_path / 'x') == b'on the disk'


# ---------------------------------------------------------------------------- lmdb


@pytest.mark.parametrize('case', params('data', lambda c: c['kind'] == 'lmdb_read'))
def test_databases_of_the_reference_are_read(case, tmp_path, monkeypatch):
    for name, source in case['lmdb'].items():
        shutil.copytree(GOLDEN / source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    folders = list(case['lmdb'])
    client = FileClient('lmdb', db_paths=folders, client_keys=['c0', 'c1'])
    keys = paths_from_lmdb(folders[0])
    images = {f'{k}:{c}': imfrombytes(client.get(k, c)) for k in keys for c in ('c0', 'c1')}
    pairs = json.dumps(paired_paths_from_lmdb(folders, ['lq', 'gt']))
    output = {'keys': '\n'.join(keys), 'images': images, 'pairs': pairs}
    assert recipe.compare(case, output) is None


def test_a_key_that_is_missing_is_none(lmdb_folder):
    client = FileClient('lmdb', db_paths=str(lmdb_folder))
    assert client.get('baby') == client.get(Path('baby'))
    assert client.get('none') is None


def test_what_an_lmdb_cannot_do_is_said(lmdb_folder, tmp_path):
    client = FileClient('lmdb', db_paths=[str(lmdb_folder)], client_keys=['lq'])
    with pytest.raises(KeyError, match="client_key 'gt' is not one of .'lq'"):
        client.get('baby', 'gt')
    with pytest.raises(NotImplementedError, match='LmdbBackend cannot read texts'):
        client.get_text('baby')
    with pytest.raises(ValueError, match='2 db_paths need as many client_keys'):
        LmdbBackend([str(lmdb_folder)] * 2, 'lq')
    with pytest.raises(FileNotFoundError, match=f'no LMDB at {tmp_path}/none.lmdb'):
        LmdbBackend(tmp_path / 'none.lmdb')


def test_a_database_may_be_open_in_several_clients_at_once(lmdb_folder, monkeypatch):
    """Lmdb itself opens a database once per process, however its path is written."""
    monkeypatch.chdir(lmdb_folder.parent)
    roundabout = f'../{lmdb_folder.parent.name}/lq.lmdb'
    spellings = [lmdb_folder, str(lmdb_folder), 'lq.lmdb', './lq.lmdb', roundabout]
    values = {FileClient('lmdb', db_paths=path).get('baby') for path in spellings}
    assert len(values) == 1
    assert None not in values


def test_a_database_that_was_made_anew_at_the_same_path_is_opened_anew(tmp_path):
    def write(value):
        maker = LmdbMaker(tmp_path / 'x.lmdb', map_size=2**20)
        maker.put(value, 'key', (1, 1, 3))
        maker.close()
        return FileClient('lmdb', db_paths=tmp_path / 'x.lmdb')

    former = write(b'former')
    assert former.get('key') == b'former'
    shutil.rmtree(tmp_path / 'x.lmdb')
    assert former.get('key') == b'former'  # as with any file that is open
    latter = write(b'latter')
    assert latter.get('key') == b'latter'
    assert former.get('key') == b'latter'


class KeyDataset(Dataset):
    def __init__(self, folder):
        self.client = FileClient('lmdb', db_paths=folder)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return len(self.client.get(('baby', 'z')[index % 2]))


def test_a_client_that_was_used_travels_to_workers(lmdb_folder):
    dataset = KeyDataset(lmdb_folder)
    expected = [dataset[index] for index in range(4)]
    again = pickle.loads(pickle.dumps(dataset))  # what spawned workers get
    assert [again[index] for index in range(4)] == expected
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context='fork')
    assert list(loader) == expected


def test_keys_may_have_any_letters_and_dots(tmp_path):
    maker = LmdbMaker(tmp_path / 'x.lmdb', map_size=2**20)
    for key in ('bäume/図', 'img.v1_a', 'img.v1_b'):
        maker.put(key.encode(), key, (1, 1, 3))
    maker.close()
    client = FileClient('lmdb', db_paths=tmp_path / 'x.lmdb')
    keys = paths_from_lmdb(str(tmp_path / 'x.lmdb'))
    assert sorted(keys) == ['bäume/図', 'img.v1_a', 'img.v1_b']
    assert [client.get(key) for key in keys] == [key.encode() for key in keys]


def test_a_missing_lmdb_package_is_named(lmdb_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lmdb', None)
    with pytest.raises(ImportError, match='pip install lmdb'):
        FileClient('lmdb', db_paths=lmdb_folder).get('baby')


# ---------------------------------------------------------------------------- memcached


def test_memcached_goes_through_the_package_of_the_cluster(monkeypatch):
    class Client:
        @staticmethod
        def GetInstance(servers, config):
            return Client() if (servers, config) == ('servers', 'client') else None

        def Get(self, key, value):
            value.append(f'value of {key}'.encode())

    fake = SimpleNamespace(
        MemcachedClient=Client, pyvector=list, ConvertBuffer=lambda v: memoryview(v[0])
    )
    monkeypatch.setitem(sys.modules, 'mc', fake)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    client = FileClient(
        'memcached', server_list_cfg='servers', client_cfg='client', sys_path='/opt/mc'
    )
    assert bytes(client.get(Path('a/b'))) == b'value of a/b'
    assert sys.path[-1] == '/opt/mc'


def test_a_missing_memcached_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mc', None)
    with pytest.raises(ImportError, match=r'needs the package mc .*sys_path'):
        MemcachedBackend('servers', 'client')
