"""Write a network for another runtime, once that runtime has given the network's own output."""

import json
import math
import re
import subprocess
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from basicsr.utils.checkpoint import DESCRIPTION, description, save_checkpoint
from basicsr.utils.errors import MissingPackageError, UserError

from .export_names import weights_for_spandrel
from .restore import evaluating
from .restore_files import shape_of

BOUND = 1e-4  # of the largest difference, for images in [0, 1]
OPSET = 17
# Heights and widths that the runtime is tried on. The first is also traced: as nothing divides its
# sides, the padding of the network is part of the graph.
_SIZES = ((37, 53), (24, 40), (61, 32))


class Written(NamedTuple):
    """A file as its runtime reads it.

    Attributes:
        runtime: Its name and version.
        run: Computes the output for an image (1, c, h, w).
        note: Stores what is known of the file in its metadata.
        hint: Why the output may differ, for messages.
    """

    runtime: str
    run: Callable[[Tensor], Tensor]
    note: Callable[[dict[str, Any]], object] = lambda _: None
    hint: str = ''


class Exported(NamedTuple):
    """What has been written.

    Attributes:
        multiple: Heights and widths must be multiples of it.
        sizes: Those that were tried.
        difference: The largest difference to the network's output.
    """

    files: list[Path]
    runtime: str
    multiple: int
    sizes: list[tuple[int, ...]]
    difference: float

    def __str__(self) -> str:
        sizes = ', '.join(f'{h} x {w}' for h, w in self.sizes)
        taken = 'any size' if self.multiple == 1 else f'sides that are multiples of {self.multiple}'
        return (
            f'{" and ".join(map(str, self.files))}: for {taken}. {self.runtime} gives the output '
            f'of the network on {sizes}: largest difference {self.difference:.1e}.'
        )


def export_network(
    net: nn.Module,
    target: str,
    file: str | Path,
    *,
    described: Mapping[str, Any] | None = None,
    bound: float = BOUND,
    overwrite: bool = False,
) -> Exported:
    """Write a network, or nothing if the runtime does not give its output on three sizes.

    Args:
        target: One of ``TARGETS``.
        file: Its ending is one of the target's. Of ncnn, the ``.param``; the ``.bin`` is beside it.
        described: What the checkpoint says of the network, for the metadata.
        bound: Largest difference, for images in [0, 1].

    Raises:
        FileExistsError: There is a ``file``, and it shall not be overwritten.
        ImportError: The runtime is not installed.
        ValueError: It cannot be written so, or the outputs differ by more than ``bound``.
    """
    endings = TARGETS[target][0]
    file = Path(file)
    if file.suffix not in endings:
        raise UserError(f'{file} must end in {" or ".join(endings)} for {target}.')
    for existing in _files(file) if not overwrite else ():
        if existing.exists():
            raise FileExistsError(f'{existing} exists: remove it, or --overwrite.')
    net = net.cpu().float().eval()
    channels, scale, _ = shape_of(net, (3, 1, 4, 2))
    with tempfile.TemporaryDirectory(prefix='.export', dir=file.parent) as folder:
        unchecked = Path(folder, file.name)
        written, multiple, difference = _written(net, target, channels, unchecked, bound)
        entry = described or description({'type': type(net).__name__}, scale)
        written.note({**entry, 'multiple': multiple, 'max_difference': difference})
        for part in _files(unchecked):
            part.replace(file.with_name(part.name))
    sizes = [tuple(image.shape[2:]) for image in _images(channels, multiple)]
    return Exported(_files(file), written.runtime, multiple, sizes, difference)


def _written(
    net: nn.Module, target: str, channels: int, file: Path, bound: float
) -> tuple[Written, int, float]:
    """The file for the smallest multiple that works, the multiple, and the difference."""
    reason = ''
    for multiple in _multiples(net, target):
        images = _images(channels, multiple)
        try:
            with evaluating(net), warnings.catch_warnings(action='ignore'):  # what tracing fixes
                written = TARGETS[target][1](net, images, multiple, file)
                difference = max(_difference(net, written.run, image) for image in images)
        except (UserError, MissingPackageError):
            raise
        except Exception as error:  # exporters and runtimes fail in any way
            reason = textwrap.shorten(str(error) or type(error).__name__, 300)
            continue
        if difference <= bound:
            return written, multiple, difference
        reason = (
            f'the output of {written.runtime} differs by {difference:.1e}, and {bound:.0e} is '
            f'allowed (--bound){written.hint}'
        )
    raise UserError(f'{type(net).__name__} is not written for {target}: {reason}')


def _files(file: Path) -> list[Path]:
    return [file, file.with_suffix('.bin')] if file.suffix == '.param' else [file]


def _multiples(net: nn.Module, target: str) -> Iterable[int]:
    """What sides may have to be multiples of, where a graph cannot pad: as few tries as help."""
    window = getattr(net, 'window_size', None)
    if target == 'spandrel':
        return 1, 64
    if not isinstance(window, int):
        return 1, 2, 4, 8, 64
    return (window,) if target == 'torch' else (1, window)


