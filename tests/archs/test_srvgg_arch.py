import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from basicsr.archs.srvgg_arch import SRVGGNetCompact


def test_an_unknown_activation_lists_the_choices():
    with pytest.raises(ValueError, match=r"'gelu' is unknown; choose one of .*'leakyrelu'"):
        SRVGGNetCompact(act_type='gelu')


@pytest.mark.parametrize('upscale', [0, 1.5])
def test_scales_it_cannot_do_are_refused(upscale):
    with pytest.raises(ValueError, match=f'upscale {upscale}'):
        SRVGGNetCompact(upscale=upscale)


@torch.no_grad()
def test_without_residual_the_output_is_the_enlarged_input():
    net = SRVGGNetCompact(num_feat=4, num_conv=1, upscale=3, act_type='leakyrelu')
    torch.nn.init.zeros_(net.body[-1].weight)
    torch.nn.init.zeros_(net.body[-1].bias)
    x = torch.rand(1, 3, 5, 7)
    assert torch.equal(net(x), F.interpolate(x, scale_factor=3))


def test_published_real_esrgan_weights_load():
    # realesr-general-x4v3.pth is {'params': state} with exactly these keys and shapes.
    recorded = json.loads((Path(__file__).parent / 'state_dicts.json').read_text())
    options = {'num_feat': 64, 'num_conv': 32, 'upscale': 4, 'act_type': 'prelu'}
    network = {'type': 'SRVGGNetCompact', **options}
    (state,) = (entry['state'] for entry in recorded if entry['network'] == network)
    checkpoint = {'params': {name: torch.empty(shape, device='meta') for name, shape in state}}
    assert len(state) == 101
    with torch.device('meta'):
        net = SRVGGNetCompact(3, 3, 64, 32, 4, 'prelu')
    net.load_state_dict(checkpoint['params'], strict=True, assign=True)
