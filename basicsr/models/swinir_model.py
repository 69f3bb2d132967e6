"""Models of window-attention networks."""

from basicsr.utils.registry import MODEL_REGISTRY

from .sr_model import SRModel


@MODEL_REGISTRY.register()
class SwinIRModel(SRModel):
    """Restores images padded to a multiple of the window size, and crops the results."""

    @property
    def multiple(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.opt['network_g'].get('window_size') or self.evaluated_network('g').window_size
