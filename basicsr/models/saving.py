"""Write the networks and the training state of a model, and resume from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from basicsr.utils.background_saver import BackgroundSaver, copy_to_cpu
from basicsr.utils.checkpoint import description
from basicsr.utils.checkpoint_series import CheckpointSeries, set_aside_later
from basicsr.utils.dist_util import from_master, get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.safetensors_file import DESCRIPTION, require_safetensors

from . import state
from .averaging import PowerAverages
from .networks import Networks
from .optimization import evaluation_weights
from .posthoc import drop_later_snapshots, snapshot_file


class SavedNetworks(Networks):
    """Networks that are saved in the folder of the run, and resumed from there.

    Attributes:
        saver: A BackgroundSaver, set by the training loop so that checkpoints do not block it;
            None writes them synchronously.
        checkpoints: Writes the files of the run, and prunes them.
    """

    best_metric_results: dict[str, dict[str, dict[str, Any]]]

    def __init__(self, opt: dict):
        super().__init__(opt)
        self.saver: BackgroundSaver | None = None
        self._described: dict[str, dict[str, Any]] = {}  # by label
        options = opt.get('logger') or {}
        self.checkpoints = CheckpointSeries(
            opt['path'].get('models', ''),  # a test writes none
            options.get('keep_last'),
            options.get('save_checkpoint_freq', 1),
            (opt.get('train') or {}).get('total_iter'),
        )
        self._network_suffix = f'.{options.get("checkpoint_format", "pth")}'
        if self._network_suffix == '.safetensors':
            require_safetensors()  # fail now instead of at the first checkpoint
        self._best = options.get('keep_best')

    def save(self, epoch: int, current_iter: int) -> None:
        """Write the networks and, unless ``current_iter`` is -1, the training state."""
        if not self.labels:
            raise NotImplementedError(
                f'{type(self).__name__} has neither networks from add_network, which are saved '
                'automatically, nor its own save.'
            )
        for label in self.labels:
            self.save_label(label, current_iter)
        self.save_training_state(epoch, current_iter)

    def save_label(self, label: str, current_iter: int | str) -> None:
        """Write ``net_<label>_<iter>`` with its averages."""
        nets, keys = [self.network(label)], ['params']
        for average in self.averages.get(label, ()):
            if average.weights is not None:
                nets, keys = [*nets, average.weights], [*keys, average.key]
        self.save_network(nets, f'net_{label}', current_iter, keys)

    def save_network(
        self,
        net: nn.Module | list[nn.Module],
        net_label: str,
        current_iter: int | str,
        param_key: str | list[str] = 'params',
    ) -> None:
        """Write one or several networks into ``<net_label>_<iter or latest>.pth``.

        Every rank has to call it, and rank 0 writes. With ``logger.checkpoint_format:
        safetensors`` the file holds one network, with the plain names that other programs expect:
        the average if there is one, else the first. Several are then also in a ``.pth``.

        Args:
            net: A network, or a list such as [net_g, net_g_ema].
            net_label: Such as 'net_g'.
            current_iter: -1 means 'latest'; a string is used as is.
            param_key: Key or keys of the file.
        """
        nets = net if isinstance(net, list) else [net]
        keys = param_key if isinstance(param_key, list) else [param_key]
        if len(nets) != len(keys):
            raise UserError(f'{len(nets)} networks need as many param_keys, got {keys}.')
        content = {
            key: dict(self.get_bare_model(n).state_dict())
            for key, n in zip(keys, nets, strict=True)
        }
        content |= self._description(net_label.removeprefix('net_'))
        name = f'{net_label}_{"latest" if current_iter == -1 else current_iter}'
        path = Path(self.opt['path']['models']) / f'{name}{self._network_suffix}'
        if len(keys) > 1 and path.suffix == '.safetensors':
            self._write(content, path.with_suffix('.pth'))
            others = {*keys} - {'params_ema' if 'params_ema' in keys else keys[0]}
            content = {key: value for key, value in content.items() if key not in others}
        self._write(content, path)

    def _description(self, label: str) -> dict[str, Any]:
        """The description of a network, as an entry of its file."""
        options = self.opt.get(f'network_{label}')
        if label not in self._described:
            described = description(options, self.opt.get('scale')) if options else None
            self._described[label] = {DESCRIPTION: described} if described else {}
        return self._described[label]

    def _write(self, content: dict, path: Path) -> None:
        if self.sharding:
            content = self.sharding.gathered(content)
        if get_dist_info()[0] > 0:
            return
        if self.saver is not None:
            self.saver.save(content, path, self.checkpoints.write)
        else:
            self.checkpoints.write(copy_to_cpu(content), path)

    def save_training_state(self, epoch: int, current_iter: int) -> None:
        """Write ``<iter>.state``: everything a resume needs besides the networks."""
        if current_iter == -1:
            return
        for label, averages in self.averages.items():
            for average in averages:
                if isinstance(average, PowerAverages):
                    file = snapshot_file(self.opt['path']['models'], current_iter, label)
                    self._write(average.state_dict() | self._description(label), file)
        folder = Path(self.opt['path']['training_states'])
        self._write(
            state.training_state(self, epoch, current_iter), folder / f'{current_iter}.state'
        )

    def save_best(self, current_iter: int) -> None:
        """Keep the best checkpoint after a validation (``logger.keep_best``).

        Every rank has to call it.
        """
        if self._best:
            record = self.best_metric_results.get(self._best['dataset'], {})
            best = record.get(self._best['metric'], {}).get('iter')
            if from_master(best == current_iter):
                with evaluation_weights(self.optimizers):
                    self.save_label(next(iter(self.labels), 'g'), 'best')

    def extra_state(self) -> dict[str, Any]:
        """Additional entries of the training state: tensors and plain values.

        Every rank calls it; the return value of rank 0 is written.
        """
        return {}

    def load_extra_state(self, resume_state: Mapping[str, Any]) -> None:
        """Restore what ``extra_state`` returned."""

    def resume_training(self, resume_state: Mapping[str, Any]) -> None:
        """Restore optimizers, schedulers and best scores from a training state.

        Raises:
            ValueError: The state belongs to another kind of run.
        """
        try:
            state.resume(self, resume_state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            reason = f'{type(error).__name__}: {error}'
            raise UserError(f'the training state has invalid entries ({reason}).') from error
        self.load_extra_state(resume_state)

    def drop_later_files(self, iteration: int) -> None:
        """Remove files that a run resumed at an iteration will write again.

        ``samples_seen`` is already set for that iteration. Only rank 0 calls it, while no rank
        reads or writes in the folder.
        """
        set_aside_later(self.opt['path'], iteration)
        drop_later_snapshots(self.opt['path']['models'], iteration)
