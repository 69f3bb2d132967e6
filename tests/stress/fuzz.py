"""Damaged and made-up inputs: each is read right or refused with a message, and harms nothing.

The cases of a kind go to a process of their own, one by one, so that one that hangs or kills it is
known. A case is made from its kind and number alone: ``python tests/stress/fuzz.py KIND FOLDER``
reads numbers, one a line, and answers what went wrong; the case that it made last stays in
``FOLDER/KIND/case``.
"""

import copy
import io
import json
import logging
import pickle
import random
import resource
import select
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(HERE.parent), str(HERE)]

from tally import Budget, Tally  # noqa: E402 - needs the paths above

USUAL_CASES = {'options': 1000, 'images': 800, 'lists': 300, 'lmdb': 400, 'checkpoints': 800}
WHAT = {
    'options': 'option files: text and values changed',
    'images': 'PNG, JPEG, TIFF, BMP, WebP: bytes changed',
    'lists': 'lists of images: text changed',
    'lmdb': 'LMDBs: bytes and lists changed',
    'checkpoints': '.pth and .state: bytes and pickles changed',
}
EXPECTED = 'read, or refused with a message; nothing else is touched'
SECONDS = 20  # that a case may take
_MEMORY = 12 * 2**30  # bytes of addresses; torch alone takes half
_ODD = (
    *(None, True, False, 0, -1, 1, 3, 255, 2**31, -(2**63), 2**62, 0.5, -0.0, 1e308, 1e-308),
    *(float('inf'), float('nan'), '', ' ', 'x', '../x', '/', '.', 'a\nb', '\x1b[2J', '{}', '%s'),
    *('os:system', 'L1Loss', 'auto', [], [[]], [1, 'x'], {}, {'type': 'x'}, {'': {}}, [None]),
)
_SLOW = 4096  # larger numbers make networks that take as long to build as was asked for


def run(folder: Path, budget: Budget) -> list[Tally]:
    """Try all kinds, each for its share of the time."""
    return [try_kind(kind, folder, budget, count) for kind, count in USUAL_CASES.items()]


def try_kind(kind: str, folder: Path, budget: Budget, count: int) -> Tally:
    """Try the cases of one kind."""
    tally = Tally(WHAT[kind], EXPECTED)
    child = None
    for number in budget.cases(count):
        child = child or _start(kind, folder)
        child.stdin.write(f'{number}\n')
        child.stdin.flush()
        if select.select([child.stdout], [], [], SECONDS)[0]:
            answer = child.stdout.readline()
            problem = json.loads(answer) if answer else f'the process ended: {child.wait()}'
        else:
            problem = f'no answer within {SECONDS} s'
        if problem.startswith(('the process', 'no answer')):
            _end(child)
            child = None
        tally.record(not problem, f'fuzz.py {kind}, case {number}: {problem}')
    if child:
        _end(child)
    return tally


