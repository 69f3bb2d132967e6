"""Distributed validation: restore images, compute metrics, save images and log scores.

A model yields ``Result``s, any number per batch, or without a batch at all; this module does not
depend on how they are computed.
"""

import errno
import hashlib
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from basicsr.data.bad_images import BadItem
from basicsr.metrics.metric import ImageScores, SetScores, mean_of_groups
from basicsr.utils.dist_util import gather_lists
from basicsr.utils.figures import enlarge, side_by_side
from basicsr.utils.img_util import imwrite, tensor2img
from basicsr.utils.misc import best_effort
from basicsr.utils.parallel import map_in_order
from basicsr.utils.progress import Preempted, note
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.registry import METRIC_REGISTRY
from basicsr.utils.scalar_writers import ScalarWriter
from basicsr.utils.text import some

logger = logging.getLogger(__name__)

SAMPLES = 'samples'  # name of the set of results that a model makes without a batch
_HARDEST = 3  # images of a set that are kept to be shown


@dataclass
class Result:
    """One image that a model produced.

    Attributes:
        name: Name of the image, used for files.
        images: (c, h, w) or (1, c, h, w) in [0, 1], RGB, on any device: 'result', optionally 'lq',
            and optionally 'gt', which the result is compared with.
        group: The group of the image, such as its clip; the score of a set is the mean over its
            groups.
    """

    name: str
    images: Mapping[str, Tensor]
    group: str = ''


@dataclass
class _Item:
    """A result on its way from the network to its scores."""

    index: tuple[int, int]
    name: str
    group: str = ''
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    digest: str = ''
    problem: str = ''


class _Row(NamedTuple):
    """What all ranks are told of an image."""

    index: tuple[int, int]
    group: str
    name: str
    scores: dict[str, float]
    baseline: dict[str, float]
    digest: str
    problem: str


@dataclass
class SetRecord:
    """What the report of a run takes from the last validation of a set.

    Attributes:
        scores: Of each image, by its name and the metric.
        is_grouped: Whether the first part of a name is the group of the image.
        hardest: Panels of the images of this rank with the worst scores by the first metric.
        baseline: Mean scores of LQ enlarged by bicubic, from the first validation of this start.
        digest: Of a test, ``digest_of_set`` of its images; empty if some have no GT.
    """

    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    is_grouped: bool = False
    hardest: list[dict[str, Any]] = field(default_factory=list)
    baseline: dict[str, float] = field(default_factory=dict)
    digest: str = ''


def digest_of_pair(gt: np.ndarray, lq: np.ndarray) -> str:
    """SHA-256 of the pixels of two images (h, w, c), or gray ones (h, w), of 8 bits."""
    digest = hashlib.sha256()
    for img in (gt, lq):
        colours = img if img.ndim == 3 else np.stack([img] * 3, axis=2)
        digest.update(f'{colours.shape}'.encode())
        digest.update(np.ascontiguousarray(colours))
    return digest.hexdigest()


def digest_of_set(pairs: Iterable[str]) -> str:
    """SHA-256 of the digests of all pairs of a set, whatever their names and order."""
    return hashlib.sha256(' '.join(sorted(pairs)).encode()).hexdigest()


