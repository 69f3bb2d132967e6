"""Blind super-resolution on images degraded on the fly: Real-ESRNet, Real-ESRGAN's first stage.

Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan, "Real-ESRGAN: Training Real-World Blind
Super-Resolution with Pure Synthetic Data" (2021), https://arxiv.org/abs/2107.10833
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from basicsr.data.progressive import crop_sizes
from basicsr.data.recipes import check_options, draw_recipes
from basicsr.data.second_order import compile_jpeg, make_pairs
from basicsr.utils.diffjpeg import DiffJPEG
from basicsr.utils.dist_util import gather_on_master, get_dist_info
from basicsr.utils.errors import MissingKeyError, UserError
from basicsr.utils.img_process_util import USMSharp
from basicsr.utils.json_lines import keep_rows
from basicsr.utils.option_section import flag, place_of
from basicsr.utils.option_tables import DEGRADATION_OPTIONS
from basicsr.utils.registry import MODEL_REGISTRY

from .base_model import BaseModel
from .sr_model import SRModel

logger = logging.getLogger(__name__)


class TrainingPairPool:
    """A pool of ``size`` pairs from earlier batches; once full, batches are drawn from it.

    It varies the degradations within a batch when the samples of a batch share one
    (``share_degradation``).

    Attributes:
        lq, gt: The pooled pairs, (n, c, h, w); None while the pool is empty.
    """

    def __init__(self, size: int):
        self.size = size
        self.lq: Tensor | None = None
        self.gt: Tensor | None = None

    def exchange(self, lq: Tensor, gt: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch; returns as many random pairs once the pool is full, else the batch."""
        if self.lq is None or self.gt is None:
            self.lq, self.gt = lq.clone(), gt.clone()
            return lq, gt
        if len(self.lq) + len(lq) <= self.size:
            self.lq, self.gt = torch.cat([self.lq, lq]), torch.cat([self.gt, gt])
            return lq, gt
        chosen = torch.randperm(len(self.lq))[: len(lq)].to(lq.device)
        n = len(chosen)  # less than the batch size if the first batch was smaller
        out = torch.cat([self.lq[chosen], lq[n:]]), torch.cat([self.gt[chosen], gt[n:]])
        self.lq[chosen], self.gt[chosen] = lq[:n], gt[:n]
        return out

    def to(self, device: torch.device) -> None:
        if self.lq is not None and self.gt is not None:
            self.lq, self.gt = self.lq.to(device), self.gt.to(device)

    def state_dict(self) -> dict[str, Tensor | None]:
        """The pairs on the CPU, as bytes if that is lossless."""
        return {'lq': _as_bytes(self.lq), 'gt': _as_bytes(self.gt)}

    def load_state_dict(self, state: Mapping[str, Tensor | None], gt_size: int | None) -> bool:
        """Restore saved pairs; returns False if their number or size does not match this pool."""
        lq, gt = (_as_floats(state[key]) for key in ('lq', 'gt'))
        if gt is not None and (len(gt) > self.size or gt.shape[-1] != gt_size):
            return False
        self.lq, self.gt = lq, gt
        return True


def _as_bytes(images: Tensor | None) -> Tensor | None:
    if images is None:
        return None
    images = images.cpu()
    levels = (images * 255).round().to(torch.uint8)
    return levels if torch.equal(levels.float() / 255, images) else images


def _as_floats(images: Tensor | None) -> Tensor | None:
    return images.float() / 255 if images is not None and images.dtype == torch.uint8 else images


