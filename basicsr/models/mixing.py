"""Samples of a batch that are mixed with each other (``train.mixing``).

mixup: Hongyi Zhang, Moustapha Cisse, Yann N. Dauphin, David Lopez-Paz, "mixup: Beyond Empirical
Risk Minimization" (2018), https://arxiv.org/abs/1710.09412

cutmix: Sangdoo Yun, Dongyoon Han, Seong Joon Oh, Sanghyuk Chun, Junsuk Choe, Youngjoon Yoo,
"CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features" (2019),
https://arxiv.org/abs/1905.04899

There labels are mixed as images are; here the label is itself an image, which is mixed in the same
way as its low-quality version.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from basicsr.utils.rng import mix

# Other numbers than the step draws itself, whose generators are seeded from the same three.
_STREAM = 1


class BatchMixing:
    """Mixes each sample of some batches with another one of its batch.

    The other one is some places further on, the same number of places for all. What is done follows
    from the seed, the rank and the iteration; it is drawn in main memory, as plain numbers that the
    device need not be asked for.

    Args:
        options: ``mixup`` and ``cutmix``, each None or a dict of ``prob``, its share of the
            batches, and ``alpha``, of the distribution Beta(alpha, alpha) of the weight.
        seed, rank: Of the draws.
    """

    def __init__(self, options: Mapping[str, Any], seed: int, rank: int = 0):
        kinds = {'mixup': mixup, 'cutmix': cutmix}
        self.kinds = [(kinds[name], how) for name, how in options.items() if how]
        self.seed = seed
        self.rank = rank

    def __call__(self, lq: Tensor, gt: Tensor, iteration: int) -> tuple[Tensor, Tensor]:
        """The batch of an iteration, mixed or as it is.

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
    """``weight * x + (1 - weight) * other``, where the other is ``places`` further on."""
    lq, gt = (weight * x + (1 - weight) * x.roll(-places, 0) for x in (lq, gt))
    return lq, gt


def cutmix(
    lq: Tensor, gt: Tensor, weight: float, places: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Replace a rectangle by that of the sample ``places`` further on.

    It has about ``1 - weight`` of the area and the shape of the image, lies wholly inside, at a
    place that is drawn, and covers whole pixels of LQ.
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
