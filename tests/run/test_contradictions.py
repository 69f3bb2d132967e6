"""Options that do not go together are named."""

import pytest

from basicsr.run.contradictions import contradictions
from basicsr.run.explanation import datasets
from basicsr.utils.options import OptionFile, Process


@pytest.fixture
def found(write, train_opt, tmp_path):
    """The contradictions of the small training with changes, by key path."""

    def found(**changes):
        class Flags:
            opt, force_yml, auto_resume, debug = '', (), False, False

        file = OptionFile(write(train_opt(**{'train__ema_decay': 0} | changes)))
        opt = file.complete(file.checked(), Flags, tmp_path, Process('none', 0, 1, 1, 0))
        return {'.'.join(path): text for path, text in contradictions(opt, dict(datasets(opt)))}

    return found


def test_a_sound_file_has_none(found):
    assert found() == {}


SCHEDULE = {'type': 'MultiStepLR', 'milestones': [4, 6, 7, 8]}
COSINE = {'type': 'CosineAnnealingRestartLR', 'periods': [2, 2], 'restart_weights': [1, 1]}
SWIN = {'type': 'SwinIR', 'upscale': 2, 'window_size': 3, 'upsampler': 'pixelshuffle'}


@pytest.mark.parametrize(
    ('changes', 'key', 'text'),
    [
        (
            {'train__scheduler': SCHEDULE},
            'train.scheduler.milestones',
            '7, 8: after the end, total_iter 6',
        ),
        ({'train__scheduler': COSINE}, 'train.scheduler.periods', '4 iterations together'),
        (
            {'train__scheduler': {'type': 'CosineAnnealingLR', 'T_max': 3}},
            *('train.scheduler.T_max', '3, and total_iter is 6: the rate rises again'),
        ),
        ({'train__warmup_iter': 7}, 'train.warmup_iter', '7 is not within total_iter 6'),
        ({'val__val_freq': 7}, 'val.val_freq', 'only the end is validated'),
        ({'logger__save_checkpoint_freq': 7}, 'logger.save_checkpoint_freq', 'no checkpoint'),
        ({'logger__print_freq': 7}, 'logger.print_freq', 'no losses are logged'),
        ({'train__net_d_init_iters': 6}, 'train.net_d_init_iters', '6 is not within'),
        ({'train__freeze': [{'pattern': 'body', 'until': 6}]}, 'train.freeze.0.until', 'never'),
        ({'train__swa': {'start': 9}}, 'train.swa.start', '9 is after total_iter 6'),
        ({'train__ema_decay': 0.9}, 'train.ema_decay', '0.9 averages over about 10 iterations'),
        (
            {'datasets__train__gt_size': 15},
            'datasets.train.gt_size',
            '15 is not a multiple of scale',
        ),
        ({'network_g': SWIN}, 'datasets.train.gt_size', '16 is not a multiple of 6, window_size 3'),
        ({'network_g__upscale': 3}, 'network_g.upscale', '3, and the scale of the file is 2'),
        (
            {'val__metrics': {'psnr': {'type': 'calculate_psnr', 'crop_border': 4}}},
            *('val.metrics.psnr.crop_border', '4, and published numbers'),
        ),
        ({'val__metrics': None}, 'val.metrics', 'images without scores'),
        ({'val': None}, 'datasets', 'nothing is validated'),
        ({'path__pretrain_network_g': 'a.pth'}, 'path.pretrain_network_g', 'no file a.pth'),
    ],
)
def test_each_is_named_with_its_key_and_no_other(found, changes, key, text):
    problems = found(**changes)
    assert problems.keys() == {key}
    assert text in problems[key]


def test_images_of_both_training_and_validation_are_found_through_links(found, tmp_path, train_opt):
    opt = train_opt()
    gt = tmp_path / 'linked'
    gt.symlink_to(opt['datasets']['train']['dataroot_gt'])
    problems = found(
        datasets__val__dataroot_gt=str(gt),
        datasets__val__dataroot_lq=opt['datasets']['train']['dataroot_lq'],
    )
    assert problems.keys() == {'datasets.val'}
    assert problems['datasets.val'].startswith('10 images are also trained on: ')
