"""mixup and CutMix: augmentation that mixes samples within a batch (``train.mixing``).

mixup: Hongyi Zhang, Moustapha Cisse, Yann N. Dauphin, David Lopez-Paz, "mixup: Beyond Empirical
Risk Minimization" (2018), https://arxiv.org/abs/1710.09412

cutmix: Sangdoo Yun, Dongyoon Han, Seong Joon Oh, Sanghyuk Chun, Junsuk Choe, Youngjoon Yoo,
"CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features" (2019),
https://arxiv.org/abs/1905.04899

The papers mix images and class labels; here the target is itself an image and is mixed in the same
way as its low-quality input.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from basicsr.utils.rng import mix

# Separates these draws from those of the step, which is seeded from the same three numbers.
_STREAM = 1


class BatchMixing:
    """Mixes each sample of randomly chosen batches with another sample of the same batch.

    The partner is a fixed number of places further on, the same for all samples. All draws are
    determined by seed, rank and iteration, and are made on the host so that the device need not be
    synchronized.

    Args:
        options: ``mixup`` and ``cutmix``, each None or a dict of ``prob``, its share of the
            batches, and ``alpha``; the weight follows Beta(alpha, alpha).
        seed, rank: Seed of the draws.
    """

    def __init__(self, options: Mapping[str, Any], seed: int, rank: int = 0):
        kinds = {'mixup': mixup, 'cutmix': cutmix}
        self.kinds = [(kinds[name], how) for name, how in options.items() if how]
        self.seed = seed
        self.rank = rank

    def __call__(self, lq: Tensor, gt: Tensor, iteration: int) -> tuple[Tensor, Tensor]:
        """Return the batch of an iteration, mixed or unchanged.

        Args:
            lq: (b, c, h, w).
            gt: (b, c, scale * h, scale * w).
        """
        rng = random.Random(mix(self.seed, self.rank, iteration, _STREAM))
        drawn = rng.random()
        for kind, how in self.kinds:
            if drawn < how['prob'] and len(lq) > 1:
                weight = rng.betavariate(how['alpha'], how['alpha'])
                return kind(lq, gt, weight, rng.randrange(1, len(lq)), rng)
            drawn -= how['prob']
        return lq, gt


def mixup(
    lq: Tensor, gt: Tensor, weight: float, places: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """``weight * x + (1 - weight) * partner``; the partner is ``places`` further on."""
    lq, gt = (weight * x + (1 - weight) * x.roll(-places, 0) for x in (lq, gt))
    return lq, gt


def cutmix(
    lq: Tensor, gt: Tensor, weight: float, places: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Replace a rectangle by the same rectangle of the sample ``places`` further on.

    It covers about ``1 - weight`` of the area, has the aspect ratio of the image, lies wholly
    inside it at a random position, and is aligned to LQ pixels.
    """
    scale, side = gt.shape[-1] // lq.shape[-1], math.sqrt(1 - weight)
    height, width = (round(side * length) for length in lq.shape[-2:])
    top, left = (
        rng.randint(0, length - part)
        for length, part in zip(lq.shape[-2:], (height, width), strict=True)
    )
    return (
        _paste(lq, places, top, left, height, width),
        _paste(gt, places, *(scale * n for n in (top, left, height, width))),
    )


def _paste(x: Tensor, places: int, top: int, left: int, height: int, width: int) -> Tensor:
    window = ..., slice(top, top + height), slice(left, left + width)
    result = x.clone()
    result[window] = x[window].roll(-places, 0)
    return result