def _start(kind: str, folder: Path) -> Any:
    shutil.rmtree(folder / kind, ignore_errors=True)
    (folder / kind).mkdir(parents=True)
    with (folder / f'{kind}.txt').open('w') as log:
        child = subprocess.Popen(
            [sys.executable, __file__, kind, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    if not child.stdout or not child.stdout.readline():
        raise RuntimeError(f'fuzz.py {kind} has not begun; see {folder / kind}.txt')
    return child


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.communicate()


def serve(kind: str, folder: Path) -> None:
    """Try the cases whose numbers come in, and answer with an empty text or what went wrong."""
    answers = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)
    sys.stdout = sys.stderr  # libraries must not answer
    make_sources, attempt = _KINDS[kind]
    guarded = folder / kind / 'sources'
    guarded.mkdir()
    make_sources(guarded)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    before = _state_of(folder / kind)
    answers.write('ready\n')
    for line in sys.stdin:
        case = folder / kind / 'case'
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        problem = _problem_of(attempt, guarded, case, random.Random(f'{kind} {int(line)}'))
        touched = before.items() ^ _state_of(folder / kind).items()
        if touched:
            problem += f' touched: {sorted(str(path) for path, _ in touched)}'
            before = _state_of(folder / kind)
        answers.write(f'{json.dumps(problem)}\n')


def _state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Sizes and times of all files but those of the case."""
    paths = [path for path in folder.rglob('*') if folder / 'case' not in (path, *path.parents)]
    return {p: (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths if not p.is_dir()}


def _problem_of(attempt: Callable, guarded: Path, case: Path, rng: random.Random) -> str:
    """What a user would see a traceback of; '' where there is none."""
    from basicsr.run.program import message_for_users

    try:
        return attempt(guarded, case, rng) or ''
    except Exception as error:  # any one is a finding
        if message_for_users(error):
            return ''
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-4:]
        where = ' < '.join(f'{Path(f.filename).name}:{f.lineno}' for f in reversed(place))
        return f'{type(error).__name__}: {str(error)[:200]} ({where})'


# Changes.


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, put in, taken out, doubled, moved or made extreme; or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 8, 64, 1024))
        part = changed[at : at + length]
        how = rng.randrange(8)
        if how <= 1 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            changed[at:at] = rng.randbytes(length)
        elif how == 3:
            del changed[at : at + length]
        elif how == 4:
            changed[at:at] = part * rng.choice((1, 2, 50))
        elif how == 5:
            other = rng.randrange(len(changed) + 1)
            changed[other : other + length] = part
        elif how == 6:
            extreme = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1))
            changed[at : at + 8] = extreme.to_bytes(8, rng.choice(('little', 'big')))
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def change_text(text: str, rng: random.Random) -> str:
    """Some characters, words or lines changed."""
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        lines = text.split('\n')
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        place = rng.randrange(len(lines[at]) + 1)
        odd = rng.choice(
            ('\t', '\x00', '\x1b', '"', "'", '[', '{', ': ', '- ', '&a ', '*a', '!!int ')
        )
        odd = rng.choice((odd, str(rng.choice(_ODD)), '9' * 5000, '[' * 200, 'ä\u202e', ' ', '#'))
        how = rng.randrange(6)
        if how == 0:
            lines[at] = lines[at][:place] + odd + lines[at][place:]
        elif how == 1:
            lines[at] = lines[at][:place] + lines[at][place + rng.choice((1, 1, 5)) :]
        elif how == 2:
            del lines[at]
        elif how == 3:
            lines.insert(other, lines[at])
        elif how == 4:
            lines[at] = lines[at].partition(':')[0] + ': ' + odd
        else:
            lines[at], lines[other] = lines[other], lines[at]
        text = '\n'.join(lines)
    return text


def change_tree(tree: Any, rng: random.Random) -> Any:
    """One value of nested dicts and lists replaced, taken out, put elsewhere or wrapped."""
    places = list(_places(tree))
    if not places:
        return rng.choice(_ODD)
    section, key = rng.choice(places)
    other_section, other_key = rng.choice(places)
    how = rng.randrange(5)
    if how <= 1:
        section[key] = copy.deepcopy(rng.choice(_ODD))
    elif how == 2:
        section[key] = copy.deepcopy(other_section[other_key])
    elif how == 3:
        section[key] = rng.choice((lambda v: [v], lambda v: {'type': v}, str))(section[key])
    else:
        del section[key]
    return tree


def _places(tree: Any) -> Iterable[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


# Kinds: what they are made of, and what is done with a case.


def small_options(folder: Path) -> dict[str, Any]:
    """A training on the images that ``image_sources`` writes."""
    pairs = {'type': 'PairedImageDataset', 'dataroot_gt': str(folder / 'gt')}
    pairs['dataroot_lq'] = str(folder / 'lq')
    return {
        'name': 'tiny',
        'model_type': 'SRModel',
        'scale': 2,
        'num_gpu': 0,
        'manual_seed': 7,
        'datasets': {
            'train': {**pairs, 'gt_size': 16, 'batch_size_per_gpu': 2, 'num_worker_per_gpu': 0},
            'val': pairs,
        },
        'network_g': {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2},
        'path': {'resume_state': None},
        'train': {
            'total_iter': 6,
            'ema_decay': 0.9,
            'optim_g': {'type': 'Adam', 'lr': 1e-3, 'betas': [0.9, 0.99]},
            'scheduler': {'type': 'MultiStepLR', 'milestones': [4], 'gamma': 0.5},
            'pixel_opt': {'type': 'L1Loss', 'loss_weight': 1.0, 'reduction': 'mean'},
        },
        'val': {'val_freq': 3, 'metrics': {'psnr': {'type': 'calculate_psnr', 'crop_border': 2}}},
        'logger': {'print_freq': 1, 'save_checkpoint_freq': 2, 'use_tb_logger': False},
    }


def image_sources(folder: Path) -> None:
    import cv2
    import numpy as np

    rng = np.random.default_rng(0)
    for number in range(4):
        gt = rng.integers(0, 256, (32, 40, 3), np.uint8)
        for name, image in (('gt', gt), ('lq', gt[::2, ::2])):
            (folder / name).mkdir(exist_ok=True)
            cv2.imwrite(str(folder / name / f'{number}.png'), image)
    (folder / 'formats').mkdir()
    for extension in ('png', 'jpg', 'tif', 'bmp', 'webp', 'ppm'):
        cv2.imwrite(str(folder / 'formats' / f'colour.{extension}'), gt)
    for extension in ('png', 'jpg', 'pgm'):
        cv2.imwrite(str(folder / 'formats' / f'gray.{extension}'), gt[..., 0])
    deep = gt.astype(np.uint16) * 257
    for extension in ('png', 'tif'):
        cv2.imwrite(str(folder / 'formats' / f'deep.{extension}'), deep)
        cv2.imwrite(str(folder / 'formats' / f'alpha.{extension}'), np.dstack([gt, gt[..., 0]]))
    (folder / 'list.txt').write_text('0.png (32,40,3)\n1.png (32,40,3)\n3.png (32,40,3)\n')


def option_sources(folder: Path) -> None:
    """Also read and build all once: the imports take longer than any case may."""
    from basicsr.utils.options import parse_options

    image_sources(folder)
    file = folder / 'tiny.yml'
    file.write_text(_yaml(small_options(folder)))
    sys.argv = ['fuzz', '-opt', str(file)]
    _build(parse_options(folder)[0])


def _yaml(tree: Any) -> str:
    import yaml

    from basicsr.utils.options import ordered_yaml

    return yaml.dump(tree, Dumper=ordered_yaml()[1], sort_keys=False)


def try_options(guarded: Path, case: Path, rng: random.Random) -> None:
    """Parse an option file, and build what it describes."""
    from basicsr.utils.options import parse_options, yaml_load

    published = rng.choice(sorted((REPOSITORY / 'options').rglob('*.yml')))
    source = published if rng.random() < 0.3 else guarded / 'tiny.yml'
    tree, text = yaml_load(source), source.read_text(encoding='utf-8')
    if rng.random() < 0.7:
        for _ in range(rng.choice((1, 1, 2, 5))):
            tree = change_tree(tree, rng)
        text = _yaml(tree)
    else:
        text = change_text(text, rng)
    file = case / 'options.yml'
    file.write_bytes(text.encode('utf-8', 'surrogatepass'))
    sys.argv = ['fuzz', '-opt', str(file)]
    opt, _ = parse_options(case, is_train='test' not in source.parts)
    _build(opt)


def _build(opt: dict) -> None:
    import torch

    from basicsr.archs import build_network
    from basicsr.data import build_dataset
    from basicsr.losses import build_loss
    from basicsr.models.lr_scheduler import build_scheduler
    from basicsr.models.optimization import build_optimizer

    train = opt.get('train') or {}
    for key, options in train.items():
        if key.endswith('_opt') and options and 'Perceptual' not in str(options):  # needs weights
            build_loss(options)
    parameter = torch.nn.Parameter(torch.zeros(3, 3))
    if train.get('optim_g'):
        optimizer = build_optimizer(params=[parameter], **_named(train['optim_g']))
        if train.get('scheduler'):
            build_scheduler(optimizer, train['scheduler'])
    for key, options in opt.items():
        if key.startswith('network_') and options and not _is_large(options):
            with torch.device('meta'):
                build_network(options)
    for options in opt['datasets'].values():
        dataset = build_dataset(options)
        if len(dataset):
            dataset[0]


def _named(options: dict) -> dict:
    return {'name': options['type'], **{k: v for k, v in options.items() if k != 'type'}}


def _is_large(options: dict) -> bool:
    values = [section[key] for section, key in _places(options)]
    return any(isinstance(v, int | float) and abs(v) > _SLOW for v in values)


def try_images(guarded: Path, case: Path, rng: random.Random) -> str | None:
    from basicsr.data.data_util import image_tensor, read_image
    from basicsr.utils.file_client import FileClient

    source = rng.choice(sorted((guarded / 'formats').iterdir()))
    extension = rng.choice((source.suffix, source.suffix, '.png', '.jpg', '.tif'))
    file = case / f'image{extension}'
    file.write_bytes(change_bytes(source.read_bytes(), rng))
    try:
        img = read_image(FileClient('disk'), str(file), color=rng.choice((None, 'gray')))
    except ValueError as error:
        return None if str(file) in str(error) else f'the message does not name the file: {error}'
    if img.ndim != 3 or not img.size:
        return f'an image of shape {img.shape}'
    image_tensor(img)
    return None


def try_lists(guarded: Path, case: Path, rng: random.Random) -> str | None:
    from basicsr.data.data_util import image_name
    from basicsr.data.paired_image_dataset import PairedImageDataset

    file = case / 'list.txt'
    text = change_text((guarded / 'list.txt').read_text(), rng)
    if rng.random() < 0.5:
        text += f'{rng.choice(("..", "../gt", str(guarded / "gt"), "./..", "a/../.."))}/0.png\n'
    file.write_bytes(text.encode('utf-8', 'surrogatepass'))
    opt = {'phase': 'val', 'scale': 2, 'meta_info_file': str(file), 'io_backend': {'type': 'disk'}}
    opt |= {'dataroot_gt': str(guarded / 'gt'), 'dataroot_lq': str(guarded / 'lq')}
    paths = PairedImageDataset(opt).paths
    for pair in map(paths.__getitem__, range(len(paths))):
        target = (case / f'{image_name(pair["lq_path"], opt)}.png').resolve()
        if not target.is_relative_to(case) or '..' in pair['gt_path']:
            return f'{pair} leads out of its folder'
    return None


def lmdb_sources(folder: Path) -> None:
    """Several levels of pages, values within them and outside."""
    import cv2
    import numpy as np

    from basicsr.utils.lmdb_util import make_lmdb_from_imgs

    (folder / 'png').mkdir()
    names = [f'{number:03d}.png' for number in range(130)]
    for number, name in enumerate(names):
        size = 60 if number % 40 == 0 else 3
        image = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
        cv2.imwrite(str(folder / 'png' / name), image)
    keys = [name.removesuffix('.png') for name in names]
    make_lmdb_from_imgs(folder / 'png', folder / 'x.lmdb', names, keys)


def try_lmdb(guarded: Path, case: Path, rng: random.Random) -> str | None:
    from basicsr.data.data_util import image_name, paths_from_lmdb, read_image
    from basicsr.utils import file_client

    target = case / f'{rng.random()}.lmdb'  # a name that the process has not opened yet
    target.mkdir()
    data, text = ((guarded / 'x.lmdb' / n).read_bytes() for n in ('data.mdb', 'meta_info.txt'))
    if rng.random() < 0.2:
        text = change_text(text.decode(), rng).encode('utf-8', 'surrogatepass')
    else:
        data = change_bytes(_change_pages(data, rng), rng)
    (target / 'data.mdb').write_bytes(data)
    (target / 'meta_info.txt').write_bytes(text)
    try:
        client = file_client.FileClient('lmdb', db_paths=str(target))
        keys, problem = paths_from_lmdb(target), None
        for key in keys:
            if (
                not (case / f'{image_name(key, {"io_backend": {"type": "lmdb"}})}.png')
                .resolve()
                .is_relative_to(case)
            ):
                return f'{key} leads out of its folder'
            try:
                read_image(client, key)
            except (ValueError, FileNotFoundError) as error:
                if str(key) not in str(error):
                    problem = f'the message does not name the key: {error}'
        return problem
    finally:
        file_client._opened.clear()


def _change_pages(data: bytes, rng: random.Random) -> bytes:
    """Numbers at the head of a page or of a node in it changed: few bytes are such numbers."""
    changed = bytearray(data)
    for _ in range(rng.randrange(4)):
        page = 4096 * rng.randrange(len(changed) // 4096)
        at = page + rng.choice((rng.randrange(160), rng.randrange(4088)))
        changed[at : at + 2] = rng.choice((0, 1, 16, 4095, 65535, rng.randrange(65536))).to_bytes(2)
    return bytes(changed)


def checkpoint_sources(folder: Path) -> None:
    import torch

    image_sources(folder)
    net = {'0.weight': torch.randn(4, 3, 3, 3), '0.bias': torch.zeros(4)}
    adam = {'step': torch.tensor(3.0), 'exp_avg': torch.randn(4), 'exp_avg_sq': torch.rand(4)}
    group = {'lr': 1e-3, 'betas': (0.9, 0.99), 'params': [0], 'initial_lr': 1e-3}
    state = {
        'epoch': 0,
        'iter': 3,
        'samples': 6,
        'manual_seed': 7,
        'optimizers': [{'state': {0: adam}, 'param_groups': [group]}],
        'schedulers': [{'last_epoch': 3, '_last_lr': [1e-3], 'milestones': [4]}],
        'best_metric_results': {'val': {'psnr': {'better': 'higher', 'val': 20.0, 'iter': 3}}},
        'types': {'optimizers': ['Adam'], 'schedulers': ['MultiStepRestartLR']},
    }
    for name, content in (('net.pth', {'params': net, 'params_ema': net}), ('3.state', state)):
        torch.save(content, folder / name)
        torch.save(content, folder / f'old_{name}', _use_new_zipfile_serialization=False)


def try_checkpoints(guarded: Path, case: Path, rng: random.Random) -> str | None:
    import torch

    from basicsr.train import load_resume_state
    from basicsr.utils.checkpoint import load_checkpoint, select_params

    source = guarded / rng.choice(('net.pth', '3.state', 'old_net.pth', 'old_3.state'))
    (case / 'training_states').mkdir()
    file = case / 'training_states' / source.name.removeprefix('old_')
    how, marker = rng.random(), case / 'marker'
    if how < 0.15 and source.name.startswith('old'):
        file.write_bytes(pickle.dumps({'params': _Hostile(str(marker))}))
    elif how < 0.4 and not source.name.startswith('old'):
        file.write_bytes(_change_pickle(source.read_bytes(), rng))
    elif how < 0.6:
        content = torch.load(source, weights_only=True)
        torch.save(change_tree(content, rng), file)
    else:
        file.write_bytes(change_bytes(source.read_bytes(), rng))
    opt = small_options(guarded) | {'auto_resume': False, 'is_train': True, 'rank': 0}
    opt['path'] |= {'resume_state': str(file), 'models': 'm', 'training_states': str(file.parent)}
    opt['path']['experiments_root'] = str(case)
    try:
        if file.suffix == '.state':
            load_resume_state(opt)
        else:
            select_params(load_checkpoint(file), 'params', file)
    finally:
        if marker.exists():
            raise SystemExit('code of the file was run')
    return None


class _Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return open, (self.marker, 'w')


def _change_pickle(data: bytes, rng: random.Random) -> bytes:
    """A valid archive around a changed pickle."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, 'w') as new:
        for record in old.infolist():
            content = old.read(record)
            if record.filename.endswith('data.pkl'):
                content = change_bytes(content, rng)
            new.writestr(record.filename, content)
    return target.getvalue()


_KINDS: dict[str, tuple[Callable, Callable]] = {
    'options': (option_sources, try_options),
    'images': (image_sources, try_images),
    'lists': (image_sources, try_lists),
    'lmdb': (lmdb_sources, try_lmdb),
    'checkpoints': (checkpoint_sources, try_checkpoints),
}

if __name__ == '__main__':
    logging.getLogger('basicsr').setLevel(logging.CRITICAL)
    serve(sys.argv[1], Path(sys.argv[2]).resolve())