class Validation:
    """One validation pass over a set, or over the samples of a model that needs no set.

    Args:
        model: Yields the results and receives the scores.
        dataset_name: Name of the set.
        iteration: The iteration, or in a test the name of the experiment.
        save_img: Whether to write the results.
        rank, world_size: The images are split among the ranks; scores do not depend on their
            number.
    """

    def __init__(
        self,
        model: Any,
        dataset_name: str,
        iteration: int | str,
        save_img: bool,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.model, self.name, self.iteration = model, dataset_name, iteration
        self.save_img = save_img
        self.rank, self.world_size = rank, world_size
        self.options = model.opt.get('val') or {}
        metrics = self.options.get('metrics') or {}
        self.set_scores = SetScores(metrics, model.device)
        self.signals: list[int] = []
        self._is_first = model.is_train and dataset_name not in model.set_records
        # Not by metrics of users: they may be slow, or remember what they are called with.
        ours = {k: v for k, v in metrics.items() if not METRIC_REGISTRY.is_users(v['type'])}
        self._score_baseline = ImageScores(ours)
        self._hardest: list[tuple[float, dict[str, Any]]] = []
        self._gpu = torch.cuda.current_device() if model.device.type == 'cuda' else None

    def run(self, batches: Iterable[Any], tb_logger: Any) -> None:
        """Restore and score this rank's batches, and log the scores.

        Args:
            batches: Batches ``rank, rank + world_size, …`` of the set; None in place of a batch
                requests the model's samples.
            tb_logger: Writer for the scores; None writes them only to the text log.

        Raises:
            Preempted: A signal asks the run to stop.
        """
        model, rows, shown = self.model, [], 0
        model.panels = [panel for panel in model.panels if panel['set'] != self.name]
        threads = min(4, os.cpu_count() or 1)
        for item in map_in_order(self._finish, self._results(batches), threads):
            about = item.index, item.group, item.name, item.scores, item.baseline
            rows.append(_Row(*about, item.digest, item.problem))
            if item.problem:
                continue
            self.set_scores.update(item.images)
            panel = {'set': self.name, 'name': item.name, 'metrics': item.scores, **item.images}
            self._keep_hard(panel)
            if shown < self.options.get('log_images', 0):
                model.panels.append(panel)
                shown += 1
        model.noticed_signal()  # lets ranks that have more images stop too
        if signals := gather_lists(self.signals):
            raise Preempted(max(signals))
        self._warn_of_undefined()
        rows = sorted(gather_lists(rows), key=lambda row: row.index)
        whole = self.set_scores.merged(gather_lists(self.set_scores.parts()))
        self._collect(rows, whole)
        model._log_validation_metric_values(self.iteration, self.name, tb_logger)

    def _results(self, batches: Iterable[Any]) -> Iterator[_Item]:
        note('validation')
        wanted = self.options.get('pbar')
        hidden = True if self.rank > 0 else None if wanted is None else not wanted
        stays = not self.model.is_train  # in a training it stands below the bar of the iterations
        shown = progress_bar(batches, unit='image', disable=hidden, leave=stays)
        for position, data in enumerate(shown):
            note('validation')
            if number := self.model.noticed_signal():
                self.signals.append(number)
                return
            index = self.rank + position * self.world_size
            if isinstance(data, BadItem):
                yield _Item((index, 0), data['name'] or f'#{index}', problem=data['error'])
                continue
            results = self.model.samples() if data is None else self.model.results(data)
            for number, result in enumerate(results):
                name = f'{result.group}/{result.name}' if result.group else result.name
                yield _Item((index, number), name, result.group, result.images)

    def _finish(self, item: _Item) -> _Item:
        """Convert the tensors of a result to images, write and score them; runs in a thread."""
        if item.problem:
            return item
        if self._gpu is not None:  # a new thread defaults to the first GPU
            torch.cuda.set_device(self._gpu)
        tensors, item.tensors = item.tensors, {}
        if not tensors['result'].isfinite().all():
            item.problem = 'the network gives non-finite values'
            return item
        item.images = {key: tensor2img([value]) for key, value in tensors.items()}
        if self.save_img:
            try:
                imwrite(item.images['result'], self._file(item.name))
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # a full disk ends the run
                    raise
                item.problem = 'its result has too long a file name: shorten the name of the image'
                return item
        try:
            item.scores = self.model.score_images(item.images, item.name)
        except AssertionError as error:  # images of different shapes
            item.problem = str(error)
        if not self.model.is_train and item.images.keys() >= {'gt', 'lq'}:
            item.digest = digest_of_pair(item.images['gt'], item.images['lq'])
        if self._is_first and item.scores:
            item.baseline = self._baseline(item)
        return item

    def _baseline(self, item: _Item) -> dict[str, float]:
        """The scores of LQ enlarged by bicubic; none if it needs no enlargement."""
        lq, result = item.images.get('lq'), item.images['result']
        is_smaller = lq is not None and lq.shape[0] < result.shape[0]
        if lq is None or not is_smaller or lq.shape[2:] != result.shape[2:]:
            return {}
        enlarged = enlarge(lq, (result.shape[0], result.shape[1]))
        return self._score_baseline({**item.images, 'result': enlarged}, item.name)

    def _keep_hard(self, panel: dict[str, Any]) -> None:
        """Keep the images with the worst scores by the first metric that scores images."""
        for metric, options in (self.options.get('metrics') or {}).items():
            score = panel['metrics'].get(metric, math.nan)
            if math.isfinite(score) and self.model.is_train and self.rank == 0:
                goodness = -score if options.get('better') == 'lower' else score
                self._hardest.append((goodness, panel))
                self._hardest.sort(key=lambda item: item[0])
                del self._hardest[_HARDEST:]
            if metric in panel['metrics']:
                return

    def _file(self, name: str) -> str:
        opt = self.model.opt
        folder = Path(opt['path']['visualization'])
        if self.model.is_train:
            if sum(o.get('phase') == 'val' for o in (opt.get('datasets') or {}).values()) > 1:
                folder = folder / self.name  # sets may share image names
            return str(folder / name / f'{Path(name).name}_{self.iteration}.png')
        return str(folder / self.name / f'{name}_{self.options.get("suffix") or opt["name"]}.png')

    def _warn_of_undefined(self) -> None:
        """Warn once per metric of the first image without a score on any rank."""
        for metric, text in sorted(gather_lists(list(self.model.score_image.undefined.items()))):
            if metric not in self.model.told_undefined:
                self.model.told_undefined.add(metric)
                logger.warning('%s', text)

    def _collect(self, rows: list[_Row], whole: Mapping[str, float]) -> None:
        """Set the model's scores from those of all ranks."""
        model, scored = self.model, [row for row in rows if not row.problem]
        model.image_results = {row.name: row.scores for row in scored}
        model.failed_images = {row.name: row.problem for row in rows if row.problem}
        self._note(scored)
        model.metric_results, model.group_results = {}, defaultdict(dict)
        metrics = self.options.get('metrics') or {}
        if metrics:
            model._initialize_best_metric_results(self.name)
        if model.failed_images:
            self._report_failures()
            # A mean without them is not comparable with other validations, so it cannot be a best.
            metrics = {} if model.is_train else metrics
        for metric in metrics:
            score = whole[metric] if metric in whole else self._mean(metric, scored)
            if score is not None:
                model.metric_results[metric] = score
                model._update_best_metric_result(self.name, metric, score, self.iteration)
        if not rows:
            logger.warning('Validation %s: the set is empty.', self.name)

    def _note(self, rows: list[_Row]) -> None:
        """Set the model's record of this set."""
        records = self.model.set_records
        before = records.get(self.name, SetRecord()).baseline
        baseline = {}
        for metric in rows[0].baseline if rows and all(row.baseline for row in rows) else ():
            scores = [(row.group, row.baseline[metric]) for row in rows]
            if scores := [(group, score) for group, score in scores if math.isfinite(score)]:
                baseline[metric] = mean_of_groups(scores)[0]
        records[self.name] = SetRecord(
            self.model.image_results,
            any(row.group for row in rows),
            [panel for _, panel in self._hardest],
            baseline or before,
            digest_of_set(row.digest for row in rows) if all(row.digest for row in rows) else '',
        )

    def _mean(self, metric: str, rows: list[_Row]) -> float | None:
        """The score of a set; None if no image has one."""
        given = [(row.group, row.scores[metric]) for row in rows if metric in row.scores]
        scores = [(group, score) for group, score in given if not math.isnan(score)]
        if undefined := len(given) - len(scores):
            logger.info(
                '%s: NaN for %d of %d images, which are skipped.',
                *(metric, undefined, len(given)),
            )
        if not scores:
            if rows and not given and self.name != SAMPLES:
                logger.info('No GT: %s, which compares with it, is skipped.', metric)
            return None
        if equal := sum(math.isinf(score) for _, score in scores):
            logger.info('%s: %d of %d images equal the GT.', metric, equal, len(scores))
        mean, groups = mean_of_groups(scores)
        for group, value in groups.items() if set(groups) != {''} else ():
            self.model.group_results[group][metric] = value
        return mean

    def _report_failures(self) -> None:
        failed = self.model.failed_images
        named = [f'{name} ({problem})' for name, problem in failed.items()]
        logger.warning(
            'Validation %s: %d images have no result%s: %s',
            *(self.name, len(named), ', so it has no scores' if self.model.is_train else ''),
            some(named),
        )


def log_scores(model: Any, iteration: int | str, dataset_name: str, tb_logger: Any) -> None:
    """Log the scores of a validation, and show its first images in TensorBoard and wandb."""
    text = f'Validation {dataset_name}\n'
    for metric, value in model.metric_results.items():
        text += f'\t # {metric}: {value:.4f}'
        if model.is_train:
            best = model.best_metric_results[dataset_name][metric]
            text += f'\tBest: {best["val"]:.4f} @ {best["iter"]} iter'
        text += '\n'
    for group, scores in getattr(model, 'group_results', {}).items():
        values = ', '.join(f'{metric} {value:.4f}' for metric, value in scores.items())
        text += f'\t   {group}: {values}\n'
    logger.info(text)
    if tb_logger is None:
        return
    step = int(iteration)
    for metric, value in model.metric_results.items():
        tb_logger.add_scalar(f'metrics/{dataset_name}/{metric}', value, step)
    if isinstance(tb_logger, ScalarWriter):
        with best_effort('Images of a validation'):
            for panel in model.panels:
                if panel['set'] == dataset_name:
                    tb_logger.add_image(
                        f'{dataset_name}/{panel["name"]}', side_by_side(panel), step
                    )
    tb_logger.flush()
