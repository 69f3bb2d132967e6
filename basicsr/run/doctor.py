"""Examine the data of a training before it starts: ``basicsr doctor``."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from basicsr.data import build_dataset
from basicsr.data.data_util import list_images, matching_names
from basicsr.data.exclusion import name_below
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.data.progressive import crop_sizes
from basicsr.data.realesrgan_dataset import RealESRGANDataset
from basicsr.data.shared import PathTable
from basicsr.models import build_model
from basicsr.utils.errors import UserError
from basicsr.utils.file_client import FileClient
from basicsr.utils.forensics import is_copy, similar_pairs
from basicsr.utils.img_util import imfrombytes
from basicsr.utils.pair_forensics import FAMILY_OF
from basicsr.utils.parallel import map_in_order
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.yaml_util import OptionError

from .data_checks import check_run
from .doctor_checks import KINDS, UNKNOWN, Demands, Examined, Finding, examine
from .loaders import build_loaders, prefetch
from .program import message_for_users

Read = Callable[[str, str], bytes | None]  # of a path and 'gt' or 'lq'


@dataclass
class ImageSet:
    """The images of a set, and what was found in them.

    Attributes:
        name: Name in reports.
        paths: Paths of each image or pair, by 'gt' and 'lq'.
        roots: Folders that names are relative to, by 'gt' and 'lq'.
        read: Reads the bytes of a file.
        demands: What the set must fulfil.
        skips: Whether training skips unreadable images.
    """

    name: str
    paths: Sequence[Mapping[str, str]]
    roots: Mapping[str, Sequence[str]]
    read: Read
    demands: Demands
    skips: bool = False
    findings: list[Finding] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    qualities: list[float] = field(default_factory=list)

    def is_fatal(self, finding: Finding) -> bool:
        """Whether training cannot start with it."""
        return KINDS[finding.kind].is_error and not self.skips

    def name_of(self, path: str) -> str:
        """The name of an image below its folder."""
        return name_below(path, [root for roots in self.roots.values() for root in roots])

    def excluded(self) -> list[str]:
        """Names for the exclusion list: the GT of each harmful pair, or the only image."""
        harmful = {f.path for f in self.findings if KINDS[f.kind].is_harmful}
        roots = self.roots.get('gt') or self.roots['lq']
        names = []
        for paths in self.paths if harmful else ():
            if harmful.intersection(paths.values()):
                path = paths.get('gt') or paths['lq']
                # Several folders may have images of the same name.
                names.append(name_below(path, roots if len(roots) == 1 else ()))
        return names


# sets


def sets_of_options(opt: Mapping[str, Any]) -> tuple[list[ImageSet], list[str]]:
    """The sets of an option file, training first, and the names of those that are left out."""
    found, left_out = [], []
    ordered = sorted(opt['datasets'].items(), key=lambda item: item[0] != 'train')
    for key, options in ordered:
        for dataset in _parts(build_dataset(options)):
            if type(dataset).__module__.startswith('basicsr.') and hasattr(dataset, 'paths'):
                skips = options.get('on_error') == 'skip'
                found.append(_set_of(dataset, dataset.opt.get('name') or key, skips))
            else:
                left_out.append(f'{key} ({type(dataset).__name__})')
    return found, left_out


def _parts(dataset: Any) -> Iterator[Any]:
    for part in getattr(dataset, 'parts', [dataset]):
        yield from _parts(part) if hasattr(part, 'parts') else [part]


def _set_of(dataset: Any, name: str, skips: bool) -> ImageSet:
    opt = dataset.opt
    is_training = opt.get('phase') == 'train'
    is_cropped = is_training and isinstance(dataset, PairedImageDataset)
    demands = Demands(
        scale=opt.get('scale') or 1,
        gt_size=max(crop_sizes(opt)) if is_cropped and not opt.get('pad_small') else 0,
        is_training=is_training,
        is_gray=opt.get('color') is not None,
    )
    keys = {PairedImageDataset: ('gt', 'lq'), RealESRGANDataset: ('gt',)}
    keys = next((k for c, k in keys.items() if isinstance(dataset, c)), ('lq',))
    paths = _Columns({k: _column(dataset.paths, k) for k in keys})
    roots = {key: _as_list(opt[f'dataroot_{key}']) for key in keys}
    return ImageSet(name, paths, roots, dataset.file_client.get, demands, skips)


def _column(paths: PathTable, key: str) -> Sequence[str]:
    return paths.column(f'{key}_path' if isinstance(paths[0], dict) else '')


class _Columns(Sequence):
    """Several sequences of equal length as one sequence of dicts, which are made on access."""

    def __init__(self, columns: Mapping[str, Sequence[str]]):
        self._columns = columns

    def __getitem__(self, index: Any) -> dict[str, str]:
        return {key: column[index] for key, column in self._columns.items()}

    def __len__(self) -> int:
        return min(map(len, self._columns.values()))


def _as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def set_of_folders(
    gt: str, lq: str | None, demands: Demands, filename_tmpl: str = '{}', recursive: bool = False
) -> ImageSet:
    """The images of a folder, or the pairs of two.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: Images do not pair up, or there are none.
    """
    folders = {'gt': gt} if lq is None else {'gt': gt, 'lq': lq}
    if lq is None:
        names = [list_images(gt, recursive)]
    else:
        names = matching_names((lq, gt), ('lq', 'gt'), filename_tmpl, recursive)[::-1]
    if not names[0]:
        raise UserError(f'no images in {gt}.')
    table = PathTable()
    parts = zip(folders.items(), names, strict=True)
    table.extend({f'{key}_path': (folder, own) for (key, folder), own in parts})
    paths = _Columns({key: table.column(f'{key}_path') for key in folders})
    roots = {key: [folder] for key, folder in folders.items()}
    return ImageSet(gt, paths, roots, FileClient('disk').get, demands)


# what is found


def look_through(sets: Sequence[ImageSet], workers: int) -> None:
    """Examine all images of sets, in threads, and compare the sets with each other."""
    hashes: list[tuple[int, int, int]] = []  # set, index, hash
    fitting = [[] for _ in sets]  # of each pair, the kernels that may have made it
    total = sum(len(images.paths) for images in sets)
    with progress_bar((), total=total, unit='image', disable=None) as bar:
        for number, images in enumerate(sets):

            def examined(index: int, images: ImageSet = images) -> Examined:
                return examine(images.paths[index], images.read, images.demands)

            results = map_in_order(examined, range(len(images.paths)), workers)
            for index, result in enumerate(results):
                images.findings += result.findings
                fitting[number].append(result.kernels)
                if result.quality is not None:
                    images.qualities.append(result.quality)
                if result.hash is not None:
                    hashes.append((number, index, result.hash))
                bar.update()
    compare_kernels(sets, fitting)
    find_copies(sets, hashes)


def compare_kernels(sets: Sequence[ImageSet], fitting: Sequence[list[tuple[str, ...]]]) -> None:
    """Find the pairs whose LQ was not made with the kernel of most pairs in the first set.

    Args:
        fitting: For each set and image, the kernels that may have made it, best first.
    """
    for images, of_images in zip(sets, fitting, strict=True):
        # All kernels make the LQ of an image without details.
        images.kernels.update(names[0] for names in of_images if 0 < len(names) < len(FAMILY_OF))
    usual = next((images.kernels for images in sets if images.kernels), Counter())
    families = Counter()
    for name, count in usual.items():
        families[FAMILY_OF.get(name, UNKNOWN)] += count
    family = max(families, key=families.__getitem__, default=UNKNOWN)
    if family == UNKNOWN:  # such as a recipe with noise: nothing to compare with
        return
    for images, of_images in zip(sets, fitting, strict=True):
        for paths, names in zip(images.paths, of_images, strict=True):
            if names and family not in {FAMILY_OF.get(name, UNKNOWN) for name in names}:
                text = f'{names[0]}, most of the training set: {family}'
                images.findings.append(Finding('other_kernel', paths['gt'], 0.0, text, dict(paths)))


def find_copies(sets: Sequence[ImageSet], hashes: Sequence[tuple[int, int, int]]) -> None:
    """Find duplicates within training or validation, and training images in validation sets.

    Args:
        hashes: Number of the set, index in it, and hash, for each image.
    """
    told: set[int] = set()
    for one, two in similar_pairs([value for _, _, value in hashes]):
        (first, path), (second, other) = (_located(sets, hashes[place]) for place in (one, two))
        is_leak = first.demands.is_training and not second.demands.is_training
        place = one if is_leak else two  # where the finding belongs
        if place in told or not _are_copies(first, path, second, other):
            continue
        told.add(place)
        owner, path, other = (first, path, other) if is_leak else (second, other, path)
        kind = 'leaked' if is_leak else 'duplicate'
        whose = second if is_leak else first
        text = f'as {whose.name_of(other)} of {whose.name}'
        owner.findings.append(Finding(kind, path, 0.0, text, {_key(owner): path, 'other': other}))


def _located(sets: Sequence[ImageSet], place: tuple[int, int, int]) -> tuple[ImageSet, str]:
    images = sets[place[0]]
    return images, images.paths[place[1]]['gt']


def _key(images: ImageSet) -> str:
    return 'gt' if 'gt' in images.roots else 'lq'


def _are_copies(first: ImageSet, path: str, second: ImageSet, other: str) -> bool:
    pairs = ((first, path), (second, other))
    return is_copy(*(imfrombytes(bytes(s.read(p, 'gt') or b'')) for s, p in pairs))


# the first step


def first_step(opt: dict) -> tuple[dict[str, float], str]:
    """Build everything and train on one batch, without writing anything.

    Returns:
        The losses, and why they cannot be computed, or ''.
    """
    try:
        loaders, model = build_loaders(opt), build_model(opt)
        check_run(model, loaders)
        data = next(iter(prefetch(loaders.train, opt)))
        first = (opt['train'].get('net_d_init_iters') or 0) + 1  # until then only net_d is trained
        model.begin_iteration(data, first, loaders.schedule.batch_size(1))
        model.optimize_parameters(first)
        log = {k: float(v) for k, v in model.get_current_log().items() if k.startswith('l_')}
    except OptionError:
        raise
    except Exception as error:
        if (message := message_for_users(error)) is None:
            raise
        return {}, message
    bad = [name for name, value in log.items() if not math.isfinite(value)]
    return log, f'not finite: {", ".join(bad)}' if bad else ''
