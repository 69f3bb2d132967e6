"""Supervised restoration: one network trained with pixel, perceptual or other losses."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basicsr.losses import build_loss
from basicsr.losses.loss_util import is_adversarial, named_losses, number_of_images
from basicsr.utils.errors import UserError
from basicsr.utils.registry import MODEL_REGISTRY

from .base_model import BaseModel
from .optimization import train_weights
from .preparation import compile_if_asked
from .restore import restore, self_ensemble
from .validation import Result


@MODEL_REGISTRY.register()
class SRModel(BaseModel):
    """A network ``net_g`` from LQ to GT, and with ``train.ema_decay`` its average ``net_g_ema``.

    Attributes:
        lq, gt, output: The batch and its result, (b, c, h, w) RGB in [0, 1].
        loss_prefix: Prefix of this network's losses in the log.
        needs_fidelity_loss: Whether a loss between ``output`` and ``gt`` is required.
        multiple: For inference, images are padded to a multiple of this.
    """

    net_g: torch.nn.Module
    loss_prefix = 'l_'
    needs_fidelity_loss = True
    multiple = 1

    def __init__(self, opt: dict):
        super().__init__(opt)
        self.add_network('g')
        if self.is_train:
            self.add_averages('g')
            self.init_training_settings()
            self.adopt_ema('g')  # a subclass may have settings of its own

    def init_training_settings(self) -> None:
        self.net_g.train()
        self.ema_decay = self.opt['train'].get('ema_decay', 0)
        self.add_ema('g')
        self.init_losses()
        self._check_sums()
        self.setup_optimizers()
        train_weights(self.optimizers)
        self.setup_schedulers()

    def setup_optimizers(self) -> None:
        self.add_optimizer('g')

    # losses

    def init_losses(self) -> None:
        """Build ``cri_pix``, ``cri_perceptual``, and ``cri_others`` by name."""
        train_opt = self.opt['train']
        self.cri_pix, self.cri_perceptual = (
            self._build_loss(train_opt[key]) if train_opt.get(key) else None
            for key in ('pixel_opt', 'perceptual_opt')
        )
        self.cri_others: dict[str, torch.nn.Module] = {}
        for name, options in named_losses(train_opt.get('losses') or []).items():
            self.cri_others[name] = self._build_loss(options)
            if is_adversarial(self.cri_others[name]):
                raise UserError(
                    'train.losses: an adversarial loss has its own place, train.gan_opt, in the '
                    'options of an adversarial model.'
                )
        self._num_images = {name: number_of_images(loss) for name, loss in self.cri_others.items()}
        if self.needs_fidelity_loss and not (
            self.cri_pix or self.cri_perceptual or self.cri_others
        ):
            raise UserError('no loss: give train.pixel_opt, train.perceptual_opt or train.losses.')

    def _build_loss(self, options: dict) -> torch.nn.Module:
        loss = build_loss(options).to(self.device)
        compile_if_asked(loss, self.opt['train'])
        return loss

    def _check_sums(self) -> None:
        """Reject sum reduction with gradient accumulation, which averages over micro-batches."""
        for name, loss in {**vars(self), **self.cri_others}.items():
            if self.stepper.accumulate > 1 and getattr(loss, 'reduction', 'mean') == 'sum':
                raise UserError(
                    f'train.accumulate averages losses over micro-batches, and {name} is a sum: '
                    'leave reduction: sum out, and raise its loss_weight.'
                )

    def target(self, loss: str) -> Tensor:
        """The ground truth for 'pix', 'percep', or another loss by its name in the log."""
        return self.gt

    def pair(self, loss: str) -> tuple[Tensor, Tensor]:
        """The output and ground truth that a loss compares, by the loss's name in the log."""
        return self.output, self.target(loss)

    def fidelity_losses(self) -> OrderedDict[str, Tensor]:
        """The losses between ``output`` and the ground truth, by their names in the log."""
        values: dict[str, Tensor | None] = {}
        if self.cri_pix is not None:
            values['pix'] = self.cri_pix(*self.pair('pix'))
        if self.cri_perceptual is not None:
            values['percep'], values['style'] = self.cri_perceptual(*self.pair('percep'))
        for name, loss in self.cri_others.items():
            value = loss(*self.pair(name)[: self._num_images[name]])
            if isinstance(value, tuple):  # a perceptual loss
                value, values[f'{name}_style'] = value
            values[name] = value
        return OrderedDict(
            (f'{self.loss_prefix}{name}', value)
            for name, value in values.items()
            if value is not None
        )

    # a step

    def feed_data(self, data: Mapping[str, Any]) -> None:
        self.lq = self._to_device(data['lq'])
        if 'gt' in data:
            self.gt = self._to_device(data['gt'])
        elif hasattr(self, 'gt'):
            del self.gt  # from the previous batch

    def mix_batch(self) -> None:
        if self.mixing is not None:
            self.lq, self.gt = self.mixing(self.lq, self.gt, self.current_iter)

    def input_of(self, label: str) -> Tensor:
        return self.lq

    def _to_device(self, images: Tensor) -> Tensor:
        is_image = self.channels_last and images.ndim == 4
        layout = torch.channels_last if is_image else torch.preserve_format
        return images.to(self.device, non_blocking=True, memory_format=layout)

    def optimize_parameters(self, current_iter: int) -> None:
        self.log_dict = self.step('g', self.restore_and_compare)
        self.update_averages(current_iter)

    def restore_and_compare(self) -> OrderedDict[str, Tensor]:
        """Restore ``lq`` into ``output``; returns the losses of ``net_g``."""
        self.output = self.net_g(self.lq)
        return self.fidelity_losses()

    # results

    def results(self, data: Mapping[str, Any]) -> Iterator[Result]:
        if hasattr(self, 'gt'):
            del self.gt  # a subclass's feed_data might leave a stale GT, which must not be scored
        self.feed_data(data)
        ensemble = (self.opt.get('val') or {}).get('self_ensemble', False)
        (self.test_selfensemble if ensemble else self.test)()
        visuals = self.get_current_visuals()
        # Free device memory before the next image is restored.
        del self.lq, self.output
        yield Result(data['name'][0] if 'name' in data else Path(data['lq_path'][0]).stem, visuals)

    def test(self) -> None:
        """Restore ``lq`` into ``output``."""
        val_opt = self.opt.get('val') or {}
        with self.uncompiled():
            self.output = restore(
                self.evaluated_network('g'),
                self.lq,
                self.opt.get('scale') or 1,
                tile=val_opt.get('tile'),
                overlap=val_opt.get('tile_overlap'),
                multiple=self.multiple,
            )

    def test_selfensemble(self) -> None:
        """Restore ``lq`` into the mean over its eight flips and rotations."""
        lq = self.lq
        self.output, self.lq = self_ensemble(self._tested, lq), lq

    def _tested(self, lq: Tensor) -> Tensor:
        self.lq = lq
        self.test()
        return self.output

    def uncompiled(self) -> AbstractContextManager:
        """Disable torch.compile in validation, where each image size would be recompiled."""
        compiled = self.is_train and self.opt['train'].get('compile')
        return torch.compiler.set_stance('force_eager') if compiled else nullcontext()

    def get_current_visuals(self) -> OrderedDict[str, Tensor]:
        """The images of the batch, on the CPU."""
        visuals = OrderedDict(lq=self.lq.detach().cpu(), result=self.output.detach().cpu())
        if hasattr(self, 'gt'):
            visuals['gt'] = self.gt.detach().cpu()
        return visuals
