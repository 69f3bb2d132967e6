"""Plot the results of a run: side-by-side comparisons, training curves, samples, histograms."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .img_util import cv2
from .json_lines import read_rows
from .matlab_functions import imresize
from .misc import atomic_path
from .text import printable

# A restored image: 'name', 'metrics', and 'lq', 'result' and perhaps 'gt', all uint8 BGR.
Panel = Mapping[str, Any]


def enlarge(lq: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bicubic enlargement of a uint8 image to (height, width); what the network has to beat."""
    if lq.shape[:2] == size:
        return lq
    scale = size[0] / lq.shape[0]
    if scale == size[1] / lq.shape[1]:
        large = imresize(lq.astype(np.float64), scale)
    else:
        large = cv2.resize(lq, size[::-1], interpolation=cv2.INTER_CUBIC).astype(np.float64)
    return np.clip(np.rint(large), 0, 255).astype(np.uint8)


def side_by_side(panel: Panel, limit: int = 512) -> np.ndarray:
    """LQ (nearest neighbour), result and GT, as far as given, in one (h, w, 3) RGB image.

    Images larger than ``limit`` pixels are cropped to the centre.
    """
    height, width = panel['result'].shape[:2]
    images = [panel[key] for key in ('result', 'gt') if key in panel]
    if 'lq' in panel:
        size = width, height
        images.insert(0, cv2.resize(panel['lq'], size, interpolation=cv2.INTER_NEAREST))
    top, left = (max(side - limit, 0) // 2 for side in (height, width))
    window = slice(top, top + limit), slice(left, left + limit)
    return np.concatenate([_rgb(image[window]) for image in images], axis=1)


def _rgb(image: np.ndarray) -> np.ndarray:
    image = image if image.ndim == 3 else image[..., None]
    channels = [2, 1, 0] if image.shape[2] >= 3 else [0, 0, 0]
    return np.ascontiguousarray(image[..., channels])


def write_comparison(
    path: str | Path,
    panels: Sequence[Panel],
    score: Callable[[dict[str, np.ndarray], str], Mapping[str, float]],
) -> None:
    """Write one row per image: the whole result, then close-ups of its most detailed part.

    The close-ups are of LQ enlarged by bicubic interpolation (LQ itself if it is as large as the
    result), of the result and of GT. Scores in the captions are those of the whole images. A
    generated sample, which has no LQ, is shown by itself.

    Args:
        score: Scores the enlarged LQ, given {'result', 'gt'} and the name of the image.
    """
    columns = 4 if any('gt' in panel for panel in panels) else 3
    figure = _figure(4 * columns, 4.4 * len(panels))
    axes = figure.subplots(len(panels), columns, squeeze=False)
    for row, panel in zip(axes, panels, strict=True):
        _draw_comparison(row, panel, score)
    _write(figure, path)


def _draw_comparison(axes: Sequence[Any], panel: Panel, score: Callable) -> None:
    from matplotlib.patches import Rectangle

    result, gt = panel['result'], {'gt': panel['gt']} if 'gt' in panel else {}
    if 'lq' not in panel:
        axes[0].imshow(_rgb(result), interpolation='antialiased')
        axes[0].set_title(printable(panel['name']), fontsize=10, parse_math=False)
        for axis in axes:
            axis.set_axis_off()
        return
    before = enlarge(panel['lq'], result.shape[:2])
    name = 'input' if before is panel['lq'] else 'bicubic'
    scores = score({'result': before, **gt}, panel['name'])
    top, left, side = detailed_part(gt.get('gt', result))
    part = slice(top, top + side), slice(left, left + side)
    shown = {
        f'{printable(panel["name"])}\nresult, {result.shape[1]} x {result.shape[0]}': result,
        f'{name}\n{_caption(scores)}': before[part],
        f'result\n{_caption(panel["metrics"])}': result[part],
    }
    if gt:
        shown['ground truth\n'] = gt['gt'][part]
    for axis, (caption, image) in zip(axes, shown.items(), strict=False):
        axis.imshow(_rgb(image), interpolation='antialiased' if image is result else 'nearest')
        axis.set_title(caption, fontsize=10, parse_math=False)
    axes[0].add_patch(Rectangle((left, top), side, side, fill=False, edgecolor='red', linewidth=1))
    for axis in axes:
        axis.set_axis_off()


def detailed_part(image: np.ndarray, side: int = 128) -> tuple[int, int, int]:
    """Top, left and side of the square of an image with the most edges."""
    side = min(side, *image.shape[:2])
    grey = image if image.ndim == 2 else image.mean(2).astype(np.float32)
    edges = np.abs(cv2.Laplacian(grey.astype(np.float32), cv2.CV_32F))
    sums = cv2.integral(edges)
    inside = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    top, left = np.unravel_index(inside.argmax(), inside.shape)
    return int(top), int(left), side


def _caption(scores: Mapping[str, float]) -> str:
    units = {'psnr': ' dB'}
    return '  '.join(
        f'{name.upper()} {value:.2f}{units[name]}'
        if name in units
        else f'{name.upper()} {value:.4f}'
        for name, value in scores.items()
    )


def write_curves(
    path: str | Path,
    metrics_file: str | Path,
    rates: Sequence[str] = (),
    baselines: Mapping[str, float] | None = None,
) -> bool:
    """Draw losses, scores and learning rates of a ``metrics.jsonl``; False if it has none.

    Args:
        rates: What the learning rates ``lr``, ``lr_1``, … belong to, such as 'net_g'.
        baselines: Scores of LQ enlarged by bicubic, by the tag of their metric.
    """
    names = {f'lr_{i}' if i else 'lr': name for i, name in enumerate(rates)}
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in read_rows(metrics_file, 'iter'):
        for tag, value in row.items():
            if value is not None and (tag.startswith(('losses/', 'metrics/')) or _is_rate(tag)):
                curves[tag].append((row['iter'], value))
    groups: dict[str, list[str]] = {}
    for tag in sorted(curves, key=lambda tag: (not tag.startswith('losses/'), _is_rate(tag))):
        kind = 'loss' if tag.startswith('losses/') else tag.rpartition('/')[2]
        groups.setdefault('learning rate' if _is_rate(tag) else kind, []).append(tag)
    if not any(tag.startswith(('losses/', 'metrics/')) for tag in curves):
        return False
    figure = _figure(5 * len(groups), 3.8)
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, (title, tags) in zip(axes, groups.items(), strict=True):
        _draw_curves(axis, title, {names.get(tag, tag): curves[tag] for tag in tags})
        for number, tag in enumerate(tags):
            if tag in (baselines or {}):
                label = f'{tag.split("/")[1]}, bicubic'
                axis.axhline(baselines[tag], ls='--', lw=1, color=f'C{number}', label=label)
        axis.legend()
    _write(figure, path)
    return True


def _is_rate(tag: str) -> bool:
    return tag == 'lr' or tag.startswith('lr_')


def _draw_curves(axis: Any, title: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for number, (tag, points) in enumerate(curves.items()):
        iterations, values = (np.array(column) for column in zip(*points, strict=True))
        name = tag.split('/')[1] if '/' in tag else tag
        few = len(values) <= 20
        if title == 'loss' and not few:  # single steps are noisy: they stay visible behind
            axis.plot(iterations, values, alpha=0.25, color=f'C{number}')
            values = smoothed(values)
        axis.plot(iterations, values, marker='.' if few else '', label=name, color=f'C{number}')
    # Some adversarial losses are negative, and would vanish from a logarithmic axis.
    is_positive = all(value > 0 for points in curves.values() for _, value in points)
    label = {'psnr': 'PSNR (dB)'}.get(title, title)
    axis.set(xlabel='iteration', ylabel=label, title=title)
    if title == 'loss' and is_positive:
        axis.set_yscale('log')
    else:
        axis.yaxis.set_major_formatter('{x:.8g}')
    axis.grid(alpha=0.3)


def smoothed(values: np.ndarray, share: float = 0.05) -> np.ndarray:
    """Trailing moving average, over a window of a share of all values."""
    window = max(round(share * len(values)), 1)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def write_contact_sheet(path: str | Path, panels: Sequence[Panel], columns: int = 4) -> None:
    """Write samples in a grid: GT beside LQ (nearest neighbour), the name above, a text below.

    Args:
        panels: Each with 'name', 'gt', 'lq' (uint8 BGR) and 'text', whose columns are kept.
        columns: Samples in a row.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    # In inches: images 4.9 x 2.45 in cells of 5.2 x 4, whose lower part is for the text.
    width, height = 5.2 * columns, 4.0 * rows
    figure = _figure(width, height)
    figure.set_layout_engine('none')
    figure.subplots_adjust(
        left=0.15 / width,
        right=1 - 0.15 / width,
        top=1 - 0.35 / height,
        bottom=1.2 / height,
        wspace=0.3 / 4.9,
        hspace=1.55 / 2.45,
    )
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        size = panel['gt'].shape[1::-1]
        lq = cv2.resize(panel['lq'], size, interpolation=cv2.INTER_NEAREST)
        gap = np.full((size[1], max(size[0] // 64, 1), 3), 255, np.uint8)
        axis.imshow(np.concatenate([_rgb(panel['gt']), gap, _rgb(lq)], axis=1))
        axis.set_title(printable(panel['name']), fontsize=11, loc='left', parse_math=False)
        below = {'transform': axis.transAxes, 'va': 'top', 'linespacing': 1.3}
        axis.text(0, -0.03, panel['text'], family='monospace', fontsize=9, **below)
    for axis in figure.axes:
        axis.set_axis_off()
    _write(figure, path)


def write_histograms(
    path: str | Path, parameters: Mapping[str, Mapping[str, Sequence[Any]]], columns: int = 4
) -> None:
    """Draw how often each value of each parameter occurs: histograms of floats, bars of others.

    Args:
        parameters: By title, then by the name of a series, its values.
        columns: Plots in a row.
    """
    rows = -(-len(parameters) // columns)
    names = dict.fromkeys(name for series in parameters.values() for name in series)
    colours = {name: f'C{index}' for index, name in enumerate(names)}
    figure = _figure(4.2 * columns, 2.8 * rows)
    figure.set_layout_engine('constrained', h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis in axes[len(parameters) :]:
        axis.set_axis_off()
    legend: dict[str, Any] = {}
    for axis, (title, series) in zip(axes, parameters.items(), strict=False):
        values = sorted({value for drawn in series.values() for value in drawn})
        draw = _draw_numbers if isinstance(values[0], float) else _draw_choices
        draw(axis, series, values, colours)
        axis.set_title(title, fontsize=11)
        axis.tick_params(labelsize=8)
        axis.spines[['top', 'right']].set_visible(False)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend, loc='outside upper left', ncols=len(legend))
    _write(figure, path)


def _draw_numbers(axis: Any, series: Mapping, values: Sequence[float], colours: Mapping) -> None:
    bins = np.histogram_bin_edges(values, 25)
    for name, drawn in series.items():
        colour = {'facecolor': (colours[name], 0.25), 'edgecolor': colours[name]}
        axis.hist(drawn, bins, label=name, histtype='stepfilled', linewidth=1.2, **colour)


def _draw_choices(axis: Any, series: Mapping, values: Sequence, colours: Mapping) -> None:
    width = 0.8 / len(series)
    for index, (name, drawn) in enumerate(series.items()):
        places = np.arange(len(values)) + (index - (len(series) - 1) / 2) * width
        counts = [drawn.count(value) for value in values]
        axis.barh(places, counts, width, label=name, color=colours[name], alpha=0.7)
    axis.set_yticks(np.arange(len(values)), values)
    axis.invert_yaxis()


def _figure(width: float, height: float) -> Any:
    # Without pyplot: no global state, no display. A notebook's backend, which processes inherit,
    # may not be installed here.
    backend = os.environ.pop('MPLBACKEND', None)
    from matplotlib.figure import Figure

    if backend is not None:
        os.environ['MPLBACKEND'] = backend
    return Figure(figsize=(width, height), dpi=100, layout='tight')


def _write(figure: Any, path: str | Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format='png')
