import hashlib

import pytest
import torch

from basicsr.utils.checkpoint import save_checkpoint
from basicsr.utils.download_util import load_file_from_url

SCRIPT = 'scripts/publish_models.py'


def save(path, key='params', value=1.0):
    """Write weights; returns the first digits of their SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {'weight': torch.full((2,), value)}
    save_checkpoint({key: state} if key else state, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*.pth'))


def test_weights_get_the_digits_of_their_checksum(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'experiments' / 'pretrained_models'
    one = save(folder / 'EDSR' / 'net.pth')
    two = save(folder / 'old-00000000.pth', 'params_ema', 2.0)
    out = script(SCRIPT)
    assert names(folder) == [f'EDSR/net-{one}.pth', f'old-{two}.pth']
    assert out.endswith('\n2 of 2 files have their digits.\n')
    for name in names(folder):  # as it is whole, it is not asked for
        assert load_file_from_url(f'https://example.org/{name}', folder, file_name=name)
    assert script(SCRIPT).endswith('\n2 of 2 files have their digits.\n')
    assert names(folder) == [f'EDSR/net-{one}.pth', f'old-{two}.pth']


def test_what_are_no_networks_is_taken_on_demand_only(script, tmp_path, capsys):
    digits = save(tmp_path / 'a.pth', key=None)
    assert script(SCRIPT, '--input', tmp_path) == '0 of 1 files have their digits.\n'
    assert names(tmp_path) == ['a.pth']
    script(SCRIPT, '--input', tmp_path / 'a.pth', '--bare')
    assert names(tmp_path) == [f'a-{digits}.pth']


def test_damaged_weights_are_not_published(script, tmp_path, capsys):
    save(tmp_path / 'a.pth')
    (tmp_path / 'a.pth').write_bytes((tmp_path / 'a.pth').read_bytes()[:-1])
    with pytest.raises(SystemExit):
        script(SCRIPT, '--input', tmp_path)
    assert 'a.pth: it is damaged' in capsys.readouterr().err
    assert names(tmp_path) == ['a.pth']


def test_published_weights_are_not_replaced(script, tmp_path, capsys):
    digits = save(tmp_path / 'a.pth')
    (tmp_path / f'a-{digits}.pth').write_bytes(b'other')
    with pytest.raises(SystemExit):
        script(SCRIPT, '--input', tmp_path / 'a.pth')
    assert f'a-{digits}.pth exists already' in capsys.readouterr().err
    assert (tmp_path / f'a-{digits}.pth').read_bytes() == b'other'


def test_an_empty_folder_is_named(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script(SCRIPT, '--input', tmp_path)
    assert 'holds no files *.pth' in capsys.readouterr().err
