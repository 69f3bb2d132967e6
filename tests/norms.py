"""A network with batch, layer and instance normalisation, as a plug-in."""

NORM_NET = """
from torch import nn
from basicsr.utils.registry import ARCH_REGISTRY


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@ARCH_REGISTRY.register()
class NormNet(nn.Module):
    def __init__(self, norms=('batch', 'layer', 'instance')):
        super().__init__()
        kinds = {
            'batch': lambda: nn.BatchNorm2d(4),
            'layer': lambda: ChannelNorm(4),
            'instance': lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        }
        self.head = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleDict({name: kinds[name]() for name in norms})
        self.tail = nn.Sequential(nn.Conv2d(4, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        x = self.head(x)
        for norm in self.norms.values():
            x = norm(x) + x
        return self.tail(x)
"""


def with_norms(opt, folder, *norms):
    """The options with such a network, of which the source is written to a folder."""
    (folder / 'norm_arch.py').write_text(NORM_NET)
    network = {'type': 'NormNet'} | ({'norms': list(norms)} if norms else {})
    return opt | {'plugins': [str(folder)], 'network_g': network}
