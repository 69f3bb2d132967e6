import json

import pytest
import torch
from golden import recipe

from basicsr.archs.rrdbnet_arch import RRDBNet

TINY = {'num_feat': 4, 'num_block': 1, 'num_grow_ch': 2}


@pytest.mark.parametrize('scale', [3, 8])
def test_scales_it_cannot_do_are_refused(scale):
    with pytest.raises(ValueError, match=f'scale {scale}; choose 1, 2 or 4'):
        RRDBNet(3, 3, scale=scale)


@torch.no_grad()
@pytest.mark.parametrize('scale', [1, 2])
def test_an_odd_size_is_continued_by_reflection_and_cropped(scale):
    torch.manual_seed(0)
    net = RRDBNet(3, 3, scale=scale, **TINY)
    x = torch.rand(1, 3, 7, 9)
    whole = torch.nn.functional.pad(x, (0, -9 % (4 // scale), 0, -7 % (4 // scale)), 'reflect')
    assert torch.equal(net(x), net(whole)[..., : 7 * scale, : 9 * scale])


def test_published_real_esrgan_weights_load():
    # RealESRGAN_x4plus.pth is {'params_ema': state} with exactly these keys and shapes.
    shapes = json.loads((recipe.HERE / 'archs_state.json').read_text())['RRDBNet-defaults']
    checkpoint = {'params_ema': {k: torch.empty(s, device='meta') for k, s in shapes.items()}}
    assert len(shapes) == 702
    with torch.device('meta'):
        net = RRDBNet(3, 3, scale=4, num_feat=64, num_block=23, num_grow_ch=32)
    net.load_state_dict(checkpoint['params_ema'], strict=True, assign=True)
