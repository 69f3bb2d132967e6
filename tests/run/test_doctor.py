"""Planted faults are found by ``basicsr doctor``, each as what it is, and nothing else is."""

import json
import re
from collections import defaultdict

import cv2
import numpy as np
import pytest
from PIL import Image
from textures import texture

from basicsr.data.exclusion import kept_images
from basicsr.run.doctor import look_through, set_of_folders
from basicsr.run.doctor_checks import KINDS, Demands
from basicsr.run.doctor_report import (
    Report,
    table,
    write_exclusion_list,
    write_html,
    write_json,
)
from basicsr.utils.errors import UserError
from basicsr.utils.matlab_functions import reduce_image

PAIRED = Demands(scale=2, gt_size=64)


def encoded(img, extension='.png', *params):
    return cv2.imencode(extension, img, params)[1].tobytes()


def jpeg(img, quality):
    return cv2.imdecode(np.frombuffer(encoded(img, '.jpg', 1, quality), np.uint8), 1)


def by_pillow(path, img, **exif):
    picture = Image.fromarray(img[..., ::-1])
    tags = picture.getexif()
    tags[274] = exif.get('orientation', 1)
    (picture.quantize(32) if exif.get('palette') else picture).save(path, exif=tags)


@pytest.fixture
def plant(tmp_path):
    """Write three clean pairs and more images, arrays or bytes; returns the folders."""

    def write(gt=(), lq=(), folder='data', seed=0):
        folders = tmp_path / folder / 'gt', tmp_path / folder / 'lq'
        clean = {f'clean{i}.png': texture(seed + i, 128, 128) for i in range(3)}
        images = clean | dict(gt), {n: reduce_image(i, 2) for n, i in clean.items()} | dict(lq)
        for path, named in zip(folders, images, strict=True):
            path.mkdir(parents=True)
            for name, img in named.items():
                content = img if isinstance(img, bytes) else encoded(img)
                (path / name).write_bytes(content)
        return tuple(map(str, folders))

    return write


def looked_through(*folders, demands=PAIRED):
    images = set_of_folders(*folders, demands)
    look_through([images], workers=2)
    return images


def kinds(images):
    found = defaultdict(list)
    for finding in images.findings:
        found[images.name_of(finding.path)].append(finding.kind)
    return dict(found)


IMG = texture(50, 128, 128)
LQ = reduce_image(IMG, 2)
GRAY = np.stack([IMG[..., 1]] * 3, axis=2)
SMALL = texture(51, 60, 80)
BLOCKS = jpeg(texture(52, 131, 133), 40)[3:, 5:]
ENLARGED = cv2.resize(texture(53, 128, 128), (256, 256), interpolation=cv2.INTER_CUBIC)
REPEATED = texture(54, 64, 64).repeat(2, 0).repeat(2, 1)
ALPHA = np.dstack([IMG, np.full((128, 128), 128, np.uint8)])
DEEP = IMG.astype(np.uint16) * 257
PAIRS = {
    'unreadable': (encoded(IMG)[:900], LQ, '900 bytes are no image'),
    'wrong_size': (IMG, LQ[:-1], 'GT 128x128, LQ 63x64, scale 2'),
    'too_small': (SMALL, reduce_image(SMALL, 2), '60x80, gt_size 64'),
    'unlike': (IMG, reduce_image(texture(55, 128, 128), 2), 'correlation'),
    'shifted': (IMG, IMG[::2, ::2], '0.2. down, .0.2. right, in LQ pixels'),
    'other_kernel': (
        IMG,
        cv2.resize(IMG, (64, 64), interpolation=cv2.INTER_AREA),
        'OpenCV area, most of the training set: antialiased bicubic',
    ),
    'jpeg': (BLOCKS, reduce_image(BLOCKS, 2), 'quality (39|40|41)'),
    'upscaled': (ENLARGED, reduce_image(ENLARGED, 2), 'dB at 0.50 of the resolution'),
    'duplicate': (
        jpeg(texture(0, 128, 128), 80),
        reduce_image(jpeg(texture(0, 128, 128), 80), 2),
        'as clean0.png of ',
    ),
    'alpha': (ALPHA, LQ, 'transparency'),
    'deep': (DEEP, LQ, 'uint16'),
    'gray': (GRAY, reduce_image(GRAY, 2), 'no colour'),
}


