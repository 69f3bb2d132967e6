"""Pairs out of tar shards."""

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import cv2
import pytest
import torch
from runs import checkpoint, differences, rows

from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.data.paired_tar_dataset import PairedTarDataset, _count_pairs, _read, find_shards

pytest.importorskip('webdataset', reason='the extra tar is not installed')


@pytest.fixture
def shards(image_pairs, tmp_path):
    """Three shards of three, four and two pairs, and the folders they are made of."""
    gt, lq = image_pairs('in_tar', count=9)
    for number, names in enumerate((range(3), range(3, 7), range(7, 9))):
        with tarfile.open(tmp_path / f'set-{number:02d}.tar', 'w') as tar:
            for name in names:
                for kind, folder in (('gt', gt), ('lq', lq)):
                    tar.add(Path(folder) / f'{name:04d}.png', f'{name:04d}.{kind}.png')
    return str(tmp_path / 'set-{00..02}.tar'), gt, lq


def options(shards, **more):
    return {'phase': 'train', 'scale': 2, 'gt_size': 16, 'shards': shards, **more}


def names(dataset):
    return [item()['gt_path'].split(': ')[1] for item in dataset]


def test_a_pass_gives_every_pair_once_in_an_order_of_the_epoch_and_the_seed(shards):
    dataset = PairedTarDataset(options(shards[0], shuffle_buffer=4))
    first, again = names(dataset), names(dataset)
    dataset.set_epoch(1)
    other = names(dataset)
    assert len(dataset) == 9 and sorted(first) == [f'{i:04d}.gt.png' for i in range(9)]
    assert first == again != other and sorted(other) == sorted(first)
    assert names(PairedTarDataset(options(shards[0], shuffle_seed=3))) != first


def test_a_pass_may_begin_anywhere(shards):
    dataset = PairedTarDataset(options(shards[0]))
    whole = names(dataset)
    dataset.skip(5)
    assert names(dataset) == whole[5:]
    assert names(dataset) == whole, 'the next one is whole'


def test_samples_are_those_of_the_same_files_in_folders(shards):
    plain = {'use_hflip': False, 'use_rot': False}
    in_tar = PairedTarDataset(options(shards[0], **plain))
    opt = options(None, dataroot_gt=shards[1], dataroot_lq=shards[2], **plain)
    files = PairedImageDataset(opt)
    by_name = {Path(pair['gt_path']).stem: index for index, pair in enumerate(files.paths)}
    import random

    for item in in_tar:
        random.seed(1)
        ours = item()
        random.seed(1)
        theirs = files[by_name[Path(ours['gt_path'].split(': ')[1]).name.split('.')[0]]]
        assert torch.equal(ours['lq'], theirs['lq']) and torch.equal(ours['gt'], theirs['gt'])


@pytest.mark.parametrize('workers', [0, 2])
def test_a_run_is_resumed_in_the_middle_of_an_epoch_with_equal_bits(
    run, train_opt, shards, workers
):
    def opt(name, **more):
        opt = train_opt(name=name, **more)
        opt['datasets']['train'] = {
            'type': 'PairedTarDataset',
            'shards': shards[0],
            'gt_size': 16,
            'batch_size_per_gpu': 2,
            'num_worker_per_gpu': workers,
            'shuffle_buffer': 3,
        }
        return opt

    whole = run(opt('whole'))
    run(opt('cut', train__total_iter=4))
    cut = run(opt('cut'), '--auto_resume')
    assert rows(cut) == rows(whole)
    for name in ('6.state', 'net_g_6.pth'):
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == []


@pytest.mark.parametrize('number', [7, 12])
def test_a_number_of_samples_that_is_wrong_is_noticed_at_the_end_of_a_pass(shards, number):
    with pytest.raises(ValueError, match=f'num_samples is {number}, and the shards held 9 pairs'):
        names(PairedTarDataset(options(shards[0], num_samples=number)))


def test_shards_are_named_by_patterns_braces_and_addresses(shards, tmp_path):
    expected = [str(tmp_path / f'set-0{i}.tar') for i in range(3)]
    assert find_shards(shards[0]) == find_shards(str(tmp_path / '*.tar')) == expected
    addresses = [f'https://example.org/a-{i}.tar' for i in (1, 2)]
    assert find_shards(['https://example.org/a-{1..2}.tar', expected[0]]) == [
        *addresses,
        expected[0],
    ]


@pytest.mark.parametrize('name', ['pipe:touch ran', 'http://example.org/a.tar', 'gs://a/b.tar'])
def test_commands_and_other_addresses_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='neither a file nor an https URL'):
        PairedTarDataset(options(name, num_samples=1))
    assert not (tmp_path / 'ran').exists()


def test_what_is_wrong_with_shards_is_said(shards, tmp_path):
    with pytest.raises(FileNotFoundError, match='no file .*none.tar'):
        PairedTarDataset(options(str(tmp_path / 'none.tar')))
    with pytest.raises(ValueError, match='num_samples: required'):
        PairedTarDataset(options('https://example.org/a.tar'))
    with pytest.raises(ValueError, match='is for training'):
        PairedTarDataset(options(shards[0], phase='val'))
    (tmp_path / 'broken.tar').write_bytes(b'no tar at all' * 100)
    with pytest.raises(ValueError, match=r'cannot read .*broken\.tar'):
        PairedTarDataset(options(str(tmp_path / 'broken.tar')))
    with tarfile.open(tmp_path / 'empty.tar', 'w') as tar:
        tar.add(Path(shards[1]) / '0000.png', '0000.png')
    with pytest.raises(ValueError, match='no pairs in 1 shards'):
        PairedTarDataset(options(str(tmp_path / 'empty.tar')))


