"""Adversarial training on images degraded on the fly: Real-ESRGAN's second stage.

Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan, "Real-ESRGAN: Training Real-World Blind
Super-Resolution with Pure Synthetic Data" (2021), https://arxiv.org/abs/2107.10833
"""

from torch import Tensor

from basicsr.utils.errors import UserError
from basicsr.utils.option_section import flag
from basicsr.utils.registry import MODEL_REGISTRY

from .realesrnet_model import BlindDegradation
from .srgan_model import SRGANModel


@MODEL_REGISTRY.register(suffix='basicsr')
class RealESRGANModel(BlindDegradation, SRGANModel):
    """SRGAN on degraded images, with sharpened targets.

    ``l1_gt_usm`` (true), ``percep_gt_usm`` (true) and ``gan_gt_usm`` (false) at top level choose
    whether the pixel, the perceptual and the adversarial loss see the sharpened GT; LDL sees the
    plain one, and ``train.losses`` see the same as the pixel loss.
    """

    def _check_options(self, opt: dict) -> None:
        if self._given(opt, 'gt_usm') is not None:
            raise UserError(
                'gt_usm is for RealESRNetModel; RealESRGANModel has l1_gt_usm, percep_gt_usm and '
                'gan_gt_usm.'
            )
        super()._check_options(opt)
        self._sharpened: tuple[Tensor, Tensor] | None = None
        self.sharpens = {
            'pix': flag(opt, 'l1_gt_usm', True),
            'percep': flag(opt, 'percep_gt_usm', True),
            'gan': flag(opt, 'gan_gt_usm', False),
            'ldl': False,
        }

    def target(self, loss: str) -> Tensor:
        if not self.sharpens.get(loss, self.sharpens['pix']):
            return self.gt
        if self._sharpened is None or self._sharpened[0] is not self.gt:  # once a micro-batch
            self._sharpened = self.gt, self.usm_sharpener(self.gt)
        return self._sharpened[1]
