"""What is checked of an option file with the classes that it names."""

import json

import pytest
from runs import log_text

from basicsr.utils.options import OptionError
from basicsr.utils.registry import ARCH_REGISTRY

OWN_DATASET = """
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.utils.registry import DATASET_REGISTRY

@DATASET_REGISTRY.register()
class OwnDataset(PairedImageDataset):
    def __init__(self, opt):
        self.flips = opt.get('use_flip')
        super().__init__(opt)
"""


def write_lines(tmp_path, opt):
    """The options as a file with a line for each key."""
    file = tmp_path / f'{opt["name"]}.yml'
    file.write_text(json.dumps(opt, indent=1))
    return file


def problems(run, opt):
    with pytest.raises(OptionError) as error:
        run(opt)
    return str(error.value).splitlines()


def test_all_components_are_checked_at_once_with_suggestions(run, train_opt, tmp_path):
    opt = train_opt(
        network_g__num_feet=4,
        train__optim_g={'type': 'Adam', 'lr': '1e-3', 'weight_decoy': 0},
        train__scheduler={'type': 'MultiStepLR', 'milestone': [4]},
        train__pixel_opt={'type': 'L2Loss'},
        train__losses=[{'type': 'CharbonnierLoss', 'esp': 1e-6}],
        val__metrics={'lpips': {'type': 'calculate_lpips'}, 'ssim': {'type': 'calculate_ssim'}},
    )
    found = problems(run, opt)
    assert all(line.startswith(f'{tmp_path}/tiny.yml:1: ') for line in found)
    text = '\n'.join(line.partition('.yml:1: ')[2] for line in found)
    for expected in (
        "network_g: no argument 'num_feet'; did you mean 'num_feat'? SRVGGNetCompact takes num_in",
        "train.optim_g: no argument 'weight_decoy'; did you mean 'weight_decay'? Adam takes lr, ",
        "train.optim_g: lr is the string '1e-3': write the number without quotes.",
        "train.scheduler: no argument 'milestone'; did you mean 'milestones'?",
        "train.scheduler: MultiStepRestartLR needs the argument 'milestones'.",
        "train.pixel_opt: No object named 'L2Loss' found in 'loss' registry! Did you mean",
        "train.losses.0: no argument 'esp'; did you mean 'eps'?",
        "val.metrics.lpips: No object named 'calculate_lpips' found in 'metric' registry! It knows",
        "val.metrics.ssim: calculate_ssim needs the argument 'crop_border'.",
    ):
        assert expected in text, expected
    assert len(found) == 9


def test_problems_have_the_lines_of_their_components(train_opt, tmp_path, monkeypatch):
    from basicsr.train import train_pipeline

    opt = train_opt(network_g__num_feet=4, train__pixel_opt={'type': 'L1Los'})
    file = write_lines(tmp_path, opt)
    monkeypatch.setattr('sys.argv', ['prog', '-opt', str(file)])
    with pytest.raises(OptionError) as error:
        train_pipeline(tmp_path)
    lines = file.read_text().splitlines()
    for text, key in zip(str(error.value).splitlines(), ('network_g', 'pixel_opt'), strict=True):
        number = int(text.split(':')[1])
        assert f'"{key}"' in lines[number - 1]


def test_a_key_that_nearly_spells_one_that_is_read_is_refused_also_beside_that(
    run, train_opt, tmp_path
):
    opt = train_opt(
        path={'pretrain_network_G': 'x.pth', 'strict_load_G': True},
        train__optim_G={'type': 'Adam', 'lr': 1},
        datasets__train__use_hflp=True,
        datasets__train__use_hflip=False,
    )
    opt['network_G'] = dict(opt['network_g'])
    found = {line.partition('.yml:1: ')[2] for line in problems(run, opt)}
    assert found == {
        f"{path}: {reader} does not read this key; did you mean '{meant}'?"
        for path, reader, meant in (
            ('path.pretrain_network_G', 'SRModel', 'pretrain_network_g'),
            ('path.strict_load_G', 'SRModel', 'strict_load_g'),
            ('train.optim_G', 'SRModel', 'optim_g'),
            ('network_G', 'SRModel', 'network_g'),
            ('datasets.train.use_hflp', 'PairedImageDataset', 'use_hflip'),
        )
    }
    assert not (tmp_path / 'experiments/tiny').exists()


