"""Losses and regularisers of adversarial training.

Types of ``GANLoss``:
    vanilla: Generative Adversarial Nets, Goodfellow et al., NeurIPS 2014,
        https://arxiv.org/abs/1406.2661
    lsgan: Least Squares Generative Adversarial Networks, Mao et al., ICCV 2017,
        https://arxiv.org/abs/1611.04076
    wgan: Wasserstein GAN, Arjovsky, Chintala, Bottou, ICML 2017, https://arxiv.org/abs/1701.07875
    wgan_softplus: the logistic loss of StyleGAN2: Analyzing and Improving the Image Quality of
        StyleGAN, Karras et al., CVPR 2020, https://arxiv.org/abs/1912.04958
    hinge: Geometric GAN, Lim, Ye, 2017, https://arxiv.org/abs/1705.02894; Self-Attention Generative
        Adversarial Networks, Zhang et al., ICML 2019, https://arxiv.org/abs/1805.08318

Several scales and feature matching: High-Resolution Image Synthesis and Semantic Manipulation with
Conditional GANs (pix2pixHD), Wang et al., CVPR 2018, https://arxiv.org/abs/1711.11585
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import LOSS_REGISTRY
from basicsr.utils.text import did_you_mean

from .basic_loss import CharbonnierLoss, L1Loss, MSELoss
from .loss_util import at_least_float32

GAN_TYPES = ('vanilla', 'lsgan', 'wgan', 'wgan_softplus', 'hinge')


@LOSS_REGISTRY.register()
class GANLoss(nn.Module):
    """Loss of a discriminator, or of the generator that it judges, from logits of any shape.

    Half precision is computed in float32.

    Args:
        gan_type: One of ``GAN_TYPES``.
        real_label_val, fake_label_val: Targets of vanilla and lsgan for real and generated images;
            the other types have none.
        loss_weight: Factor of the generator's loss; the discriminator's has none.
    """

    def __init__(
        self,
        gan_type: str,
        real_label_val: float = 1.0,
        fake_label_val: float = 0.0,
        loss_weight: float = 1.0,
    ):
        super().__init__()
        if gan_type not in GAN_TYPES:
            hint = did_you_mean(gan_type, GAN_TYPES)
            raise UserError(f"gan_type '{gan_type}' is not one of {', '.join(GAN_TYPES)}{hint}")
        self.gan_type = gan_type
        self.real_label_val = real_label_val
        self.fake_label_val = fake_label_val
        self.loss_weight = loss_weight

    def get_target_label(self, input: Tensor, target_is_real: bool) -> Tensor | bool:
        """The label, in the shape of ``input``; for wgan and wgan_softplus ``target_is_real``."""
        if self.gan_type in ('wgan', 'wgan_softplus'):
            return target_is_real
        return torch.full_like(
            input, self.real_label_val if target_is_real else self.fake_label_val
        )

    def forward(self, input: Tensor, target_is_real: bool, is_disc: bool = False) -> Tensor:
        """The mean loss of the logits.

        Args:
            input: Logits of the discriminator.
            target_is_real: Whether the target is that of real images; when the generator is
                trained, True for the images that it made.
            is_disc: Whether the discriminator is being trained.
        """
        loss = self._loss(at_least_float32(input), target_is_real, is_disc)
        return loss if is_disc else loss * self.loss_weight

    def _loss(self, logits: Tensor, target_is_real: bool, is_disc: bool) -> Tensor:
        target: Any = self.get_target_label(logits, target_is_real)
        if self.gan_type == 'vanilla':
            return F.binary_cross_entropy_with_logits(logits, target)
        if self.gan_type == 'lsgan':
            return F.mse_loss(logits, target)
        wanted = logits if target_is_real else -logits
        if self.gan_type == 'wgan':
            return -wanted.mean()
        if self.gan_type == 'wgan_softplus':
            return F.softplus(-wanted).mean()
        # Only the discriminator has a margin; the generator always raises the logits.
        return F.relu(1 - wanted).mean() if is_disc else -logits.mean()


@LOSS_REGISTRY.register()
class MultiScaleGANLoss(GANLoss):
    """Mean of ``GANLoss`` over the scales of a discriminator.

    ``input`` is a list with the logits of every scale, or for every scale a list of its features
    whose last element is the logits; a tensor is a single scale.
    """

    def forward(
        self, input: Tensor | Sequence, target_is_real: bool, is_disc: bool = False
    ) -> Tensor:
        if isinstance(input, Tensor):
            return super().forward(input, target_is_real, is_disc)
        loss = super().forward
        logits = [scale if isinstance(scale, Tensor) else scale[-1] for scale in input]
        losses = [loss(scale, target_is_real, is_disc) for scale in logits]
        return torch.stack(losses).mean()


@LOSS_REGISTRY.register()
class GANFeatLoss(nn.Module):
    """Feature matching: distance of the discriminator's features of generated and real images.

    Called as ``loss(pred_fake, pred_real)``, each a list with, for every scale, the list of its
    features; the last of these is the logits and is left out. The distances are added over the
    features of a scale and averaged over the scales.

    Args:
        criterion: 'l1', 'l2' or 'charbonnier'.
        loss_weight: Factor of the loss.
        reduction: 'mean' or 'sum', over a feature map.
    """

    def __init__(self, criterion: str = 'l1', loss_weight: float = 1.0, reduction: str = 'mean'):
        super().__init__()
        criteria = {'l1': L1Loss, 'l2': MSELoss, 'charbonnier': CharbonnierLoss}
        if criterion not in criteria:
            raise UserError(f"criterion must be 'l1', 'l2' or 'charbonnier', got {criterion!r}.")
        if reduction == 'none':
            raise UserError(
                "GANFeatLoss adds features of many sizes: reduction is 'mean' or 'sum'."
            )
        self.criterion = criteria[criterion](loss_weight, reduction)

    def forward(
        self, pred_fake: Sequence[Sequence[Tensor]], pred_real: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        losses = [
            self.criterion(fake, real.detach())
            for fakes, reals in zip(pred_fake, pred_real, strict=True)
            for fake, real in zip(fakes[:-1], reals[:-1], strict=True)
        ]
        return torch.stack(losses).sum() / len(pred_fake)


def _gradient(output: Tensor, x: Tensor) -> Tensor:
    """Gradient of the sum of ``output`` with respect to ``x``, itself differentiable."""
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return at_least_float32(gradient)


def r1_penalty(real_pred: Tensor, real_img: Tensor) -> Tensor:
    """Squared norm of the discriminator's gradient at real images, averaged over the batch.

    Which Training Methods for GANs do actually Converge?, Mescheder, Geiger, Nowozin, ICML 2018,
    https://arxiv.org/abs/1801.04406; the factor gamma / 2 is left to the caller.

    Args:
        real_pred: Logits of ``real_img``.
        real_img: Images (b, c, h, w) for which ``requires_grad`` was set before the discriminator
            was called.
    """
    return _gradient(real_pred, real_img).square().flatten(1).sum(1).mean()


def g_path_regularize(
    fake_img: Tensor, latents: Tensor, mean_path_length: Tensor | float, decay: float = 0.01
) -> tuple[Tensor, Tensor, Tensor]:
    """Path length regularisation of StyleGAN2 (Karras et al., CVPR 2020, sec. 3.2).

    Args:
        fake_img: Generated images (b, c, h, w).
        latents: The styles they were made from, (b, number of layers, features).
        mean_path_length: Moving average of the lengths, 0 at first.
        decay: Share of this batch in the moving average.

    Returns:
        The penalty; this batch's mean length and the new moving average, both without gradient.
    """
    # With this noise the variance of the weighted sum of pixels does not depend on the image size.
    noise = torch.randn_like(fake_img) / math.sqrt(fake_img.shape[2] * fake_img.shape[3])
    gradient = _gradient(fake_img * noise, latents)
    lengths = torch.linalg.vector_norm(gradient, dim=(1, 2)) / math.sqrt(latents.shape[1])
    mean = mean_path_length + decay * (lengths.mean() - mean_path_length)
    return (lengths - mean).square().mean(), lengths.mean().detach(), mean.detach()


def gradient_penalty_loss(
    discriminator: Callable[[Tensor], Tensor],
    real_data: Tensor,
    fake_data: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Penalty for a gradient norm other than 1 between real and generated images (WGAN-GP).

    Improved Training of Wasserstein GANs, Gulrajani et al., NeurIPS 2017,
    https://arxiv.org/abs/1704.00028. The norm is taken over a whole sample.

    Args:
        real_data, fake_data: (b, c, h, w); neither gets a gradient.
        weight: Map that the gradient is multiplied by, such as the mask of the region to fill in
            (Generative Image Inpainting with Contextual Attention, Yu et al., CVPR 2018,
            https://arxiv.org/abs/1801.07892).
    """
    share = torch.rand(len(real_data), *[1] * (real_data.dim() - 1)).to(real_data)
    mixed = (share * real_data + (1 - share) * fake_data).detach().requires_grad_()
    gradient = _gradient(discriminator(mixed), mixed)
    if weight is not None:
        gradient = gradient * weight
    return (torch.linalg.vector_norm(gradient.flatten(1), dim=1) - 1).square().mean()
