import re

import pytest
import torch

from basicsr.archs.ridnet_arch import RIDNet
from basicsr.utils.checkpoint import load_checkpoint

SCRIPT = 'scripts/model_conversion/convert_ridnet.py'


@pytest.fixture
def published():
    """Weights under other names, in the same order."""
    net = RIDNet(3, 64, 3)
    return net, {f'model.layer{i}': value for i, value in enumerate(net.state_dict().values())}


def test_weights_get_the_names_of_this_package(script, published, tmp_path):
    net, theirs = published
    torch.save(theirs, tmp_path / 'theirs.pt')
    out = script(SCRIPT, '--input', tmp_path / 'theirs.pt', '--output', tmp_path / 'ours.pth')
    assert out == f'{tmp_path / "ours.pth"}: {len(theirs)} tensors of {tmp_path / "theirs.pt"}.\n'
    ours = load_checkpoint(tmp_path / 'ours.pth')
    assert list(ours) == list(net.state_dict())
    assert all(torch.equal(value, ours[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda state: state | {'more': torch.zeros(3)}, r'more \(3,\) stands where nothing'),
        (lambda state: dict(list(state.items())[:-1]), r'nothing \(0,\) stands where tail.bias'),
        (
            lambda state: state | {'model.layer0': torch.zeros(3, 3)},
            r'model.layer0 \(3, 3\) stands where sub_mean.weight \(3, 3, 1, 1\) is needed',
        ),
    ],
)
def test_other_weights_are_refused(script, published, tmp_path, capsys, change, message):
    torch.save(change(published[1]), tmp_path / 'theirs.pt')
    with pytest.raises(SystemExit):
        script(SCRIPT, '--input', tmp_path / 'theirs.pt', '--output', tmp_path / 'ours.pth')
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / 'ours.pth').exists()


def test_a_file_that_exists_is_kept(script, tmp_path, capsys):
    (tmp_path / 'ours.pth').write_bytes(b'mine')
    with pytest.raises(SystemExit):
        script(SCRIPT, '--input', 'x', '--output', tmp_path / 'ours.pth')
    assert 'ours.pth exists: remove it' in capsys.readouterr().err