@pytest.mark.parametrize('kind', PAIRS)
def test_a_planted_fault_is_found_as_what_it_is(plant, kind):
    gt, lq, text = PAIRS[kind]
    images = looked_through(*plant({'odd.png': gt}, {'odd.png': lq}))
    assert kinds(images) == {'odd.png': [kind]}
    assert re.search(text, images.findings[0].text)
    assert Report([images]).can_start != KINDS[kind].is_error
    assert images.excluded() == (['odd.png'] if KINDS[kind].is_harmful else [])


def test_pixels_that_are_repeated_are_found(plant):
    images = looked_through(plant({'odd.png': REPEATED})[0], None)
    assert kinds(images) == {'odd.png': ['upscaled']}
    assert images.findings[0].text == 'pixels are repeated 2 times'


def test_palettes_and_turned_files_are_found(plant, tmp_path):
    folder, _ = plant()
    by_pillow(f'{folder}/p.png', IMG, palette=True)
    by_pillow(f'{folder}/turned.jpg', texture(56, 128, 128), orientation=6)
    assert kinds(looked_through(folder, None)) == {'p.png': ['palette'], 'turned.jpg': ['rotated']}


def test_faults_of_the_lq_are_told_as_such(plant):
    images = looked_through(*plant({'odd.png': IMG}, {'odd.png': encoded(LQ)[:500]}))
    assert kinds(images) == {'odd.png': ['unreadable']}
    assert images.findings[0].text.startswith('LQ: ')
    assert images.findings[0].path.endswith('lq/odd.png')
    assert images.excluded() == ['odd.png']


def test_nothing_is_found_in_clean_pairs_and_their_kernel_is_named(plant):
    images = looked_through(*plant())
    assert images.findings == []
    assert images.kernels == {'MATLAB bicubic': 3}
    text = table(Report([images]))
    assert '3 pairs; LQ made by MATLAB bicubic (3)' in text
    assert 'not found: unreadable, wrong size, too small, unlike pair, ' in text
    assert 'in validation' not in text  # there is no such set
    assert 'Nothing was found that keeps training from starting; 0 warnings.' in text


def test_nothing_is_found_in_the_photographs_of_the_quickstart(repository):
    folder = repository / 'datasets' / 'quickstart' / 'val'
    images = looked_through(str(folder / 'gt'), str(folder / 'lq_x4'), demands=Demands(4, 96))
    assert kinds(images) == {'camera.png': ['gray']}
    assert images.kernels == {'MATLAB bicubic': 3}


def test_compression_of_a_usual_quality_is_a_fact_and_no_finding(plant):
    images = looked_through(plant({'odd.png': jpeg(IMG, 85)})[0], None)
    assert images.findings == []
    assert '1 of GT were JPEG files once, of quality 85 and more' in table(Report([images]))


def test_kernels_of_rounding_alone_and_unknown_ones_are_no_mixture(plant):
    pillow = np.asarray(Image.fromarray(IMG).resize((64, 64), Image.Resampling.BICUBIC))
    images = looked_through(*plant({'odd.png': IMG}, {'odd.png': pillow}))
    assert images.findings == []
    assert images.kernels == {'MATLAB bicubic': 3, 'Pillow bicubic': 1}
    noise = np.random.default_rng(0).normal(0, 9, (64, 64, 3))
    noisy = {
        f'{n}.png': np.clip(reduce_image(texture(60 + n, 128, 128), 2) + noise, 0, 255).astype(
            np.uint8
        )
        for n in range(4)
    }
    gt = {f'{n}.png': texture(60 + n, 128, 128) for n in range(4)}
    images = looked_through(*plant(gt, noisy, folder='noisy'))
    assert images.findings == []
    assert images.kernels == {'unknown': 4, 'MATLAB bicubic': 3}


