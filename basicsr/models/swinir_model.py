"""Models of window-attention networks."""

from basicsr.archs.arch_util import pad_to_multiple
from basicsr.utils.registry import MODEL_REGISTRY

from .sr_model import SRModel


@MODEL_REGISTRY.register()
class SwinIRModel(SRModel):
    """Tests on images padded to a multiple of the window, and cuts the result."""

    def test(self) -> None:
        lq, (height, width) = self.lq, self.lq.shape[-2:]
        scale = self.opt.get('scale') or 1
        window = self.opt['network_g'].get('window_size') or self._network().window_size
        self.lq = pad_to_multiple(lq, window)
        super().test()
        self.lq = lq
        self.output = self.output[..., : height * scale, : width * scale]
