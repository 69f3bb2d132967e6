"""Compare two runs image by image, with a paired bootstrap.

Bradley Efron and Robert Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13:
percentile intervals.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# With fewer, even scores that all differ in the same direction do so by chance in more than 5 % of
# cases: 2 / 2^5.
_FEWEST = 6
_RESAMPLES = 10_000


def paired_bootstrap(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of differences and the ends of its 95 % confidence interval.

    The images are drawn with replacement, always the same ones for the same number of images.
    """
    values, rng = np.asarray(differences, np.float64), np.random.default_rng(0)
    count = len(values)
    rows = max(1_000_000 // count, 1)  # at once, to bound the memory
    means = [
        values[rng.integers(count, size=(min(rows, _RESAMPLES - begin), count))].mean(1)
        for begin in range(0, _RESAMPLES, rows)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def compare(base: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """How a run differs from another in each metric that both have of the images of a set.

    Yields:
        'set', 'metric', 'run', the number of images or clips 'n', 'unit', and 'verdict'; if the
        metrics are comparable also 'mean' (run - base), and with enough images 'low' and 'high'.
    """
    for name in [name for name in base['images'] if name in run['images']]:
        own, other = base['images'][name], run['images'][name]
        metrics = dict.fromkeys(m for scores in own['images'].values() for m in scores)
        for metric in metrics:
            differences = _differences(own, other, metric)
            if not differences:
                continue
            unit = 'clip' if own['grouped'] else 'image'
            about = {'set': name, 'metric': metric, 'run': run['name'], 'n': len(differences)}
            options = [r['metric_options'].get(metric) for r in (base, run)]
            if options[0] != options[1]:
                verdict = {'verdict': 'not comparable: the options of the metric differ'}
            else:
                verdict = _verdict(differences, unit, (options[0] or {}).get('better', 'higher'))
            yield {**about, 'unit': unit, **verdict}


def _differences(own: Mapping, other: Mapping, metric: str) -> list[float]:
    """Of the images that both runs have scores of, or of the clips that these are from."""
    groups = defaultdict(list)
    for name in sorted(own['images'].keys() & other['images'].keys()):
        pair = [run['images'][name].get(metric) for run in (own, other)]
        if None not in pair:
            groups[name.partition('/')[0] if own['grouped'] else name].append(pair[1] - pair[0])
    return [float(np.mean(groups[group])) for group in sorted(groups)]


def _verdict(differences: Sequence[float], unit: str, better: str) -> dict[str, Any]:
    mean, low, high = paired_bootstrap(differences)
    if len(differences) < _FEWEST:
        return {'mean': mean, 'verdict': f'too few {unit}s to tell'}
    if low <= 0 <= high:
        verdict = 'not significant'
    else:
        verdict = 'better' if (mean > 0) == (better == 'higher') else 'worse'
    return {'mean': mean, 'low': low, 'high': high, 'verdict': verdict}
