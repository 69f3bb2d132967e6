"""Base class of all models: training steps, validation, checkpoints and resuming."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from basicsr.data import shard
from basicsr.metrics.metric import ImageScores
from basicsr.utils.dist_util import barrier, from_master, get_dist_info, share_buffers
from basicsr.utils.errors import UserError
from basicsr.utils.progress import note
from basicsr.utils.rng import seed_all

from .mixing import BatchMixing
from .optimization import evaluation_weights
from .preparation import channels_last_is_faster, warn_of_own_step
from .saving import SavedNetworks
from .step import Losses, Stepper
from .validation import SAMPLES, Result, SetRecord, Validation, log_scores

logger = logging.getLogger(__name__)


class BaseModel(SavedNetworks):
    """Base class of the models; a subclass adds networks and optimizers and defines the step.

    A label such as 'g' identifies the network ``net_g``, its average ``net_g_ema``, its optimizer
    ``optimizer_g``, the options ``network_g``, ``train.optim_g`` and ``path.pretrain_network_g``,
    and the files ``net_g_<iter>.pth``.

    Attributes:
        opt: The completed options.
        device: Where networks and batches live.
        labels: Labels of the networks, in the order in which they were added.
        averages: Weight averages of each network, by label.
        optimizers, schedulers: In the order in which a training state stores them.
        stepper: Performs the optimizer steps.
        log_dict: Scalars of the last step, as tensors on the device.
        batch_tensors: Names of the attributes that hold the batch.
        noticed_signal: Set by the training loop; returns the signal that asks the run to stop, or
            0. A validation checks it between two images.
        channels_last: Whether networks and batches are channels-last; None until it is chosen.
        sharding: The ``Sharding`` of ``train.sharding``, else None.
        samples_seen: Training samples seen so far, over all ranks.
        batch_size: Global batch size of the last step, over all ranks.
        metric_results: Scores of the last validation. Unset before the first one, because models
            with their own validation loop test for its presence.
        image_results, group_results: Scores of the last validation, by image and by clip.
        failed_images: Images that failed in the last validation, with the reason, by image name.
        panels: The first images of each set's last validation, (h, w, c) BGR uint8.
        set_records: What the report shows of each set's last validation.
    """

    metric_results: dict[str, float]
    batch_tensors: tuple[str, ...] = ('lq', 'gt')

    def __init__(self, opt: dict):
        super().__init__(opt)
        train_opt = opt.get('train') or {}
        self.stepper = Stepper(train_opt, self.device)
        self._has_stepped = False
        self.log_dict: Mapping[str, Any] = OrderedDict()
        self.noticed_signal: Callable[[], int] = lambda: 0
        self.samples_seen = self.batch_size = 0
        mixing = train_opt.get('mixing')
        self.mixing = BatchMixing(mixing, opt['manual_seed'], opt['rank']) if mixing else None
        self.best_metric_results: dict[str, dict[str, dict[str, Any]]] = {}
        self.image_results: dict[str, dict[str, float]] = {}
        self.failed_images: dict[str, str] = {}
        self.panels: list[dict[str, Any]] = []
        self.set_records: dict[str, SetRecord] = {}
        metrics = (opt.get('val') or {}).get('metrics') or {}
        self.score_image, self.told_undefined = ImageScores(metrics), set()

    # an iteration

    def begin_iteration(
        self, data: Mapping[str, Any], current_iter: int, batch_size: int = 0
    ) -> None:
        """Prepare an iteration: seed, set the learning rates, load and mix the batch.

        Args:
            batch_size: Global batch size, over all ranks.
        """
        note('step', current_iter)
        seed_all(self.opt['manual_seed'], get_dist_info()[0], current_iter)
        self.batch_size = batch_size
        self.samples_seen += batch_size
        self.update_learning_rate(current_iter, self.opt['train'].get('warmup_iter', -1))
        self.stepper.begin(self.trained_networks().values())
        self._has_moved_ema = False
        before = dict(vars(self))
        self.feed_data(data)
        self.mix_batch()
        fed = {
            name: len(value)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.ndim and value is not before.get(name)
        }
        self.batch_tensors = tuple(k for k, size in fed.items() if size == next(iter(fed.values())))

    def mix_batch(self) -> None:
        """Mix the samples of the batch before a step (``train.mixing``)."""
        if self.mixing is not None:
            raise UserError(f'train.mixing: {type(self).__name__} does not define mix_batch.')

    def feed_data(self, data: Mapping[str, Any]) -> None:
        """Move a batch to the device and store it in the attributes of ``batch_tensors``."""
        raise NotImplementedError(f'{type(self).__name__} defines no feed_data.')

    def optimize_parameters(self, current_iter: int) -> None:
        """Make one step on the batch."""
        raise NotImplementedError(f'{type(self).__name__} defines no optimize_parameters.')

    def input_of(self, label: str) -> Tensor:
        """The input of a network from the current batch; SWA recomputes norm statistics from it."""
        raise UserError(
            f'train.swa: net_{label} has batch norms, and {type(self).__name__} has no input_of '
            'that says what their statistics are taken from: add it, or set bn_batches: 0.'
        )

    def step(self, label: str, losses: Losses) -> OrderedDict[str, Tensor]:
        """Perform a step of ``optimizer_<label>``.

        Args:
            losses: Returns the losses by name for the batch or micro-batch that the batch
                attributes currently hold; values without gradient are only logged. A generator
                yields several such mappings; each is backpropagated before the next is computed.

        Returns:
            The values from ``losses``, detached and averaged over micro-batches, plus the gradient
            norm if it is clipped.
        """
        self._has_stepped = True
        nets = [self.network(name) for name in self._trained_by.get(label, [label])]
        if self.channels_last is None and label == next(iter(self.labels), label):
            inputs = self.stepper.first_inputs(self, nets[0], losses)
            bare = self.get_bare_model(nets[0])
            is_faster = channels_last_is_faster(bare, inputs, self.stepper.autocast())
            self.set_layout(from_master(is_faster))
        return self.stepper.step(self, label, nets, getattr(self, f'optimizer_{label}'), losses)

    def parts(self, *labels: str) -> Iterator[float]:
        """Split the batch into ``train.accumulate`` micro-batches, see ``Stepper``."""
        return self.stepper.micro_batches(self, [self.network(label) for label in labels])

    def autocast(self) -> torch.autocast:
        """The autocast context for networks and losses (``train.amp``)."""
        return self.stepper.autocast()

    def end_iteration(self, current_iter: int) -> None:
        """Finish an iteration: update the weight averages."""
        self.update_averages(current_iter)
        if not self._has_stepped:
            self._has_stepped = True  # warn only once
            warn_of_own_step(self)

    def reduce_loss_dict(self, loss_dict: Mapping[str, Any]) -> OrderedDict:
        """Detach the scalars of a step and leave them on the device.

        They are averaged over the ranks and converted to floats only when a line is logged.
        """
        return OrderedDict(
            (name, value.detach() if isinstance(value, Tensor) else value)
            for name, value in loss_dict.items()
        )

    def get_current_log(self) -> OrderedDict:
        """The scalars of the last step as floats, averaged over the ranks.

        Every rank has to call it.
        """
        self.stepper.check()
        if not self.log_dict:
            return OrderedDict()
        numbers = [
            torch.as_tensor(value, dtype=torch.float32, device=self.device).mean()
            for value in self.log_dict.values()
        ]
        stacked, world_size = torch.stack(numbers), get_dist_info()[1]
        if world_size > 1:
            dist.all_reduce(stacked)
            stacked /= world_size
        return OrderedDict(zip(self.log_dict, stacked.tolist(), strict=True))

    # results

    def results(self, data: Mapping[str, Any]) -> Iterator[Result]:
        """Yield the results for a batch of a validation or test set."""
        raise NotImplementedError(f'{type(self).__name__} defines no results.')

    def get_current_visuals(self) -> Mapping[str, Tensor]:
        """The images of the batch, on the CPU."""
        raise NotImplementedError(f'{type(self).__name__} defines no get_current_visuals.')

    def samples(self) -> Iterable[Result]:
        """Results without an input batch, such as generator samples, made at each validation."""
        return ()

    def validate(
        self,
        loaders: Iterable[Any],
        current_iter: int | str,
        tb_logger: Any,
        save_img: bool = False,
    ) -> None:
        """Validate on every set, and draw samples if the model provides ``samples``."""
        for loader in loaders:
            self.validation(loader, current_iter, tb_logger, save_img)
        if self.draws_samples:
            is_master = get_dist_info()[0] == 0
            with evaluation_weights(self.optimizers), self._whole_networks():
                validation = Validation(self, SAMPLES, current_iter, save_img)
                validation.run([None] if is_master else [], tb_logger)

    @property
    def draws_samples(self) -> bool:
        """Whether the model overrides ``samples``."""
        return type(self).samples is not BaseModel.samples

    def validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool = False
    ) -> None:
        """Restore and score the images of a set.

        Args:
            dataloader: Loader of single images, or clips.
            current_iter: The iteration, or in a test the name of the experiment.
            tb_logger: Writer for the scores; None writes them only to the text log.
            save_img: Write the results as images.
        """
        validate = self.dist_validation if self.opt['dist'] else self.nondist_validation
        self.failed_images = {}
        try:
            with evaluation_weights(self.optimizers):
                validate(dataloader, current_iter, tb_logger, save_img)
        except (FloatingPointError, ValueError) as error:
            has_own_loop = not type(self).nondist_validation.__module__.startswith('basicsr.')
            path = getattr(error, 'filename', None)
            if not has_own_loop or not (path or isinstance(error, FloatingPointError)):
                raise
            vars(self).pop('metric_results', None)
            self.failed_images = {Path(path).stem if path else 'an image': str(error)}
            logger.warning('The validation ends at an image, without scores: %s', error)

    def score_images(self, images: Mapping[str, np.ndarray], name: str) -> dict[str, float]:
        """The scores of one image, see ``ImageScores``; called by several threads at once."""
        return self.score_image(images, name)

    def nondist_validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool
    ) -> None:
        """Validate in one process."""
        name = dataloader.dataset.opt['name']
        Validation(self, name, current_iter, save_img).run(dataloader, tb_logger)

    def dist_validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool
    ) -> None:
        """Share the images among the ranks; the results equal those of one process."""
        rank, world_size = get_dist_info()
        with self._whole_networks():
            if type(self).nondist_validation is BaseModel.nondist_validation:
                name = dataloader.dataset.opt['name']
                validation = Validation(self, name, current_iter, save_img, rank, world_size)
                validation.run(shard(dataloader, rank, world_size), tb_logger)
                return
            try:
                if rank == 0:  # a subclass's own validation loop is not distributed
                    self.nondist_validation(dataloader, current_iter, tb_logger, save_img)
            finally:
                barrier()

    @contextmanager
    def _whole_networks(self) -> Iterator[None]:
        """Let every rank evaluate the networks independently, with identical weights."""
        with ExitStack() as contexts:
            for net in map(self.evaluated_network, self.labels):
                if self.sharding:
                    contexts.enter_context(self.sharding.whole(net))
                share_buffers(net)
            yield

    def _initialize_best_metric_results(self, dataset_name: str) -> None:
        """Initialize the best scores of a set for metrics that have none yet."""
        record = self.best_metric_results.setdefault(dataset_name, {})
        for name, options in (self.opt['val'].get('metrics') or {}).items():
            better = options.get('better', 'higher')
            worst = -math.inf if better == 'higher' else math.inf
            record.setdefault(name, {'better': better, 'val': worst, 'iter': -1})

    def _update_best_metric_result(
        self, dataset_name: str, metric: str, val: float, current_iter: int | str
    ) -> None:
        record = self.best_metric_results[dataset_name][metric]
        higher = record['better'] == 'higher'
        if val >= record['val'] if higher else val <= record['val']:
            record['val'], record['iter'] = val, current_iter

    def _log_validation_metric_values(
        self, current_iter: int | str, dataset_name: str, tb_logger: Any
    ) -> None:
        log_scores(self, current_iter, dataset_name, tb_logger)

    def trial_copy(self) -> Self:
        """A copy for trying a batch without changing this model."""
        return copy(self)
