"""Score checkpoints on test sets, and put the scores into one table with their protocol."""

import csv
import io
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from basicsr.data.data_util import list_images
from basicsr.metrics.files import pair_names
from basicsr.metrics.metric import ImageScores
from basicsr.models.restore_files import find_network, restore_image, shape_of
from basicsr.models.validation import digest_of_pair, digest_of_set
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import img2tensor, read_unchanged, tensor2img
from basicsr.utils.matlab_functions import imresize, reduce_image
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.text import some
from basicsr.utils.weights import describe_weights

logger = logging.getLogger(__name__)

METRICS = {'psnr': 'PSNR', 'ssim': 'SSIM'}
_DIGITS = {'psnr': 2, 'ssim': 4}
_SHOWN = 8  # digits of a hash in a table

Scores = Mapping[str, float]


class Protocol(NamedTuple):
    """How images are restored and scored; only scores of one protocol can be compared.

    Attributes:
        scale: Of the networks.
        colour: 'Y' (luma of BT.601, as MATLAB has it) or 'RGB'.
        border: Pixels that are cropped from each side.
        tile: Side of tiles in LQ pixels, or 0.
        ensemble: Whether eight flips and rotations are averaged.
        precision: Type of the numbers of the network.
    """

    scale: int
    colour: str = 'Y'
    border: int = 4
    tile: int = 0
    ensemble: bool = False
    precision: str = 'float32'

    def __str__(self) -> str:
        tile, ensemble = self.tile or 'none', 'of 8' if self.ensemble else 'none'
        return (
            f'x{self.scale}, {self.colour}, border {self.border}, rounded to 8 bits, tile {tile}, '
            f'ensemble {ensemble}, {self.precision}'
        )


@dataclass
class Row:
    """The scores of one checkpoint.

    Attributes:
        name: In the table.
        weights: Key in the file, and its hash.
        images: Scores of each image of each set.
    """

    name: str
    weights: str
    images: dict[str, dict[str, Scores]] = field(default_factory=dict)

    def mean(self, dataset: str, metric: str) -> float | None:
        """The mean over the images of a set that have a finite score."""
        found = [scores[metric] for scores in self.images[dataset].values() if metric in scores]
        finite = [value for value in found if value is not None and math.isfinite(value)]
        return sum(finite) / len(finite) if finite else None