def test_other_keys_that_nothing_reads_are_named_in_one_warning(run, train_opt):
    opt = train_opt(train__gan_opt={'type': 'GANLoss', 'gan_type': 'vanilla'}, train__total_iter=1)
    opt['network_d'] = {'type': 'UNetDiscriminatorSN', 'num_in_ch': 3}
    opt['datasets']['train']['kernel_list'] = ['iso']
    opt['gt_usm'], opt['val']['use_chop'] = True, True
    lines = [line for line in log_text(run(opt)).splitlines() if 'nothing reads' in line]
    assert len(lines) == 1
    named = lines[0].partition('nothing reads: ')[2].split(', ')
    assert set(named) == {
        *('gt_usm (SRModel)', 'network_d (SRModel)', 'train.gan_opt (SRModel)'),
        *('val.use_chop (SRModel)', 'datasets.train.kernel_list (PairedImageDataset)'),
    }
    with pytest.raises(OptionError, match=r'train\.gan_opt: SRModel does not read this key'):
        run({**opt, 'strict_options': 'all'})
    assert 'network_d (SRModel)' in log_text(run({**opt, 'strict_options': False}))


def test_a_run_whose_options_are_all_read_has_no_such_warning(run, train_opt):
    opt = train_opt(train__total_iter=1, strict_options='all')
    opt['path'] = {'pretrain_network_g': None, 'strict_load_g': True, 'param_key_g': 'params'}
    text = log_text(run(opt))
    assert 'iter:       1' in text
    assert 'nothing reads' not in text


def test_a_class_of_the_users_may_read_what_nearly_spells_a_key_of_ours(run, train_opt, tmp_path):
    (tmp_path / 'plugins').mkdir()
    (tmp_path / 'plugins/own_dataset.py').write_text(OWN_DATASET)
    opt = train_opt(
        plugins=['plugins'],
        train__total_iter=1,
        datasets__train__type='OwnDataset',
        datasets__train__use_flip=True,
        datasets__train__use_rott=True,
    )
    log = log_text(run(opt))
    assert 'Options that nothing reads: datasets.train.use_rott (OwnDataset, use_rot?)' in log
    with pytest.raises(OptionError, match=r"use_flip: unknown key; did you mean 'use_hflip'"):
        run({**opt, 'datasets': {'train': {**opt['datasets']['train'], 'type': 'X'}}})


def test_arguments_of_another_kind_are_named_with_their_lines(train_opt, tmp_path, monkeypatch):
    from basicsr.train import train_pipeline

    loss = {'type': 'CharbonnierLoss', 'eps': '1e-6'}
    opt = train_opt(network_g__num_feat='4', train__losses=[loss])
    file = write_lines(tmp_path, opt)
    monkeypatch.setattr('sys.argv', ['prog', '-opt', str(file)])
    with pytest.raises(OptionError) as error:
        train_pipeline(tmp_path)
    lines = file.read_text().splitlines()
    found = str(error.value).splitlines()
    assert [text.split(': ', 1)[1] for text in found] == [
        "network_g.num_feat: must be a number, got '4': write it without quotes",
        "train.losses.0.eps: must be a number, got '1e-6': write it without quotes",
    ]
    for text, key in zip(found, ('num_feat', 'eps'), strict=True):
        assert f'"{key}"' in lines[int(text.split(':')[1]) - 1]


def test_flags_of_a_class_are_true_or_false():
    options = {'type': 'SwinIR', 'ape': 'nope', 'patch_norm': True, 'use_checkpoint': None}
    assert dict(ARCH_REGISTRY.wrong_kinds(options)) == {'ape': "must be true or false, got 'nope'"}


def test_strict_options_refuse_what_swinir_would_only_ignore(run, train_opt):
    opt = train_opt(network_g={'type': 'SwinIR', 'upscale': 2, 'fused_window': 1})
    found = problems(run, {**opt, 'strict_options': 'all'})
    assert len(found) == 1 and "network_g: no argument 'fused_window'" in found[0]
