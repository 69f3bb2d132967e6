"""Unreadable images: they end a run, or are replaced by others, the same in every worker."""

import errno
import itertools
import json
from pathlib import Path

import cv2
import lmdb
import numpy as np
import pytest
import torch
from blind import blind
from runs import TORCHRUN, checkpoint, differences, log_text
from torch.utils.data import Dataset, IterableDataset

from basicsr.data import build_dataloader
from basicsr.data.bad_images import BadImages, is_bad_data
from basicsr.data.samplers import build_sampler
from basicsr.utils.json_lines import read_rows
from basicsr.utils.lmdb_util import make_lmdb_from_imgs


def truncate(path):
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


def damage(gt, lq):
    """Of twelve pairs: one cut off, one gone, one empty, one that does not fit, one too small."""
    truncate(Path(gt) / '0001.png')
    (Path(lq) / '0003.png').unlink()
    (Path(gt) / '0005.png').write_bytes(b'')
    cv2.imwrite(str(Path(lq) / '0007.png'), np.zeros((5, 5, 3), np.uint8))
    for folder, size in ((gt, 8), (lq, 4)):
        cv2.imwrite(str(Path(folder) / '0009.png'), np.zeros((size, size, 3), np.uint8))


@pytest.fixture
def opt(train_opt, image_pairs, tmp_path):
    """Options of eight steps on twelve pairs, without validation, and the two folders."""

    def make(on_error='skip', **overrides):
        gt, lq = image_pairs('bad', count=12)
        opt = train_opt(
            val=None,
            train__total_iter=8,
            logger__save_checkpoint_freq=4,
            datasets__train__cache=str(tmp_path / 'cache'),
            datasets__train__on_error=on_error,
            **overrides,
        )
        del opt['datasets']['val']
        opt['datasets']['train'].update(dataroot_gt=gt, dataroot_lq=lq)
        return opt, gt, lq

    return make


@pytest.fixture
def damaged(monkeypatch):
    """Let files be damaged when the dataset has been built, as later in a run."""
    from basicsr.run import loaders

    build = loaders.build_dataset

    def apply(action):
        def build_and_damage(dataset_opt):
            dataset = build(dataset_opt)
            action()
            return dataset

        monkeypatch.setattr(loaders, 'build_dataset', build_and_damage)

    return apply


def end(folder):
    return [checkpoint(folder, 'net_g_latest.pth'), checkpoint(folder, '8.state')]


def skipped(folder):
    return {Path(row['path']).name for row in read_rows(folder / 'skipped.jsonl')}


def test_by_default_a_bad_image_ends_the_run(run, opt, damaged):
    options, gt, _ = opt('raise')
    damaged(lambda: truncate(Path(gt) / '0001.png'))
    with pytest.raises(ValueError, match=r'cannot read .*0001\.png'):
        run(options)


def test_without_bad_images_the_option_changes_nothing(run, opt):
    folders = [run(opt(policy, name=policy)[0]) for policy in ('raise', 'skip')]
    assert differences(*map(end, folders)) == []
    assert not (folders[1] / 'skipped.jsonl').exists()


def test_others_are_taken_alike_by_any_number_of_workers_and_after_a_resume(
    run, opt, damaged, monkeypatch
):
    options, gt, lq = opt()
    damaged(lambda: (Path(lq) / '0003.png').exists() and damage(gt, lq))
    folder = run({**options, 'name': 'none'})
    whole = end(folder)
    rows = read_rows(folder / 'skipped.jsonl')
    assert skipped(folder) == {f'000{i}.png' for i in (1, 3, 5, 7, 9)}
    assert len(rows) == 5
    assert all(row['reason'] and 0 <= row['sample'] < 16 for row in rows)
    lines = [line for line in log_text(folder).splitlines() if 'images are unreadable' in line]
    assert 1 <= len(lines) <= 3

    def restore():
        for name in (gt, lq):  # a dataset is built of whole folders
            for i in (3,):
                file = Path(name) / f'{i:04d}.png'
                if not file.exists():
                    cv2.imwrite(str(file), np.zeros((16, 20, 3), np.uint8))

    restore()
    damaged(lambda: (Path(lq) / '0003.png').unlink())
    options['datasets']['train']['num_worker_per_gpu'] = 2
    assert differences(whole, end(run({**options, 'name': 'two'}))) == []

    restore()
    short = {**options, 'name': 'cut', 'train': {**options['train'], 'total_iter': 4}}
    run(short)
    restore()
    cut = run({**options, 'name': 'cut'}, '--auto_resume')
    assert differences(whole, end(cut)) == []
    assert skipped(cut) == skipped(folder)


