"""What a training run keeps for its report: scores of each image, a few pictures, its options.

``scores.jsonl`` has a row per validation and set, and ``report.json`` the rest. Both stay small:
of each picture only the most detailed part is kept, at few iterations.
"""

import base64
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from basicsr.utils.figures import detailed_part
from basicsr.utils.img_util import cv2
from basicsr.utils.json_lines import read_rows
from basicsr.utils.misc import atomic_path
from basicsr.utils.text import printable

MOST_ITERATIONS = 16  # with a picture of each image, evenly spread


def record_validation(model: Any, current_iter: int) -> None:
    """Add the last validation of all sets to the files of the run.

    What they hold of this and of later iterations is replaced: a resumed run repeats them.
    """
    folder = Path(model.opt['path']['experiments_root'])
    _write_scores(folder / 'scores.jsonl', model.set_records, current_iter)
    file = folder / 'report.json'
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):  # there is none yet, or it is damaged
        before = dict(json.loads(file.read_bytes()))
    content = {
        'iter': current_iter,
        'options': model.opt,
        'rates': names_of_rates(model),
        'baselines': baselines_of(model),
        'pictures': _pictures(model.panels, before.get('pictures') or {}, current_iter),
        'hardest': {
            name: [picture(panel) for panel in record.hardest]
            for name, record in model.set_records.items()
        },
    }
    for record in model.set_records.values():
        record.hardest.clear()  # they are large
    with atomic_path(file, durable=False) as temporary:
        temporary.write_text(json.dumps(content, default=str), encoding='utf-8')


def names_of_rates(model: Any) -> list[str]:
    """What the learning rates ``lr``, ``lr_1``, … belong to: 'net_g', or 'net_g, group 1'."""
    names = []
    for optimizer in model.optimizers:
        labels = (
            key.removeprefix('optimizer_')
            for key, value in vars(model).items()
            if key.startswith('optimizer_') and value is optimizer
        )
        name, groups = f'net_{next(labels, "?")}', len(optimizer.param_groups)
        names += [f'{name}, group {i}' for i in range(groups)] if groups > 1 else [name]
    return names


def baselines_of(model: Any) -> dict[str, float]:
    """The mean scores of LQ enlarged by bicubic, by the tags of ``metrics.jsonl``."""
    return {
        f'metrics/{name}/{metric}': score
        for name, record in model.set_records.items()
        for metric, score in record.baseline.items()
    }


def _write_scores(file: Path, records: Mapping[str, Any], current_iter: int) -> None:
    rows = read_rows(file, 'iter') if file.exists() else []
    rows = [row for row in rows if row['iter'] < current_iter]
    for name, record in sorted(records.items()):  # in the same order after a resume
        images = {
            image: {metric: _number(score) for metric, score in scores.items()}
            for image, scores in record.scores.items()
        }
        about = {'iter': current_iter, 'set': name, 'grouped': record.is_grouped}
        rows.append({**about, 'images': images})
    with atomic_path(file, durable=False) as temporary:
        temporary.write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')


def _number(score: float) -> float | None:
    return round(score, 6) if math.isfinite(score) else None


def _pictures(panels: Any, before: Mapping[str, Any], current_iter: int) -> dict[str, Any]:
    """The pictures by set and image, with those of this iteration."""
    sets: dict[str, dict[str, Any]] = {}
    for panel in panels:
        name = printable(panel['name'])
        old = before.get(panel['set'], {}).get(name, {})
        new = picture(panel, old.get('box'))
        results = {int(i): uri for i, uri in old.get('results', {}).items()}
        results = {i: uri for i, uri in results.items() if i < current_iter}
        results[current_iter] = new.pop('result')
        sets.setdefault(panel['set'], {})[name] = {**new, 'results': _thinned(results)}
    return sets


def _thinned(results: dict[int, str]) -> dict[int, str]:
    """Without the one whose neighbours are closest, if there are too many: they stay spread."""
    numbers = list(results)
    if len(numbers) > MOST_ITERATIONS:
        gaps = [after - before for before, after in zip(numbers, numbers[2:], strict=False)]
        del numbers[1 + gaps.index(min(gaps))]
    return {number: results[number] for number in numbers}


def picture(panel: Mapping[str, Any], box: Any = None) -> dict[str, Any]:
    """The part of LQ (nearest neighbour), result and GT in a box, as data URIs.

    Args:
        box: Top, left and side; by default, or if it does not fit, the most detailed part.
    """
    height, width = panel['result'].shape[:2]
    if not box or box[0] + box[2] > height or box[1] + box[2] > width:
        box = detailed_part(panel.get('gt', panel['result']))
    top, left, side = box
    parts: dict[str, Any] = {'name': printable(panel['name']), 'box': list(box)}
    for key in ('lq', 'result', 'gt'):
        if key in panel:
            image = panel[key]
            if image.shape[:2] != (height, width):
                image = cv2.resize(image, (width, height), interpolation=cv2.INTER_NEAREST)
            parts[key] = _data_uri(image[top : top + side, left : left + side])
    return parts


def _data_uri(image: np.ndarray) -> str:
    image = image if image.ndim == 3 else image[..., None]
    channels = [0, 1, 2] if image.shape[2] >= 3 else [0, 0, 0]
    # WebP without loss is a fifth smaller, and takes 20 times as long.
    encoded = cv2.imencode('.png', np.ascontiguousarray(image[..., channels]))[1]
    return f'data:image/png;base64,{base64.b64encode(encoded).decode()}'