def _training_set(opt: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of the training set; empty for a model that is built without datasets."""
    return (opt.get('datasets') or {}).get('train') or {}


class BlindDegradation(BaseModel):
    """Mixin that synthesizes the LQ images of RealESRGANDataset on the device; list it first.

    Options at top level: those of ``draw_recipe`` and ``make_pairs``, and

    * ``share_degradation`` (false): the samples of a batch share sizes, kinds of noise and
      branches, as in BasicSR 1.x, and pass through a pool of ``queue_size`` (180) pairs;
    * ``queue_size`` (0 without ``share_degradation``): the size of the pool;
    * ``high_order_degradation`` (true): false expects pairs of images;
    * ``log_recipes`` (false): write the degradation drawn for each sample to
      ``recipes_<rank>.jsonl``.

    Batches that already contain LQ images are used unchanged.
    """

    def __init__(self, opt: dict):
        self.shares = flag(opt, 'share_degradation', False)
        self.is_high_order = flag(opt, 'high_order_degradation', True)
        self.log_recipes = flag(opt, 'log_recipes', False)
        self.pool: TrainingPairPool | None = None
        if opt['is_train']:
            self._check_options(opt)
            self._make_pool(opt)
        super().__init__(opt)
        self.usm_sharpener = USMSharp().to(self.device)
        self.jpeger = DiffJPEG(differentiable=False).to(self.device)  # for subclasses
        # On a CPU the compiled version is slower.
        if opt['is_train'] and opt['train'].get('compile') and self.device.type == 'cuda':
            compile_jpeg(self.device)

    def _check_options(self, opt: dict) -> None:
        train_set = _training_set(opt)
        own, its = opt.get('gt_size'), train_set.get('gt_size')
        if own is not None and its is not None and own != its:
            raise UserError(
                f'gt_size is {own}, but datasets.train.gt_size {its}: both are the side of the '
                'training patches; leave one of them out.'
            )
        if (sharpens := self._given(opt, 'gt_usm')) not in (None, True, False):
            raise UserError(f'gt_usm must be true or false, got {sharpens!r}.')
        names = (*DEGRADATION_OPTIONS.split(), 'scale', 'progressive', 'batch_size_per_gpu')
        given = {name: self._given(opt, name) for name in names}
        self.degradation = {name: value for name, value in given.items() if value is not None}
        in_workers = train_set.get('degrade_on') == 'worker'
        if in_workers and self.shares:
            raise UserError(
                'share_degradation needs whole batches, and with datasets.train.degrade_on: worker '
                'the samples are degraded one by one: leave one of them out.'
            )
        if self.is_high_order and not in_workers:
            try:
                check_options(self.degradation, 'recipes')
                _ = self.degradation['gt_size'], self.degradation['scale']
            except KeyError as error:
                raise MissingKeyError(f'{opt["model_type"]} needs the option {error}.') from error

    @staticmethod
    def _given(opt: dict, name: str) -> Any:
        """A degradation option, from datasets.train or else from the top level."""
        return _training_set(opt).get(name, opt.get(name))

    def _make_pool(self, opt: dict) -> None:
        given = opt.get('queue_size')
        self.queue_size = size = (180 if self.shares else 0) if given is None else given
        if type(size) is not int or size < 0:
            where = place_of(opt, 'queue_size')
            raise UserError(f'{where} must be a number of pairs, or 0 for no pool, got {size!r}.')
        if size == 0:
            return
        if len(sizes := crop_sizes(self.degradation)) > 1:
            raise UserError(
                f'a pool mixes batches, and those of datasets.train.progressive have crops of '
                f'{sizes}: set queue_size: 0.'
            )
        self.pool = TrainingPairPool(size)
        batch = _training_set(opt).get('batch_size_per_gpu', 1)
        logger.info('Pool of %d training pairs.', max(size // batch, 1) * batch)

    def feed_data(self, data: Mapping[str, Any]) -> None:
        if 'lq' not in data:
            data = self._degrade(data)
        super().feed_data(data)
        self.recipes = data.get('recipe')
        if self.recipes is None:  # not a training batch, or a batch of pairs
            return
        if self.log_recipes:
            self._log_recipes(data)
        if self.pool is not None:
            self.lq, self.gt = self.pool.exchange(self.lq, self.gt)

    def trial_copy(self) -> Self:
        copy = super().trial_copy()
        copy.pool, copy.log_recipes = None, False
        return copy

    @torch.no_grad()
    def _degrade(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with ``lq`` added and ``gt`` cropped to match."""
        if not self.is_high_order:
            raise UserError(
                'high_order_degradation: false needs pairs of images, and the training set gives '
                'no lq: use RealESRGANPairedDataset.'
            )
        gt, *kernels = (
            data[name].to(self.device, non_blocking=True)
            for name in ('gt', 'kernel1', 'kernel2', 'sinc_kernel')
        )
        drawn = [json.loads(text) for text in data.get('recipe', [])]
        seeds = [recipe['seed'] for recipe in drawn] or None
        recipes = draw_recipes(self.degradation, len(gt), seeds, self.shares)
        if drawn:  # with the parameters of the kernels and, with stages, the size of the patches
            recipes = [its | recipe for its, recipe in zip(drawn, recipes, strict=True)]
        lq, gt = make_pairs(gt, kernels, recipes, self.degradation, self.usm_sharpener)
        return {**data, 'lq': lq, 'gt': gt, 'recipe': recipes}

    def _log_recipes(self, data: Mapping[str, Any]) -> None:
        rank, world_size = get_dist_info()
        sample = self.samples_seen - len(data['recipe']) * world_size + rank
        folder = Path(self.opt['path']['experiments_root'])
        with (folder / f'recipes_{rank}.jsonl').open('a', encoding='utf-8') as file:
            for number, recipe in enumerate(data['recipe']):
                row = {'sample': sample + number * world_size, 'gt_path': data['gt_path'][number]}
                # A JSON string if a worker degraded the sample.
                recipe = json.loads(recipe) if isinstance(recipe, str) else recipe
                file.write(json.dumps(row | recipe) + '\n')

    def extra_state(self) -> dict[str, Any]:
        """The pools of all ranks."""
        if self.pool is None:
            return super().extra_state()
        return {**super().extra_state(), 'pools': gather_on_master(self.pool.state_dict())}

    def load_extra_state(self, resume_state: Mapping[str, Any]) -> None:
        super().load_extra_state(resume_state)
        rank, world_size = get_dist_info()
        pools = resume_state.get('pools', [])
        if self.pool is None:
            return
        size = next(iter(crop_sizes(self.degradation)), None)
        if len(pools) != world_size or not self.pool.load_state_dict(pools[rank], size):
            logger.warning('The pool of training pairs starts empty: the state has none that fits.')
        self.pool.to(self.device)

    def drop_later_files(self, iteration: int) -> None:
        """Also remove the recipes of later samples, of ranks that no longer exist too."""
        super().drop_later_files(iteration)
        for file in Path(self.opt['path']['experiments_root']).glob('recipes_*.jsonl'):
            keep_rows(file, 'sample', lambda row: row['sample'] < self.samples_seen)


@MODEL_REGISTRY.register(suffix='basicsr')
class RealESRNetModel(BlindDegradation, SRModel):
    """Supervised training on degraded images; ``gt_usm`` sharpens the target."""

    def _check_options(self, opt: dict) -> None:
        if self._given(opt, 'gt_usm') is None and self.is_high_order:
            raise MissingKeyError('gt_usm: required by RealESRNetModel: true sharpens the target.')
        super()._check_options(opt)
