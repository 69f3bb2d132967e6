"""ESRGAN: Enhanced Super-Resolution Generative Adversarial Networks, Wang et al., ECCV Workshops
2018, https://arxiv.org/abs/1809.00219.
"""

from typing import Any

import torch
from torch import Tensor

from basicsr.utils.errors import UserError
from basicsr.utils.registry import MODEL_REGISTRY

from .srgan_model import SRGANModel


@MODEL_REGISTRY.register()
class ESRGANModel(SRGANModel):
    """SRGAN with a relativistic average discriminator (sec. 3.2).

    It predicts whether an image is more realistic than the average image of the opposite class, so
    the generator's loss has a term for real images too.
    """

    def init_losses(self) -> None:
        super().init_losses()
        if getattr(self.cri_gan, 'gan_type', None) == 'hinge':
            raise UserError(
                'train.gan_opt: the hinge loss of a generator has no target, so that its two '
                'relativistic terms cancel; choose another gan_type, or SRGANModel.'
            )

    def g_gan_loss(self, net_d: Any) -> Tensor:
        real_pred = net_d(self.target('gan')).detach()
        fake_pred = net_d(self.output)
        l_g_real = self.cri_gan(real_pred - fake_pred.mean(), False, is_disc=False)
        l_g_fake = self.cri_gan(fake_pred - real_pred.mean(), True, is_disc=False)
        return (l_g_real + l_g_fake) / 2

    def d_real_loss(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            fake_pred = self.net_d(self.output)
        pred = self.net_d(self.target('gan'))
        return self.cri_gan(pred - fake_pred.mean(), True, is_disc=True) / 2, pred

    def d_fake_loss(self, real_pred: Tensor) -> tuple[Tensor, Tensor]:
        pred = self.net_d(self.output)
        return self.cri_gan(pred - real_pred.mean(), False, is_disc=True) / 2, pred