def _images(channels: int, multiple: int) -> list[Tensor]:
    larger = max(multiple // 16, 1)  # so that sizes still differ, and are two multiples at least
    draws = torch.Generator().manual_seed(0)
    sides = ([math.ceil(larger * n / multiple) * multiple for n in size] for size in _SIZES)
    return [torch.rand(1, channels, *size, generator=draws) for size in sides]


def _difference(net: nn.Module, run: Callable[[Tensor], Tensor], image: Tensor) -> float:
    """The largest difference of the outputs for an image; infinite if they cannot be compared."""
    own, other = net(image), run(image.clone())
    if own.shape != other.shape:
        raise ValueError(f'the output is {tuple(other.shape)}, and {tuple(own.shape)} is right')
    return (own - other).abs().nan_to_num(nan=math.inf).max().item()


@contextmanager
def _needing(packages: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(f'this target needs: pip install {packages}') from error


def _to_onnx(net: nn.Module, images: list[Tensor], _: int, file: Path) -> Written:
    with _needing('onnx onnxruntime'):
        import onnx
        import onnxruntime
    axes = {2: 'height', 3: 'width'}
    torch.onnx.export(  # the exporter that traces: the other one fixes sizes that padding sets
        *(net, (images[0],), str(file)),
        dynamo=False,
        opset_version=OPSET,
        input_names=['input'],
        output_names=['output'],
        dynamic_axes={'input': axes, 'output': {2: 'out_height', 3: 'out_width'}},
    )
    session = onnxruntime.InferenceSession(str(file), providers=['CPUExecutionProvider'])

    def note(entry: dict[str, Any]) -> None:
        model = onnx.load(str(file))
        onnx.helper.set_model_props(model, {DESCRIPTION: json.dumps(entry)})
        onnx.save(model, str(file))

    return Written(
        f'onnxruntime {onnxruntime.__version__} (opset {OPSET})',
        lambda x: torch.from_numpy(session.run(None, {'input': x.numpy()})[0]),
        note,
    )


def _to_torch(net: nn.Module, images: list[Tensor], multiple: int, file: Path) -> Written:
    sides = (torch.export.Dim(name, min=max(16 // multiple, 2)) for name in ('height', 'width'))
    height, width = (multiple * side if multiple > 1 else side for side in sides)
    program = torch.export.export(net, (images[0],), dynamic_shapes=({2: height, 3: width},))

    def note(entry: dict[str, Any]) -> None:
        torch.export.save(program, file, extra_files={DESCRIPTION: json.dumps(entry)})

    note({})
    return Written(f'torch {torch.__version__}', torch.export.load(file).module(), note)


def _to_ncnn(net: nn.Module, images: list[Tensor], _: int, file: Path) -> Written:
    with _needing('ncnn pnnx'):
        import ncnn
        import pnnx
    traced = file.with_name('traced.pt')
    torch.jit.trace(net, images[0]).save(traced)
    shapes = (','.join(map(str, image.shape)) for image in images)
    arguments = (f'inputshape{i}=[{s}]' for i, s in zip(('', '2'), shapes, strict=False))
    ends = (f'ncnn{part.suffix[1:]}={part.name}' for part in _files(file))
    command = [pnnx.EXEC_PATH, traced.name, *arguments, *ends, 'fp16=0']
    subprocess.run(command, cwd=file.parent, capture_output=True, check=True)
    layers = re.findall(r'^([A-Za-z_]\w*\.\S+|aten::\S+|prim::\S+) ', file.read_text(), re.M)
    if layers:
        raise ValueError(f'ncnn has no layer for {", ".join(sorted(set(layers)))}')
    read = ncnn.Net()
    for name in ('fp16_packed', 'fp16_storage', 'fp16_arithmetic', 'bf16_storage'):
        setattr(read.opt, f'use_{name}', False)
    if read.load_param(str(file)) or read.load_model(str(file.with_suffix('.bin'))):
        raise ValueError('ncnn cannot read what pnnx makes of it')

    def run(x: Tensor) -> Tensor:
        with read.create_extractor() as extractor:
            extractor.input('in0', ncnn.Mat(x[0].numpy()).clone())
            status, output = extractor.extract('out0')
            if status:
                raise ValueError(f'ncnn fails (status {status})')
            return torch.from_numpy(output.numpy().copy())[None]

    return Written(f'ncnn {ncnn.__version__}', run)


def _to_spandrel(net: nn.Module, _: list[Tensor], __: int, file: Path) -> Written:
    with _needing('spandrel'):
        import spandrel
    state, is_renamed = weights_for_spandrel(net)

    def note(entry: dict[str, Any]) -> None:
        own = {'network': None} if is_renamed else {}  # it could not be built here from such names
        save_checkpoint({'params': state, DESCRIPTION: entry | own}, file)

    note({})
    try:
        found = spandrel.ModelLoader().load_from_file(file).model.eval()
    except spandrel.UnsupportedModelError as error:
        raise UserError(
            f'{type(net).__name__} is not written for spandrel, which does not know it.'
        ) from error
    assumed = [
        f'{name} {value}'
        for name, value in getattr(found, 'hyperparameters', {}).items()
        if isinstance(value, int | float | str) and getattr(net, name, value) != value
    ]
    hint = f': no weight shows it, and spandrel assumes {", ".join(assumed)}' if assumed else ''
    return Written(f'spandrel {version("spandrel")}', found, note, hint)


# Endings of the file, and what writes it.
TARGETS: dict[str, tuple[tuple[str, ...], Callable[..., Written]]] = {
    'spandrel': (('.safetensors', '.pth'), _to_spandrel),
    'onnx': (('.onnx',), _to_onnx),
    'ncnn': (('.param',), _to_ncnn),
    'torch': (('.pt2',), _to_torch),
}
