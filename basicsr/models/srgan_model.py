"""Adversarial training: Photo-Realistic Single Image Super-Resolution Using a Generative
Adversarial Network (SRGAN), Ledig et al., CVPR 2017, https://arxiv.org/abs/1609.04802.

``train.ldl_opt`` adds a loss that penalises GAN artifacts: Details or Artifacts: A
Locally Discriminative Learning Approach to Realistic Image Super-Resolution (LDL), Liang, Zeng,
Zhang, CVPR 2022, https://arxiv.org/abs/2203.09195.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from basicsr.data.progressive import crop_sizes
from basicsr.losses.loss_util import get_refined_artifact_map, is_adversarial
from basicsr.utils.dist_util import gather_on_master, get_dist_info
from basicsr.utils.errors import MissingKeyError, UserError
from basicsr.utils.registry import MODEL_REGISTRY

from .sr_model import SRModel

logger = logging.getLogger(__name__)

_LDL_WINDOW = 7  # pixels, LDL sec. 3.2


@MODEL_REGISTRY.register()
class SRGANModel(SRModel):
    """A generator ``net_g`` and a discriminator ``net_d``, each with an optimizer.

    Every iteration trains the discriminator; the generator is trained when the iteration is a
    multiple of ``train.net_d_iters`` (1) and greater than ``train.net_d_init_iters`` (0).
    """

    loss_prefix = 'l_g_'
    needs_fidelity_loss = False

    def init_training_settings(self) -> None:
        if not self.opt.get('network_d'):
            raise MissingKeyError('network_d: required by adversarial training, and not given.')
        made, judged = (
            self.opt['network_g'].get('num_out_ch'),
            self.opt['network_d'].get('num_in_ch'),
        )
        if made is not None and judged is not None and made != judged:
            raise UserError(
                f'network_d.num_in_ch is {judged}, but network_g makes images of {made} channels '
                '(num_out_ch): make the two equal.'
            )
        self.add_network('d')
        self._check_size_of_patches()
        self.net_d_iters = self.opt['train'].get('net_d_iters', 1)
        self.net_d_init_iters = self.opt['train'].get('net_d_init_iters', 0)
        for name, lowest in (('net_d_iters', 1), ('net_d_init_iters', 0)):
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise UserError(
                    f'train.{name} must be an integer of at least {lowest}, got {value!r}.'
                )
        self.g_losses: OrderedDict[str, Any] = OrderedDict()
        super().init_training_settings()

    def _check_size_of_patches(self) -> None:
        size = getattr(self.get_bare_model(self.net_d), 'input_size', None)
        train_set = (self.opt.get('datasets') or {}).get('train') or {}
        own = {'gt_size': self.opt['gt_size']} if self.opt.get('gt_size') else {}
        others = [patch for patch in crop_sizes(train_set | own) if patch != size]
        if size is not None and others:
            raise UserError(
                f'network_d.input_size is {size}, but gt_size is {others[0]}: '
                f'{type(self.get_bare_model(self.net_d)).__name__} scores images of one size. Make '
                'the two equal, or use UNetDiscriminatorSN, which takes images of any size.'
            )

    def init_losses(self) -> None:
        super().init_losses()
        train_opt = self.opt['train']
        if not train_opt.get('gan_opt'):
            raise UserError('train.gan_opt: required by adversarial training, and not given.')
        self.cri_gan = self._build_loss(train_opt['gan_opt'])
        if not is_adversarial(self.cri_gan):
            raise UserError(
                f'train.gan_opt: {type(self.cri_gan).__name__} is not an adversarial loss, such as '
                'GANLoss.'
            )
        self.cri_ldl = None
        if train_opt.get('ldl_opt'):
            if self.ema_decay == 0:
                raise UserError('train.ldl_opt compares with net_g_ema: set train.ema_decay.')
            self.cri_ldl = self._build_loss(train_opt['ldl_opt'])

    def setup_optimizers(self) -> None:
        super().setup_optimizers()
        self.add_optimizer('d')

    def optimize_parameters(self, current_iter: int) -> None:
        if current_iter % self.net_d_iters == 0 and current_iter > self.net_d_init_iters:
            self.g_losses = self.step('g', self.restore_and_compare)
        else:
            for _ in self.parts('g'):
                with torch.no_grad(), self.autocast():
                    self.output = self.net_g(self.lq)
        self.output = self.output.detach()
        d_losses = self.step('d', self.discriminate)
        # Iterations that skip the generator log its last losses.
        self.log_dict = OrderedDict({**self.g_losses, **d_losses})
        self.update_averages(current_iter)

    def restore_and_compare(self) -> OrderedDict[str, Tensor]:
        losses = super().restore_and_compare()
        if self.cri_ldl is not None:
            losses['l_g_ldl'] = self._ldl_loss(self.cri_ldl)
        with self.frozen(self.net_d) as net_d:
            losses['l_g_gan'] = self.g_gan_loss(net_d)
        return losses

    def discriminate(self) -> Iterator[dict[str, Tensor]]:
        """Yield the losses and mean logits of ``net_d``: first real images, then ``output``."""
        loss, real_pred = self.d_real_loss()
        yield {'l_d_real': loss, 'out_d_real': real_pred.detach().mean()}
        loss, fake_pred = self.d_fake_loss(real_pred.detach())
        yield {'l_d_fake': loss, 'out_d_fake': fake_pred.detach().mean()}

    def g_gan_loss(self, net_d: Any) -> Tensor:
        """The adversarial loss of the generator; the discriminator's weights are frozen."""
        return self.cri_gan(net_d(self.output), True, is_disc=False)

    def d_real_loss(self) -> tuple[Tensor, Tensor]:
        """The discriminator's loss on real images, and its logits."""
        pred = self.net_d(self.target('gan'))
        return self.cri_gan(pred, True, is_disc=True), pred

    def d_fake_loss(self, real_pred: Tensor) -> tuple[Tensor, Tensor]:
        """The discriminator's loss on ``output``, and its logits, given those of real images."""
        pred = self.net_d(self.output)
        return self.cri_gan(pred, False, is_disc=True), pred

    def _ldl_loss(self, cri_ldl: torch.nn.Module) -> Tensor:
        """The loss weighted by the artifact map of ``output`` (LDL, eq. 6)."""
        gt = self.target('ldl')
        with torch.no_grad():
            averaged = self.net_g_ema(self.lq)
        weight = get_refined_artifact_map(gt, self.output, averaged, _LDL_WINDOW)
        return cri_ldl(weight * self.output, weight * gt)

    def extra_state(self) -> dict[str, Any]:
        """The generator's last losses on all ranks, logged until it is trained again."""
        own = {name: float(value) for name, value in self.g_losses.items()}
        return {**super().extra_state(), 'g_losses': gather_on_master(own)}

    def load_extra_state(self, resume_state: Mapping[str, Any]) -> None:
        super().load_extra_state(resume_state)
        losses, (rank, world_size) = resume_state.get('g_losses', []), get_dist_info()
        if len(losses) == world_size:
            self.g_losses = OrderedDict(losses[rank])
