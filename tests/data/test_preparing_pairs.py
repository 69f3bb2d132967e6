import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from basicsr.data import preparing_pairs
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.data.preparing_pairs import prepare_pairs, split_pairs
from basicsr.utils import yaml_load
from basicsr.utils.matlab_functions import reduce_image


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Ten photographs of ten sizes, each of its own colours; the third and fourth are turned."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    Path('photos').mkdir()
    for number in range(10):
        stored = Image.fromarray(rng.integers(0, 256, (21 + number, 34 + number, 3), np.uint8))
        exif = Image.Exif()
        exif[274] = {2: 6, 3: 8}.get(number, 1)
        stored.save(f'photos/{number}.png', exif=exif)
    return Path('photos')


def read(path):
    return cv2.imread(str(path), cv2.IMREAD_UNCHANGED)


def names(folder):
    return sorted(path.stem for path in Path(folder).glob('*.png'))


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob('*') if path.is_file()}


def test_photographs_are_turned_cropped_reduced_and_divided(photos):
    said = prepare_pairs(photos, 4, '30%', workers=2)
    train, val = (Path('datasets/photos_x4', part) for part in ('train', 'val'))
    assert (len(names(train / 'gt')), len(names(val / 'gt'))) == (7, 3)
    assert sorted(names(train / 'gt') + names(val / 'gt')) == [str(n) for n in range(10)]
    for part in (train, val):
        assert names(part / 'gt') == names(part / 'lq')
        for name in names(part / 'gt'):
            stored = read(photos / f'{name}.png')
            turned = np.rot90(stored, {'2': 3, '3': 1}.get(name, 0))
            gt = turned[: turned.shape[0] // 4 * 4, : turned.shape[1] // 4 * 4]
            assert np.array_equal(read(part / 'gt' / f'{name}.png'), gt)
            assert np.array_equal(read(part / 'lq' / f'{name}.png'), reduce_image(gt, 4))
    assert said.splitlines() == [
        '10 photographs of photos are 7 pairs for training and 3 for validation:',
        '  train: {dataroot_gt: datasets/photos_x4/train/gt, '
        'dataroot_lq: datasets/photos_x4/train/lq}',
        '  val: {dataroot_gt: datasets/photos_x4/val/gt, dataroot_lq: datasets/photos_x4/val/lq}',
        '2 of them were turned, as their EXIF orientation says.',
        'Next: basicsr train -opt datasets/photos_x4/train.yml',
    ]


@pytest.mark.parametrize(
    ('val', 'count'), [('1', 1), ('9', 9), ('4%', 1), ('25%', 2), ('35.5%', 4), ('90%', 9)]
)
def test_the_share_for_validation_is_a_number_or_a_percentage(photos, val, count):
    prepare_pairs(photos, 2, val, 'out', seed=3)
    assert len(names('out/val/gt')) == count
    assert len(names('out/train/gt')) == 10 - count


def test_the_seed_alone_decides_what_is_drawn(photos):
    drawn = []
    for number, seed in enumerate((0, 0, 1, 2)):
        prepare_pairs(photos, 4, '3', f'out{number}', seed=seed, workers=1 + number % 2)
        drawn.append(names(f'out{number}/val/gt'))
    assert drawn[0] == drawn[1]
    assert len({tuple(d) for d in drawn}) == 3


@pytest.mark.parametrize('scale', [2, 3])
def test_the_option_file_is_the_quickstart_on_these_pairs(photos, scale, repository):
    prepare_pairs(photos, scale, '2', 'my pairs')
    made = yaml_load('my pairs/train.yml')
    want = yaml_load(repository / 'options/quickstart.yml')
    want['name'] = 'my pairs'
    want['scale'] = want['network_g']['upscale'] = scale
    for part in ('train', 'val'):
        dataset = want['datasets'][part]
        dataset |= {f'dataroot_{kind}': f'my pairs/{part}/{kind}' for kind in ('gt', 'lq')}
    want['datasets']['train'] |= {'gt_size': 24 * scale, 'pad_small': True}  # crops of 48 and 72
    for metric in want['val']['metrics'].values():
        metric['crop_border'] = scale
    assert made == want


def test_photographs_that_have_room_for_the_crop_are_not_padded(photos):
    for path in photos.iterdir():
        cv2.imwrite(str(path), np.zeros((48, 50, 3), np.uint8))
    prepare_pairs(photos, 2, '1', 'out')
    train = yaml_load('out/train.yml')['datasets']['train']
    assert train['gt_size'] == 48
    assert 'pad_small' not in train


def test_an_interrupted_run_goes_on_with_the_same_pairs(photos, monkeypatch):
    write, made = preparing_pairs.imwrite, []

    def interrupted(img, path):
        if len(made) == 7:  # between LQ and GT of a pair
            raise KeyboardInterrupt
        made.append(path)
        write(img, path)

    with monkeypatch.context() as patch:
        patch.setattr(preparing_pairs, 'imwrite', interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_pairs(photos, 4, '30%', 'out')
    assert not Path('out/train.yml').exists()
    with pytest.raises(FileExistsError, match='exists: add --resume to go on or --overwrite'):
        prepare_pairs(photos, 4, '30%', 'out')
    made.clear()
    monkeypatch.setattr(
        preparing_pairs, 'imwrite', lambda img, path: made.append(path) or write(img, path)
    )
    said = prepare_pairs(photos, 4, '30%', 'out', resume=True)
    assert 'validation (3 were there already):' in said
    assert len(made) == 14
    before = contents('out')
    prepare_pairs(photos, 4, '30%', 'whole')
    for path, content in contents('whole').items():
        if path.suffix == '.png':
            assert before[Path('out', *path.parts[1:])] == content


@pytest.mark.parametrize(
    'other', [{'scale': 2}, {'val': '4'}, {'seed': 1}], ids=['scale', 'val', 'seed']
)
def test_pairs_made_with_other_settings_are_not_gone_on_with(photos, other):
    settings = {'scale': 4, 'val': '3', 'seed': 0}
    prepare_pairs(photos, output='out', **settings)
    Path('out/train/gt').joinpath(names('out/train/gt')[0] + '.png').unlink()
    before = contents('out')
    message = r'out was made with --scale 4, --val 3, --seed 0, of 10 images \(\w+\), and not'
    with pytest.raises(ValueError, match=message):
        prepare_pairs(photos, output='out', resume=True, **settings | other)
    assert contents('out') == before


def test_further_photographs_are_not_drawn_into_both_sets(photos):
    prepare_pairs(photos, 4, '3', 'out')
    (photos / '9.png').rename(photos / '00.png')
    with pytest.raises(ValueError, match='of 10 images'):
        prepare_pairs(photos, 4, '3', 'out', resume=True)
    prepare_pairs(photos, 4, '5', 'out', seed=5, overwrite=True)
    assert sorted(names('out/train/gt') + names('out/val/gt')) == sorted(
        path.stem for path in photos.iterdir()
    )
    assert names('out/train/gt') == names('out/train/lq')


def test_images_of_others_and_an_edited_option_file_stay(photos):
    Path('out/train/gt').mkdir(parents=True)
    Path('out/train/gt/mine.png').write_bytes((photos / '0.png').read_bytes())
    with pytest.raises(FileExistsError, match='mine.png exists'):
        prepare_pairs(photos, 4, '3', 'out')
    with pytest.raises(FileExistsError, match='mine.png was made by another program'):
        prepare_pairs(photos, 4, '3', 'out', overwrite=True)
    assert names('out/train/gt') == ['mine']
    prepare_pairs(photos, 4, '3', 'other')
    Path('other/train.yml').write_text('edited')
    prepare_pairs(photos, 4, '3', 'other', resume=True)
    assert Path('other/train.yml').read_text() == 'edited'


def test_what_cannot_be_divided_is_refused_before_anything_is_written(photos):
    for val in ('0', '10', '99%', 'all', '-1', '5 %'):
        with pytest.raises(ValueError, match=re.escape(f'--val {val}') + '|got ' + repr(val)):
            prepare_pairs(photos, 4, val, 'out')
    with pytest.raises(ValueError, match='--scale must be at least 2'):
        prepare_pairs(photos, 1, '3', 'out')
    Path('a/train').mkdir(parents=True)
    photos = photos.rename('a/train/gt')
    with pytest.raises(ValueError, match='would be written to'):
        prepare_pairs(photos, 4, '3', 'a')
    Path('empty').mkdir()
    with pytest.raises(FileNotFoundError, match='empty holds no images'):
        prepare_pairs('empty', 4, '3', 'out')
    cv2.imwrite(str(photos / '0.bmp'), np.zeros((8, 8), np.uint8))
    with pytest.raises(ValueError, match='differ in the extension alone'):
        prepare_pairs(photos, 4, '3', 'out')
    assert not Path('out').exists()


def test_a_photograph_that_cannot_be_used_is_named(photos):
    (photos / '4.png').write_bytes(b'no image')
    with pytest.raises(ValueError, match=r'photos/4\.png: The 8 bytes'):
        prepare_pairs(photos, 4, '3', 'out')
    cv2.imwrite(str(photos / '4.png'), np.zeros((3, 40), np.uint8))
    with pytest.raises(ValueError, match=r'photos/4\.png: 40 x 3 pixels are too few for scale 4'):
        prepare_pairs(photos, 4, '3', 'out', resume=True)


def test_existing_pairs_are_divided_by_lists_that_a_dataset_reads(image_pairs, tmp_path):
    gt, lq = image_pairs(count=8)
    before = contents(tmp_path / 'data')
    said = split_pairs(gt, tmp_path / 'lists', lq, '25%', seed=1)
    assert said.startswith('6 images for training, 2 for validation:\n')
    parts = {}
    for part in ('train', 'val'):
        opt = {'dataroot_gt': gt, 'dataroot_lq': lq, 'scale': 2, 'phase': 'val'}
        opt['meta_info_file'] = str(tmp_path / 'lists' / f'{part}.txt')
        parts[part] = {Path(pair['gt_path']).name for pair in PairedImageDataset(opt).paths}
    assert (len(parts['train']), len(parts['val'])) == (6, 2)
    assert parts['train'] | parts['val'] == {f'{n:04d}.png' for n in range(8)}
    assert contents(tmp_path / 'data') == before
    with pytest.raises(FileExistsError, match=r'train\.txt exists'):
        split_pairs(gt, tmp_path / 'lists', lq)
    split_pairs(gt, tmp_path / 'lists', None, '4', overwrite=True)
    assert len((tmp_path / 'lists/val.txt').read_text().splitlines()) == 4


def test_pairs_that_do_not_match_are_not_divided(image_pairs, tmp_path):
    gt, lq = image_pairs(count=3)
    Path(lq, '0001.png').unlink()
    with pytest.raises(ValueError, match='do not pair up'):
        split_pairs(gt, tmp_path / 'lists', lq)
    Path(gt, 'a b.png').write_bytes(Path(gt, '0000.png').read_bytes())
    with pytest.raises(ValueError, match="'a b.png': a name ends at its first blank"):
        split_pairs(gt, tmp_path / 'lists', val='1')
    assert not (tmp_path / 'lists').exists()