class TestSet:
    """GT images of a folder, and LQ images of another or made by MATLAB's bicubic reduction.

    Args:
        text: ``NAME=GT`` or ``NAME=GT:LQ``.

    Raises:
        FileNotFoundError: There is no such folder, or no image in it.
        ValueError: The text has another form, GT images have no LQ image, or LQ images of scale 1
            are not given.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, text: str, scale: int):
        self.name, equals, folders = text.partition('=')
        gt, _, lq = folders.partition(':')
        if not (equals and self.name and gt):
            raise UserError(f"'{text}' names no test set: write NAME=GT or NAME=GT:LQ.")
        self.gt, self.lq, self._scale = Path(gt), Path(lq) if lq else None, scale
        if scale == 1 and not lq:
            raise UserError(
                f'{text}: the network keeps the size, so name LQ images too: NAME=GT:LQ.'
            )
        names = list_images(self.gt)
        if not names:
            raise FileNotFoundError(f'{gt} holds no images.')
        # LQ images of published sets often end in x4.
        self._pairs = pair_names(names, list_images(self.lq)) if self.lq else dict.fromkeys(names)
        self._digests: list[str] = []

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def digest(self) -> str:
        """``digest_of_set`` of the images, once they have been read."""
        return digest_of_set(self._digests)

    @property
    def source(self) -> str:
        """What the images are, once they have been read."""
        made = f'LQ of {self.lq}' if self.lq else "LQ by MATLAB's bicubic reduction"
        return f'{self.name}: {len(self)} images, {made}, pixels {self.digest[:_SHOWN]}'

    def __iter__(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Name, GT and LQ of each image; GT is cropped to a multiple of the scale."""
        self._digests = []
        for name, lq_name in self._pairs.items():
            gt = self._read(self.gt / name)
            height, width = (side - side % self._scale for side in gt.shape[:2])
            gt = gt[:height, :width]
            if self.lq and lq_name:
                lq = self._read(self.lq / lq_name)
                if lq.shape[:2] != (height // self._scale, width // self._scale):
                    raise UserError(
                        f'{self.lq / lq_name} has {lq.shape[1]} x {lq.shape[0]} pixels, and '
                        f'{self.gt / name} {width} x {height}: that is not x{self._scale}.'
                    )
            else:
                lq = reduce_image(gt, self._scale)
            self._digests.append(digest_of_pair(gt, lq))
            yield Path(name).with_suffix('').as_posix(), gt, lq

    def _read(self, file: Path) -> np.ndarray:
        img = read_unchanged(file)
        if img.dtype != np.uint8:
            raise UserError(f'{file} has {img.dtype}; tables are of images with 8 bits.')
        return np.ascontiguousarray(img[..., :3]) if img.ndim == 3 else img


def load_networks(models: Sequence[str], key: str | None = None) -> dict[str, nn.Module]:
    """The network of each checkpoint.

    Args:
        key: Weights of the files; None: ``params_ema`` where there are some.

    Raises:
        ValueError: They have different scales.
    """
    nets = {model: find_network(model, param_key=key) for model in models}
    scales = {model: shape_of(net).scale for model, net in nets.items()}
    if len(set(scales.values())) > 1:
        found = ', '.join(f'{model} by {scale}' for model, scale in scales.items())
        raise UserError(f'The networks enlarge by different factors: {found}.')
    return nets


def score_checkpoints(
    networks: Mapping[str, nn.Module],
    sets: Sequence[str],
    protocol: Protocol,
    key: str | None = None,
) -> tuple[list[Row], list[TestSet]]:
    """Restore and score every set by every checkpoint.

    The first row is bicubic interpolation, or LQ itself if the networks keep the size.

    Args:
        networks: By their checkpoints, as ``load_networks`` gives them with this key.
        protocol: Its scale is that of the networks.
    """
    scorer = ImageScores(_metrics(protocol))
    tests = [TestSet(text, protocol.scale) for text in sets]
    if len({test.name for test in tests}) < len(tests):
        raise UserError(f'Two sets have one name: {" ".join(sets)}. Name one of them otherwise.')
    rows = [Row('bicubic' if protocol.scale > 1 else 'LQ', '-')]
    rows += [Row(_name_of(m, [*networks]), describe_weights(m, key)) for m in networks]
    nets = [None, *networks.values()]
    for test in tests:
        for name, gt, lq in progress_bar(test, total=len(test), unit='image', disable=None):
            for row, net in zip(rows, nets, strict=True):
                result = _restored(net, lq, protocol)
                scores = scorer({'result': result, 'gt': gt}, name)
                row.images.setdefault(test.name, {})[name] = scores
    return rows, tests


def rows_of_results(
    files: Iterable[str], protocol: Protocol | None, known: Mapping[str, str]
) -> tuple[list[Row], Protocol | None, dict[str, str]]:
    """The rows of ``results.json`` files of ``basicsr test``, their protocol, digests by set.

    Args:
        protocol: That of other rows.
        known: Digests of the sets of other rows.

    Raises:
        ValueError: A file has another protocol, or other images in a set of the same name.
    """
    rows, digests = [], dict(known)
    for file in files:
        content = _content_of(file)
        own = _protocol_of(content, file)
        if protocol is not None and own != protocol:
            differ = [f for f in own._fields if getattr(own, f) != getattr(protocol, f)]
            raise UserError(
                f'{file} cannot be in one table with the others: {own}; not {protocol}. '
                f'They differ in {", ".join(differ)}.'
            )
        protocol = own
        row = Row(content['name'], content['protocol'].get('weights') or '-')
        for name, result in content['sets'].items():
            digest = result.get('digest')
            if not digest or digests.setdefault(name, digest) != digest:
                raise UserError(
                    f'{file}: the GT or LQ images of {name} are not those of the other rows: they '
                    f'differ in pixels or number ({some(list(result["images"]))}).'
                    if digest
                    else f'{file}: not every image of {name} was scored with GT and LQ.'
                )
            by_type = {
                kind: metric
                for metric, options in content['metric_options'].items()
                for kind in METRICS
                if options['type'] == f'calculate_{kind}'
            }
            row.images[name] = {
                image: {kind: scores[metric] for kind, metric in by_type.items()}
                for image, scores in result['images'].items()
            }
        rows.append(row)
    return rows, protocol, digests


def _content_of(file: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding='utf-8'))
    except ValueError as error:
        raise UserError(f'{file} is no results.json of a test: {error}') from error
    if not (isinstance(content, dict) and isinstance(content.get('sets'), dict)):
        raise UserError(f'{file} is no results.json of a test: it has no sets.')
    return content


