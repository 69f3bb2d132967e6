"""Replay a non-finite step to debug it: ``basicsr replay experiments/NAME/incidents/FILE.pt``.

The folder of a run may be untrusted: only batch and weights are read from it. Which code is
imported is decided only by the option file on the command line.
"""

import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from basicsr.models import build_model
from basicsr.utils.checkpoint import load_checkpoint
from basicsr.utils.errors import UserError
from basicsr.utils.misc import check_resume
from basicsr.utils.rng import seed_all

from .program import prepare

_NAMED = 5  # maximum number of layers and of parameters to list
# Options of a step that do not change its values, or would hide where they come from.
_LEFT_OUT = ('compile', 'checkpoint_activations', 'sharding', 'clip_grad_norm', 'clip_grad_value')


def replay(
    incident: str,
    option_file: str,
    weights: str | None,
    root_path: Path,
    force_yml: Sequence[str] = (),
) -> list[str]:
    """Replay the step of an incident, and report in lines which values are non-finite.

    Args:
        incident: File in ``experiments/NAME/incidents``.
        option_file: The option file of the run, to be used with its ``force_yml``.
        weights: Weights of ``net_g``; default: the last checkpoint before the incident, else the
            weights that the run started from.
        root_path: Parent of ``experiments/``.
    """
    content, path = load_checkpoint(incident), Path(incident).resolve()
    if path.parent.name != 'incidents' or not _is_incident(content):
        raise UserError(
            f'{incident} is not a file of experiments/NAME/incidents: replay it where the run '
            'has put it, since the weights of that run are needed.'
        )
    sys.argv = ['basicsr replay', '-opt', option_file]
    sys.argv += ['--force_yml', *force_yml] if force_yml else []
    opt, _ = prepare(root_path, is_train=True)
    model, begin = _build(opt, path.parents[1], content, weights)
    for name, value in content['batch'].items():
        if hasattr(type(model), name) or not isinstance(getattr(model, name, value), Tensor):
            raise UserError(f"{incident}: '{name}' is not a tensor of a batch.")
        setattr(model, name, value.to(model.device))
    lines = [
        f'iteration {content["iter"]}, rank {content["rank"]}, samples {content["samples"]}',
        f'then not finite: {", ".join(content["not_finite"])}; now with {begin}:',
    ]
    lines += [_counted(name, value) for name, value in content['batch'].items()]
    networks = {f'net_{k}': model.get_bare_model(model.network(k)) for k in model.labels}
    layers: list[str] = []
    for name, net in networks.items():
        _watch_layers(name, net, layers)
    seed_all(content['manual_seed'], content['rank'], content['iter'])
    try:
        model.optimize_parameters(content['iter'])
    except (AttributeError, RuntimeError) as error:
        raise UserError(
            f'{incident}: its batch does not fit the model of {option_file}; is it of another run? '
            f'{error}'
        ) from error
    lines += [f'{name}: {value:.4e}' for name, value in model.get_current_log().items()]
    found = _first('layers with non-finite output', layers)
    for name, net in networks.items():
        # The backward pass reaches the last layers first.
        reached = reversed([(n, p.grad) for n, p in net.named_parameters() if p.grad is not None])
        bad = [f'{name}.{n}' for n, gradient in reached if not gradient.isfinite().all()]
        found += _first('parameters with non-finite gradient, from the last one on', bad)
    nothing = 'Now all values are finite: later steps spoiled the weights, the batch is fine.'
    return lines + (found or [nothing])


def _is_incident(content: Any) -> bool:
    kinds: dict[str, type] = dict.fromkeys(('iter', 'rank', 'manual_seed'), int)
    kinds |= dict.fromkeys(('samples', 'not_finite'), list)
    return (
        isinstance(content, dict)
        and all(isinstance(content.get(key), kind) for key, kind in kinds.items())
        and all(isinstance(name, str) for name in content['not_finite'])
        and content.get('amp') in (None, 'bf16', 'fp16')
        and isinstance(content.get('batch'), dict)
        and all(isinstance(value, Tensor) for value in content['batch'].values())
        and content['batch']
    )


def _build(opt: dict, folder: Path, content: dict, weights: str | None) -> tuple[Any, str]:
    """The model of a run before an incident, and a description of its weights."""
    opt = deepcopy(opt)
    opt['manual_seed'] = content['manual_seed']
    opt['train'].update(dict.fromkeys(_LEFT_OUT), amp=content['amp'], on_nonfinite='stop')
    saved = [file.stem.rpartition('_')[2] for file in (folder / 'models').glob('net_g_*.*')]
    earlier = [int(label) for label in saved if label.isdigit() and int(label) < content['iter']]
    begin = 'the weights that the run began with'
    if weights is None and earlier:
        opt['path']['resume_state'] = str(folder / 'training_states' / f'{max(earlier)}.state')
        check_resume(opt, max(earlier))
        begin = f'the weights of iteration {max(earlier)}'
    elif weights is not None:
        opt['path']['pretrain_network_g'] = begin = weights
    return build_model(opt), begin


def _watch_layers(label: str, net: nn.Module, found: list[str]) -> None:
    """Append layers with non-finite output to ``found``, in the order of the forward pass."""

    def look(name: str, layer: nn.Module, output: Any) -> None:
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor) and not tensor.isfinite().all():
                found.append(f'{name} ({type(layer).__name__})')
                return

    for name, layer in net.named_modules():
        if not list(layer.children()):
            full = f'{label}.{name}'
            layer.register_forward_hook(lambda layer, _, out, n=full: look(n, layer, out))


def _counted(name: str, value: Tensor) -> str:
    bad = value.numel() - int(value.isfinite().sum())
    return f'{name}: {bad} of {value.numel()} values are not finite'


def _first(what: str, names: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    more = ', …' if len(names) > _NAMED else ''
    return [f'{len(names)} {what}: {", ".join(names[:_NAMED])}{more}'] if names else []