def test_a_pair_that_is_none_is_named(shards, tmp_path):
    with tarfile.open(tmp_path / 'odd.tar', 'w') as tar:
        tar.add(Path(shards[1]) / '0000.png', 'lonely.gt.png')
        for kind, content in (('gt', b'no image'), ('lq', cv2.imencode('.png', _gray())[1])):
            info = tarfile.TarInfo(f'text.{kind}.png')
            info.size = len(bytes(content))
            tar.addfile(info, io.BytesIO(bytes(content)))
    items = {}
    for item in PairedTarDataset(options(str(tmp_path / 'odd.tar'), shuffle_buffer=1)):
        items[item.args[0]['__key__']] = item
    with pytest.raises(ValueError, match='lonely has no lq image'):
        items['lonely']()
    with pytest.raises(ValueError, match=r'cannot read .*odd.tar: text.gt.png'):
        items['text']()


def _gray():
    import numpy as np

    return np.zeros((8, 8), np.uint8)


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        ({'shards': None}, 'shards must be a file, a pattern or a list'),
        ({'shards': []}, 'shards must be a file, a pattern or a list'),
        ({'shards': ['a.tar', None]}, 'shards must be a file, a pattern or a list'),
        ({'shards': '.'}, 'there is no file'),
        ({'num_samples': 1.5}, r'num_samples must be an integer of at least 1, got 1\.5'),
        ({'num_samples': 0}, 'num_samples must be an integer of at least 1, got 0'),
        ({'shuffle_buffer': 0}, 'shuffle_buffer must be an integer of at least 1'),
        ({'shuffle_seed': 'a'}, "shuffle_seed must be an integer of at least 0, got 'a'"),
        ({'meta_info_file': 'x', 'recursive': True}, 'meta_info_file, recursive: .* no such'),
        ({'cache': '/some/folder'}, 'cache: PairedTarDataset has no such option'),
    ],
)
def test_options_that_are_wrong_are_named(shards, wrong, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        PairedTarDataset(options(**{'shards': shards[0], **wrong}))


def test_shards_that_are_damaged_or_double_are_named_when_they_are_read(shards, tmp_path):
    whole = (tmp_path / 'set-00.tar').read_bytes()
    (tmp_path / 'short.tar').write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ValueError, match=r'cannot read the shards .*short\.tar'):
        list(PairedTarDataset(options(str(tmp_path / 'short.tar'), num_samples=3)))
    with tarfile.open(tmp_path / 'double.tar', 'w') as tar:
        for _ in range(2):
            tar.add(Path(shards[1]) / '0000.png', 'a.gt.png')
    with pytest.raises(ValueError, match=r'cannot read the shards .*double\.tar.*duplicate'):
        list(PairedTarDataset(options(str(tmp_path / 'double.tar'))))


def test_two_shards_may_end_and_begin_with_the_same_name(shards, tmp_path):
    for name in 'ab':
        with tarfile.open(tmp_path / f'{name}.tar', 'w') as tar:
            for kind, folder in zip(('gt', 'lq'), shards[1:], strict=True):
                tar.add(Path(folder) / '0000.png', f'0.{kind}.png')
    dataset = PairedTarDataset(options([str(tmp_path / f'{name}.tar') for name in 'ab']))
    assert len(dataset) == 2 and names(dataset) == ['0.gt.png', '0.gt.png']


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(shards, tmp_path):
    shard, number = tmp_path / 'set-01.tar', 4
    with tarfile.open(shard) as tar:
        offset = tar.getmembers()[number].offset
    content = bytearray(shard.read_bytes())
    content[offset] ^= 1
    shard.write_bytes(content)
    for read in (_count_pairs, lambda shard: list(_read([shard]))):
        with pytest.raises(ValueError, match=r'set-01\.tar: a header is damaged \(bad checksum'):
            read(str(shard))


@pytest.mark.parametrize('pack', [gzip, bz2, lzma])
def test_a_packed_shard_that_is_cut_off_is_named(shards, tmp_path, pack):
    content = pack.compress((tmp_path / 'set-01.tar').read_bytes())
    (tmp_path / 'cut.tar').write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r'cannot read .*cut\.tar: '):
        _count_pairs(str(tmp_path / 'cut.tar'))


def test_a_stream_is_no_part_of_a_mixture(shards):
    from basicsr.data import build_dataset

    parts = [{'type': 'PairedTarDataset', 'shards': shards[0]}]
    opt = {'type': 'ConcatDataset', 'phase': 'train', 'scale': 2, 'gt_size': 16, 'parts': parts}
    with pytest.raises(ValueError, match='PairedTarDataset is read sequentially'):
        build_dataset(opt)


def test_a_file_named_like_a_command_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'pipe:touch marker;.tar').write_bytes(b'')
    for pattern in ('*.tar', 'pipe:touch marker;.tar'):
        assert find_shards(pattern) == [str(tmp_path / 'pipe:touch marker;.tar')]
    with pytest.raises(ValueError, match='cannot read'):
        next(iter(PairedTarDataset(options('*.tar', num_samples=1))))
    assert not (tmp_path / 'marker').exists()


@pytest.mark.parametrize('rest', ["'; touch x; '", '`touch x`', '$(touch x)', 'a b', '"'])
def test_an_address_that_a_shell_would_obey_is_refused(rest):
    with pytest.raises(ValueError, match='has blanks or quotes'):
        find_shards(f'https://localhost/{rest}.tar')