def _protocol_of(content: Mapping[str, Any], file: str) -> Protocol:
    options = [
        o
        for o in (content.get('metric_options') or {}).values()
        if o['type'] in [f'calculate_{kind}' for kind in METRICS]
    ]
    kinds = {(o.get('crop_border'), o.get('test_y_channel', False)) for o in options}
    if 'protocol' not in content or len(kinds) != 1:
        raise UserError(
            f'{file} has no scores of one protocol: it must be written by this version, with PSNR '
            'or SSIM of one crop_border and test_y_channel.'
        )
    ((border, is_luma),) = kinds
    given = content['protocol']
    return Protocol(
        *(given['scale'], 'Y' if is_luma else 'RGB', border),
        *(given['tile'] or 0, given['ensemble'], given['precision']),
    )


def _metrics(protocol: Protocol) -> dict[str, dict[str, Any]]:
    options = {'crop_border': protocol.border, 'test_y_channel': protocol.colour == 'Y'}
    return {kind: {'type': f'calculate_{kind}', **options} for kind in METRICS}


@torch.no_grad()
def _restored(net: nn.Module | None, lq: np.ndarray, protocol: Protocol) -> np.ndarray:
    """The 8-bit result of a network, or of bicubic interpolation."""
    if net is None:
        enlarged = imresize(img2tensor(lq.astype(np.float32) / 255), protocol.scale)
        return tensor2img(enlarged)
    return restore_image(net, lq, tile=protocol.tile, ensemble=protocol.ensemble)


def _name_of(model: str, models: Sequence[str]) -> str:
    """A short name of a checkpoint that no other has: that of its run, or its path."""
    file = Path(model)
    short = file.parent.parent.name if file.parent.name == 'models' else file.stem
    same = [m for m in models if m != model and short in (Path(m).parent.parent.name, Path(m).stem)]
    return str(file) if same or not short else short


def table(rows: Sequence[Row], notes: Sequence[str], style: str = 'markdown') -> str:
    """The table; the best of each column is bold.

    Args:
        notes: Lines below it: protocol and sets.
        style: 'markdown', 'latex' or 'csv'.
    """
    sets = list(dict.fromkeys(name for row in rows for name in row.images))
    columns = [
        (name, kind)
        for name in sets
        for kind in METRICS
        if any(name in row.images and row.mean(name, kind) is not None for row in rows)
    ]
    means = [[row.mean(n, k) if n in row.images else None for n, k in columns] for row in rows]
    best = [max(v for v in column if v is not None) for column in zip(*means, strict=True)]
    heads = ['network', 'weights', *(f'{name} {METRICS[kind]}' for name, kind in columns)]
    lines = []
    for row, values in zip(rows, means, strict=True):
        cells = [
            '-' if v is None else _cell(f'{v:.{_DIGITS[kind]}f}', v == top, style)
            for v, top, (_, kind) in zip(values, best, columns, strict=True)
        ]
        lines.append([row.name, row.weights, *cells])
    return {'markdown': _markdown, 'latex': _latex, 'csv': _csv}[style](heads, lines, notes)


def _cell(text: str, is_best: bool, style: str) -> str:
    bold = {'markdown': '**{}**', 'latex': r'\textbf{{{}}}', 'csv': '{}'}[style]
    return bold.format(text) if is_best else text


def _markdown(heads: list[str], lines: list[list[str]], notes: Sequence[str]) -> str:
    rule = ['---', '---', *['---:'] * (len(heads) - 2)]
    text = [f'| {" | ".join(cells)} |' for cells in (heads, rule, *lines)]
    return '\n'.join([*text, '', *(f'* {note}' for note in notes), ''])


def _latex(heads: list[str], lines: list[list[str]], notes: Sequence[str]) -> str:
    def escaped(text: str) -> str:
        return ''.join(f'\\{c}' if c in '_%&#$' else c for c in text)

    body = [' & '.join(map(escaped, cells)) + r' \\' for cells in (heads, *lines)]
    begin = rf'\begin{{tabular}}{{ll{"r" * (len(heads) - 2)}}}'
    rows = [r'\toprule', body[0], r'\midrule', *body[1:], r'\bottomrule']
    return '\n'.join([*(f'% {note}' for note in notes), begin, *rows, r'\end{tabular}', ''])


def _csv(heads: list[str], lines: list[list[str]], notes: Sequence[str]) -> str:
    out = io.StringIO()
    out.writelines(f'# {note}\n' for note in notes)
    csv.writer(out, lineterminator='\n').writerows([heads, *lines])
    return out.getvalue()
