"""``basicsr doctor`` as a command: what it reads, leaves alone, and ends with."""

import json
import sys

import cv2
import pytest
from textures import texture

from basicsr import cli
from basicsr.utils.matlab_functions import reduce_image


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Run ``basicsr doctor`` in this process: (exit status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['basicsr', 'doctor', *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def option_file(train_opt, tmp_path):
    """Write an option file and sets of textures; returns its name."""

    def write(**overrides):
        opt = train_opt(**overrides)
        for part, count in (('train', 4), ('val', 2)):
            for key in ('gt', 'lq'):
                folder = tmp_path / part / key
                folder.mkdir(parents=True)
                opt['datasets'][part][f'dataroot_{key}'] = str(folder)
            for number in range(count):
                img = texture(number + 10 * (part == 'val'), 96, 96)
                cv2.imwrite(f'{tmp_path}/{part}/gt/{number}.png', img)
                cv2.imwrite(f'{tmp_path}/{part}/lq/{number}.png', reduce_image(img, 2))
        (tmp_path / 'x.yml').write_text(json.dumps(opt))
        return 'x.yml'

    return write


def files_below(folder):
    return {str(file.relative_to(folder)) for file in folder.rglob('*')}


def test_a_clean_training_can_start_and_nothing_is_written(doctor, option_file, tmp_path):
    file = option_file(datasets__train__num_worker_per_gpu=1)
    before = files_below(tmp_path)
    status, out, err = doctor('-opt', file, '--strict')
    assert (status, err) == (0, '')
    assert 'train: 4 pairs; LQ made by MATLAB bicubic (4)\nval: 2 pairs' in out
    assert 'First step: made (l_pix 0.' in out
    assert out.endswith('Training can start; 0 warnings.\n')
    assert files_below(tmp_path) == before


def test_a_first_step_that_fails_is_told_with_status_1(doctor, option_file):
    file = option_file(network_g__upscale=4)
    status, out, _ = doctor('-opt', file)
    assert status == 1
    assert 'First step: network_g (SRVGGNetCompact) makes images of 32x32' in out
    assert 'Training cannot start; 0 warnings.' in out
    status, out, _ = doctor('-opt', file, '--no-step')
    assert status == 0
    assert 'First step' not in out


def test_a_loss_that_is_not_finite_fails_the_first_step(doctor, option_file):
    file = option_file(train__pixel_opt={'type': 'L1Loss', 'loss_weight': 1e300})
    status, out, _ = doctor('-opt', file)
    assert status == 1
    assert 'First step: ' in out and 'finite' in out


def test_excluded_images_are_no_fault_of_the_next_look(doctor, option_file, tmp_path):
    file = option_file()
    (tmp_path / 'train/gt/2.png').write_bytes(b'')
    cv2.imwrite(f'{tmp_path}/train/gt/3.png', texture(10, 96, 96))  # of the validation set
    files = '--exclude-list', 'bad.txt', '--json', 'x.json', '--html', 'x.html'
    status, out, _ = doctor('-opt', file, *files)
    assert status == 1
    assert '2 names in bad.txt' in out
    assert (tmp_path / 'bad.txt').read_text() == '2.png\n3.png\n'
    found = json.loads((tmp_path / 'x.json').read_text())['sets'][0]['findings']
    assert [f['kind'] for f in found] == ['unreadable', 'unlike', 'leaked']
    assert '2.png' in (tmp_path / 'x.html').read_text()
    status, out, _ = doctor('-opt', file, '--force_yml', 'datasets:train:exclude=bad.txt')
    assert (status, out.count('warning ')) == (0, 0)
    assert 'train: 2 pairs' in out


def test_unreadable_images_that_training_passes_over_are_warnings(doctor, option_file, tmp_path):
    file = option_file(datasets__train__on_error='skip')
    (tmp_path / 'train/gt/2.png').write_bytes(b'')
    before = files_below(tmp_path)
    status, out, _ = doctor('-opt', file)
    assert status == 0
    assert 'warning  unreadable          1  train/2.png: ' in out
    assert files_below(tmp_path) == before
    assert doctor('-opt', file, '--strict')[0] == 1


def test_every_kind_of_set_is_looked_through(doctor, option_file, tmp_path):
    text = (tmp_path / option_file()).read_text()
    opt = json.loads(text)
    pairs = opt['datasets']['train']
    folders = {key: pairs.pop(key) for key in ('type', 'dataroot_gt', 'dataroot_lq')}
    opt['datasets']['train'] = pairs | {'type': 'ConcatDataset', 'parts': [folders]}
    val = opt['datasets']['val']
    opt['datasets']['val_lq'] = {'type': 'SingleImageDataset', 'dataroot_lq': val['dataroot_lq']}
    opt['val']['metrics'] = {}
    (tmp_path / 'x.yml').write_text(json.dumps(opt))
    status, out, _ = doctor('-opt', 'x.yml')
    assert status == 0
    assert 'train_0: 4 pairs; LQ made by MATLAB bicubic (4)\nval: 2 pairs' in out
    assert '\nval_lq: 2 images\n' in out


def test_folders_are_looked_through_without_an_option_file(doctor, option_file, tmp_path):
    option_file()
    status, out, _ = doctor('train/gt', '--gt-size', 128)
    assert status == 1
    assert 'error    too small           4  train/gt/' in out
    status, out, _ = doctor('--gt', 'train/gt', '--lq', 'train/lq', '--scale', 2)
    assert status == 0
    assert 'train/gt: 4 pairs; LQ made by MATLAB bicubic (4)' in out
    status, out, _ = doctor('--gt', 'train/gt', '--lq', 'train/lq', '--scale', 3)
    assert status == 1
    assert 'error    wrong size          4  ' in out


@pytest.mark.parametrize(
    'arguments',
    [
        (),
        ('a', '-opt', 'x.yml'),
        ('a', '--lq', 'b', '--scale', '2'),
        ('--gt', 'a', '--lq', 'b'),
        ('--gt', 'a', '--scale', '2'),
        ('a', '--workers', '0'),
    ],
)
def test_flags_that_do_not_go_together_end_with_status_2(doctor, arguments):
    status, out, err = doctor(*arguments)
    assert (status, out) == (2, '')
    assert err.count('error: ') == 1


def test_what_cannot_be_found_is_one_message(doctor):
    status, _, err = doctor('nowhere')
    assert status == 1
    assert 'no folder nowhere' in err and 'Traceback' not in err