def test_a_damaged_line_of_the_list_is_set_aside_at_a_resume(run, opt, damaged):
    options, gt, lq = opt()
    damaged(lambda: (Path(lq) / '0003.png').exists() and damage(gt, lq))
    short = {**options, 'train': {**options['train'], 'total_iter': 6}}
    file = run(short) / 'skipped.jsonl'
    count = len(read_rows(file))
    content = bytearray(file.read_bytes())
    content[5] = 0xFF
    file.write_bytes(content)
    (Path(gt) / '0003.png').unlink()
    folder = run(options, '--auto_resume')
    assert 'skipped.jsonl: 1 damaged lines removed' in log_text(folder)
    (copy,) = folder.glob('skipped.jsonl_damaged_*')
    assert copy.read_bytes() == content
    assert len(file.read_bytes().splitlines()) == len(read_rows(file)) >= count - 1


def test_images_of_a_blind_degradation_and_of_an_lmdb_are_passed_over(run, opt, damaged, tmp_path):
    options, gt, lq = opt()
    damaged(lambda: truncate(Path(gt) / '0001.png'))
    assert skipped(run(blind(options | {'name': 'blind'}))) == {'0001.png'}

    options, gt, lq = opt()
    cv2.imwrite(str(Path(gt) / '0001.png'), cv2.imread(str(Path(gt) / '0002.png')))
    for name, folder in (('gt', gt), ('lq', lq)):
        paths = [f'{i:04d}.png' for i in range(12)]
        keys = [path[:-4] for path in paths]
        make_lmdb_from_imgs(folder, str(tmp_path / f'{name}.lmdb'), paths, keys)
    with lmdb.open(str(tmp_path / 'lq.lmdb')) as database, database.begin(write=True) as entry:
        entry.put(b'0004', b'no image')
        entry.delete(b'0006')
    train = options['datasets']['train']
    for name in ('gt', 'lq'):
        train[f'dataroot_{name}'] = str(tmp_path / f'{name}.lmdb')
    folder = run(
        {**options, 'name': 'lmdb'}
        | {'datasets': {'train': {**train, 'io_backend': {'type': 'lmdb'}}}}
    )
    rows = read_rows(folder / 'skipped.jsonl')
    assert sorted(row['reason'][:20] for row in rows) == [
        'cannot read 0004: Th',
        "the LMDB of 'lq' has",
    ]


class Numbers(Dataset):
    """Samples of a plug-in, of which some raise an error."""

    def __init__(self, bad, error=ValueError):
        self.bad, self.error = set(bad), error

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in self.bad:
            raise self.error(f'wrong: {index}')
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset):
    """The same numbers in order, as functions."""

    def __init__(self, bad):
        self.numbers = Numbers(bad)

    def __iter__(self):
        for index in range(40):
            yield lambda index=index: self.numbers[index]


class Few(Stream):
    """The first five alone."""

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 5)


def batches(tmp_path, dataset, count=30, workers=0, start=0, sampler=None):
    opt = {'phase': 'train', 'batch_size_per_gpu': 2, 'num_worker_per_gpu': workers}
    bad = BadImages(tmp_path / 'skipped.jsonl', 40)
    if isinstance(dataset, Numbers):
        sampler = build_sampler(dataset, {'sampler': sampler}, seed=5)
    loader = build_dataloader(dataset, opt, sampler=sampler, seed=3, start=start, bad_images=bad)
    return [batch.tolist() for batch in itertools.islice(loader, count)]


@pytest.mark.parametrize('kind', [Numbers, Stream])
def test_a_plug_in_has_its_samples_replaced_wherever_a_run_goes_on(tmp_path, kind):
    good, bad = kind([]), kind([3, 4, 17, 39])
    plain, ours = batches(tmp_path, good), batches(tmp_path, bad)
    changed = [(a, b) for x, y in zip(plain, ours, strict=True) for a, b in zip(x, y, strict=True)]
    changed = [(a, b) for a, b in changed if a != b]
    assert {int(a[0]) for a, _ in changed} == {3, 4, 17, 39}
    assert all(int(b[0]) not in (3, 4, 17, 39) for _, b in changed)
    if kind is Stream:
        assert [int(b[0]) for _, b in changed][:4] == [5, 5, 18, 0]
    assert batches(tmp_path, bad, workers=3) == ours
    assert batches(tmp_path, bad, 10, start=40) == ours[20:]
    assert len(read_rows(tmp_path / 'skipped.jsonl')) == 4