def test_copies_in_validation_are_found_and_gt_that_is_cut_is_none(plant):
    copy, cut = jpeg(texture(1, 128, 128), 85), texture(30, 128, 139)
    train = set_of_folders(*plant(), PAIRED)
    gt = {'v.png': copy, 'cut.png': cut}
    lq = {'v.png': reduce_image(copy, 2), 'cut.png': reduce_image(cut[:, :138], 2)}
    demands = PAIRED._replace(is_training=False, gt_size=0)
    val = set_of_folders(*plant(gt, lq, folder='val', seed=20), demands)
    look_through([train, val], workers=2)
    assert kinds(train) == {'clean1.png': ['leaked']}
    assert train.findings[0].text == f'as v.png of {val.name}'
    assert val.findings == []
    assert train.excluded() == ['clean1.png']


def test_the_list_of_exclusions_is_read_by_the_datasets(plant, tmp_path):
    folders = plant({'odd.png': IMG, 'b c.png': SMALL}, {'odd.png': LQ[1:], 'b c.png': LQ})
    images = looked_through(*folders)
    file = str(tmp_path / 'new' / 'bad.txt')
    assert write_exclusion_list(Report([images]), file) == 2
    paths = [pair['gt'] for pair in images.paths]
    kept = kept_images(paths, [folders[0]], {'exclude': file})
    assert [paths[i].rpartition('/')[2] for i in kept] == [f'clean{i}.png' for i in range(3)]


def test_the_table_counts_and_shows_the_worst_first(plant):
    gt = {f'{n}.png': texture(70 + n, 60 - n, 80) for n in range(0, 10, 2)}
    images = looked_through(plant(gt)[0], None)
    lines = table(Report([images])).splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith('error    too small'))
    assert lines[row].split()[3] == '5'
    assert [line.partition(': ')[2][:5] for line in lines[row : row + 3]] == [
        *('52x80', '54x80', '56x80')
    ]


def test_the_page_is_one_file_with_pictures_and_escaped_names(plant, tmp_path):
    pair = {'<b>.png': IMG}, {'<b>.png': IMG[::2, ::2]}
    images = looked_through(*plant(*pair))
    write_html(Report([images], error='no <model>'), str(tmp_path / 'page.html'))
    page = (tmp_path / 'page.html').read_text()
    assert page.count('src="data:image/jpeg;base64,') == 2
    assert '&lt;b&gt;.png: ' in page and '<b>.png' not in page
    assert 'no &lt;model&gt;' in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert 'shifted pair: 1' in page


def test_the_json_file_has_every_finding(plant, tmp_path):
    images = looked_through(*plant({'odd.png': IMG}, {'odd.png': LQ[1:]}))
    write_json(Report([images], losses={'l_pix': 0.5}), str(tmp_path / 'x.json'))
    content = json.loads((tmp_path / 'x.json').read_text())
    assert content['can_start'] is False
    assert content['first_step'] == {'error': '', 'losses': {'l_pix': 0.5}}
    assert content['sets'][0]['kernels'] == {'MATLAB bicubic': 3}
    assert content['sets'][0]['findings'] == [
        {
            'kind': 'wrong_size',
            'error': True,
            'name': 'odd.png',
            'path': f'{images.roots["gt"][0]}/odd.png',
            'value': 2,
            'text': 'GT 128x128, LQ 63x64, scale 2',
        }
    ]


def test_folders_that_do_not_pair_up_or_have_no_images_are_refused(plant, tmp_path):
    folders = plant({'odd.png': IMG})
    with pytest.raises(UserError, match='do not pair up'):
        set_of_folders(*folders, PAIRED)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='no images in'):
        set_of_folders(str(tmp_path / 'empty'), None, PAIRED)