def test_what_a_sampler_leaves_out_is_not_taken_instead(tmp_path):
    sampler = {'type': 'subset_random', 'indices': [1, 2, 3, 30, 31]}
    ours = batches(tmp_path, Numbers([2, 30]), sampler=sampler)
    assert {int(value) for batch in ours for value, _ in batch} == {1, 3, 31}


def test_too_many_bad_images_end_the_run(tmp_path):
    """More than ten, and more than a tenth of those seen; all of a small set."""
    batches(tmp_path, Numbers(range(10)))
    (tmp_path / 'skipped.jsonl').unlink()
    with pytest.raises(ValueError, match=r'11 of the first \d+ images are unreadable'):
        batches(tmp_path, Numbers(range(11)))
    (tmp_path / 'skipped.jsonl').unlink()
    sampler = {'type': 'subset_random', 'indices': [1, 2]}
    with pytest.raises(ValueError, match='no image was found for it in 100 attempts'):
        batches(tmp_path, Numbers([1, 2]), sampler=sampler)
    (tmp_path / 'skipped.jsonl').unlink()
    with pytest.raises(ValueError, match='sample 0: no image was found for it in 100 attempts'):
        batches(tmp_path, Few(range(5)))


def test_a_resume_does_not_help_where_there_are_too_many(tmp_path):
    for start in (0, 40, 4000):
        with pytest.raises(ValueError, match=r'11 of the first \d+ images are unreadable'):
            batches(tmp_path, Numbers(range(11)), start=start)


@pytest.mark.parametrize('error', [TypeError, NameError, IndexError, RuntimeError, MemoryError])
def test_mistakes_in_code_are_no_bad_images(tmp_path, error):
    with pytest.raises(error, match='wrong'):
        batches(tmp_path, Numbers([5], error))


def test_what_the_machine_lacks_is_no_fault_of_an_image():
    assert is_bad_data(OSError(errno.EIO, 'Input/output error'))
    assert is_bad_data(PermissionError(errno.EACCES, 'Permission denied'))
    assert is_bad_data(cv2.error('no decoder'))
    assert not is_bad_data(OSError(errno.EMFILE, 'Too many open files'))
    assert not is_bad_data(ConnectionResetError('gone'))


@pytest.mark.slow
def test_two_processes_write_each_file_down_once(run_program, opt, write, tmp_path, repository):
    options, gt, _ = opt()
    options['datasets']['train'].update(cache='off', dataset_enlarge_ratio=2)
    whole, cut = {**options, 'name': 'whole'}, {**options, 'name': 'cut'}
    for number in (1, 4):
        truncate(Path(gt) / f'{number:04d}.png')
    plan = [
        {'pipeline': 'train', 'argv': ['-opt', write(whole)], 'die_after': None},
        {'pipeline': 'train', 'argv': ['-opt', write(cut)], 'die_after': 6},
        {'pipeline': 'train', 'argv': ['-opt', write(cut), '--auto_resume'], 'die_after': None},
    ]
    plan = [{**part, 'draw': False} for part in plan]
    (tmp_path / 'plan.json').write_text(json.dumps(plan))
    program = repository / 'tests' / 'distributed_program.py'
    result = run_program(*TORCHRUN, program, 'plan.json')
    assert result.returncode == 0, result.stderr
    folders = [tmp_path / 'experiments' / name for name in ('whole', 'cut')]
    assert differences(*map(end, folders)) == []
    for folder in folders:
        rows = read_rows(folder / 'skipped.jsonl')
        assert sorted(Path(row['path']).name for row in rows) == ['0001.png', '0004.png']


def test_without_locks_bad_images_are_written_down_all_the_same(tmp_path, break_locks):
    break_locks()
    bad_images = BadImages(tmp_path / 'skipped.jsonl', 1000)
    assert bad_images.passes_over(ValueError('cut off'), 3)
    assert [row['reason'] for row in read_rows(tmp_path / 'skipped.jsonl')] == ['cut off']


def test_what_a_lost_part_of_a_run_has_met_does_not_count_before_it_comes_again(tmp_path):
    rows = [{'path': f'{n}.png', 'reason': 'cut off', 'sample': 100 + n} for n in range(20)]
    (tmp_path / 'skipped.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    bad_images = BadImages(tmp_path / 'skipped.jsonl', 1000)
    assert bad_images.passes_over(ValueError('new'), 50)
    with pytest.raises(ValueError, match='22 of the first 121 images'):
        bad_images.passes_over(ValueError('another'), 120)
