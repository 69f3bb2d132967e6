import json
import math
import os
import re
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import yaml

from basicsr.utils.option_tables import TrainOptions
from basicsr.utils.options import (
    OptionError,
    copy_opt_file,
    dict2str,
    ordered_yaml,
    parse_args,
    parse_options,
    yaml_load,
)

TRAIN = """
name: tiny
model_type: SRModel
scale: 2
num_gpu: 0
manual_seed: 3
datasets:
  train:
    type: PairedImageDataset
    dataroot_gt: ~/gt
    dataroot_lq: [~/lq, lq]
    batch_size_per_gpu: 2
  val:
    name: Set5
    type: PairedImageDataset
  val_2: {type: PairedImageDataset}
network_g: {type: EDSR, num_block: 2, rgb_mean: [0.4, 0.4, 0.4]}
path: {pretrain_network_g: ~/net.pth, strict_load_g: true}
train:
  total_iter: 10
  optim_g: {type: Adam, lr: !!float 1e-4, betas: [0.9, 0.99]}
  scheduler: {type: MultiStepLR, milestones: [5], gamma: 0.5}
val: {val_freq: 5, metrics: {psnr: {type: calculate_psnr, crop_border: 2}}}
logger: {print_freq: 5, save_checkpoint_freq: 5, use_tb_logger: false}
"""
TEST = """
name: tiny
model_type: SRModel
num_gpu: 0
manual_seed: 3
datasets:
  test_b: {type: PairedImageDataset}
  val: {type: PairedImageDataset}
network_g: {type: EDSR}
path: {pretrain_network_g: net.pth}
"""


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Complete the options of a text and of flags."""

    def call(text=TRAIN, *flags, is_train=True):
        (tmp_path / 'x.yml').write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['prog', '-opt', 'x.yml', *flags])
        return parse_options(tmp_path, is_train)[0]

    return call


def force(*entries):
    return ('--force_yml', *entries)


# ---------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('1e-4', 1e-4),
        ('5e3', 5e3),
        ('1.e5', 1e5),
        ('1.5E-3', 1.5e-3),
        ('.5', 0.5),
        ('-.5e+2', -50.0),
        ('+1e3', 1e3),
        ('5.', 5.0),
        ('!!float 5e5', 5e5),
        ('!!float 1', 1.0),
        ('-.inf', -math.inf),
        ('12', 12),
        ('-3', -3),
        ('010', 8),
        ('08', '08'),
        ('1_000', 1000),
        ('1e', '1e'),
        ('e5', 'e5'),
        ('1e-4x', '1e-4x'),
        ("'1e-4'", '1e-4'),
        ('yes', True),
        ('off', False),
        ('~', None),
        ('[1e-4, 2]', [1e-4, 2]),
    ],
)
def test_numbers_are_those_of_yaml_1_2_and_the_rest_is_as_before(text, value):
    read = yaml_load(f'x: {text}')['x']
    assert (type(read), read) == (type(value), value)


def test_nan_is_a_number():
    assert all(math.isnan(x) for x in yaml_load('x: [.nan, .NaN, .NAN]')['x'])


def test_text_that_is_no_file_is_read_as_yaml():
    assert yaml_load('a: 1\nb: {c: 2}\n') == {'a': 1, 'b': {'c': 2}}
    long_text = 'a: ' + 'ü' * 300
    assert yaml_load(long_text) == {'a': 'ü' * 300}


def test_a_file_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('missing.yml', Path('missing.yml')):
        with pytest.raises(FileNotFoundError, match=f'no option file missing.yml.*{tmp_path}'):
            yaml_load(name)


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    file = tmp_path / 'x.yml'
    file.write_text('a: 1\ntrain:\n  lr: 1\n  gamma: 2\n  lr: 3\n')
    with pytest.raises(OptionError) as error:
        yaml_load(file)
    assert str(error.value) == f'{file}:5: lr: given twice, first in line 3; remove one.'


def test_merged_keys_may_be_overridden_at_any_depth():
    text = """
    defaults: &a {gamma: 1, scale: 2}
    outer:
      inner: &b {<<: *a, gamma: 3}
    other: {<<: *b, scale: 4, 1: a, '1': b}
    """
    opt = yaml_load(text)
    assert opt['outer']['inner'] == {'gamma': 3, 'scale': 2}
    assert opt['other'] == {'gamma': 3, 'scale': 4, 1: 'a', '1': 'b'}


def test_python_tags_are_refused_and_not_run(tmp_path):
    folder = tmp_path / 'made'
    file = tmp_path / 'x.yml'
    file.write_text(f'name: x\nevil: !!python/object/apply:os.mkdir ["{folder}"]\n')
    with pytest.raises(OptionError, match=f'{file}:2: not valid YAML: could not determine'):
        yaml_load(file)
    assert not folder.exists()


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'a: 1\nb: [1,\n', ':3: not valid YAML'),
        (b'a: 1\n{x: 1}: 2\n', 'not valid YAML: found unhashable key'),
        (b'a: \x01\n', 'not valid YAML: .*special characters'),
        (b'a: \xe4\n', 'not UTF-8 text'),
        (b'- 1\n', 'an option file is a mapping'),
        (b'', 'an option file is a mapping'),
    ],
)
def test_a_file_that_is_no_mapping_in_yaml_is_refused(tmp_path, content, message):
    file = tmp_path / 'x.yml'
    file.write_bytes(content)
    with pytest.raises(OptionError, match=f'{file}.*{message}'):
        yaml_load(file)


def test_what_is_dumped_is_read_back_in_the_same_order():
    loader, dumper = ordered_yaml()
    opt = {'z': 1e-7, 'a': OrderedDict(c='1e-4', b=[1, None, True]), 'm': 'yes'}
    text = yaml.dump(opt, Dumper=dumper)
    read = yaml.load(text, loader)
    assert read == opt
    assert [*read] == ['z', 'a', 'm']
    assert [*read['a']] == ['c', 'b']


# ---------------------------------------------------------------------------- checking


def test_all_problems_are_reported_at_once_with_their_places(parse):
    text = """name: a/b
model_type: SRModel
num_gpu: two
datasets:
  train:
    typ: PairedImageDataset
    prefetch_mode: gpu
  val: 5
  trian: {type: PairedImageDataset}
logger: {print_freqq: 5, save_checkpoint_freq: 0, wandb: {projct: x}}
train:
  total_iter: 1.5
  ema_decay: 2
path:
  ignore_resume_networks: [1]
"""
    with pytest.raises(OptionError) as error:
        parse(text, *force('train:warmup_iter=soon', 'vall:val_freq=3'))
    assert str(error.value).splitlines() == [
        "--force_yml vall:val_freq=3: the option file has no key 'vall'; did you mean 'val'?",
        '--force_yml: train.warmup_iter: input should be a valid integer, unable to parse string '
        "as an integer, got 'soon'",
        "x.yml:1: name: must be a plain folder name, got 'a/b'",
        'x.yml:3: num_gpu: input should be a valid integer, unable to parse string as an integer '
        "or input should be 'auto', got 'two'",
        'x.yml:5: datasets.train.batch_size_per_gpu: required, and not given',
        'x.yml:5: datasets.train.type: required, and not given',
        "x.yml:6: datasets.train.typ: unknown key; did you mean 'type'?",
        "x.yml:7: datasets.train.prefetch_mode: input should be 'cpu' or 'cuda', got 'gpu'",
        'x.yml:8: datasets.val: must be a section of keys, got 5',
        'x.yml:9: datasets.trian: unknown phase; the datasets here are train, val, val_<name>',
        "x.yml:10: logger.print_freqq: unknown key; did you mean 'print_freq'?",
        'x.yml:10: logger.save_checkpoint_freq: input should be greater than or equal to 1, got 0',
        "x.yml:10: logger.wandb.projct: unknown key; did you mean 'project'?",
        'x.yml:12: train.total_iter: input should be a valid integer, got a number with a '
        'fractional part, got 1.5',
        'x.yml:13: train.ema_decay: input should be less than 1, got 2',
        'x.yml:15: path.ignore_resume_networks.0: input should be a valid string, got 1',
    ]


STAGES = """name: x
model_type: SRModel
scale: 4
datasets:
  train:
    type: PairedImageDataset
    batch_size_per_gpu: 1
    progressive:
      - {iters: 3, gt_size: [32, 30]}
      - {gt_size: 64}
      - iters: 5
        batch_size_per_gpu: 2
train:
  total_iter: 9
  mixing: {mixup: {prob: 0.7}, cutmix: {prob: 0.4}}
"""


def test_stages_and_mixtures_that_cannot_be_are_named_with_their_lines(parse):
    with pytest.raises(OptionError) as error:
        parse(STAGES)
    assert str(error.value).splitlines() == [
        'x.yml:8: datasets.train.progressive: ends after 8 of 9 iterations: leave out the last '
        'iters',
        'x.yml:9: datasets.train.progressive.0.gt_size: 30 is not a multiple of scale 4',
        'x.yml:10: datasets.train.progressive.1: needs iters: only the last stage lasts to the end',
        'x.yml:11: datasets.train.progressive.2: needs a gt_size, since datasets.train has none',
        'x.yml:15: train.mixing: prob of mixup and cutmix add up to 1.1, above 1',
    ]
    text = STAGES.replace('[32, 30]', '32').replace('{gt_size: 64}', '{gt_size: 64, iters: 1}')
    parsed = parse(text.replace('iters: 5', 'gt_size: 8').replace('0.4', '0.3'))
    assert parsed['datasets']['train']['progressive'] == [
        {'iters': 3, 'gt_size': 32, 'batch_size_per_gpu': None},
        {'iters': 1, 'gt_size': 64, 'batch_size_per_gpu': None},
        {'iters': None, 'gt_size': 8, 'batch_size_per_gpu': 2},
    ]
    assert parsed['train']['mixing']['cutmix'] == {'prob': 0.3, 'alpha': 1.0}


def test_what_a_stage_and_a_mixture_may_not_have_is_named(parse):
    text = STAGES.replace('[32, 30]', '[]').replace('{gt_size: 64}', '{gt_sise: 64, iters: 0}')
    text = text.replace('{prob: 0.7}', '{prob: 1.5, alpah: 1}').replace('cutmix', 'cutmox')
    with pytest.raises(OptionError) as error:
        parse(text)
    found = str(error.value).splitlines()
    for line in (
        'x.yml:10: datasets.train.progressive.1.gt_sise: unknown key',
        'x.yml:10: datasets.train.progressive.1.iters: input should be greater than or equal to 1'
        ', got 0',
        'x.yml:15: train.mixing.cutmox: unknown key; there are mixup and cutmix',
        'x.yml:15: train.mixing.mixup.alpah: unknown key; there are prob and alpha',
        'x.yml:15: train.mixing.mixup.prob: input should be less than or equal to 1, got 1.5',
    ):
        assert line in found
    assert any('progressive.0.gt_size: ' in line and line.endswith('got []') for line in found)
    with pytest.raises(OptionError, match='progressive: list should have at least 1 item'):
        parse(STAGES, *force('datasets:train:progressive=[]'))


def test_sections_that_are_needed_are_named(parse):
    with pytest.raises(OptionError) as error:
        parse('name: x\n')
    assert str(error.value).splitlines() == [
        f'x.yml: {key}: required, and not given' for key in ('datasets', 'model_type', 'train')
    ]


def test_near_misses_pass_if_strict_options_is_off(parse):
    text = TRAIN.replace('  total_iter: 10\n', '  total_iter: 10\n  warmup_iters: 5\n')
    with pytest.raises(OptionError, match=r"^x.yml:\d+: train.warmup_iters: .*'warmup_iter'\?$"):
        parse(text)
    assert parse(text + 'strict_options: false\n')['train']['warmup_iters'] == 5


def test_a_component_of_the_user_may_have_any_option(parse):
    """What files of dependents add reaches its readers."""
    text = TRAIN.replace('type: PairedImageDataset\n    data', 'type: X\n    task: sr\n    data')
    text = text.replace('val: {val_freq', 'val: {use_chop: true, val_freq')
    opt = parse(text + 'tile: {tile_size: 64, tile_pad: 8}\nprint_network: ~\nown_size: 180\n')
    assert (opt['tile'], opt['own_size']) == ({'tile_size': 64, 'tile_pad': 8}, 180)
    assert opt['print_network'] is None
    assert opt['datasets']['train']['task'] == 'sr'
    assert opt['val']['use_chop'] is True


def test_defaults_fill_what_is_not_given(parse):
    opt = parse(TRAIN[: TRAIN.index('path:')] + 'train: {total_iter: 5e3}\npath: ~\nlogger: ~\n')
    assert opt['train'] == {**TrainOptions(total_iter=1).model_dump(), 'total_iter': 5000}
    assert (opt['train']['warmup_iter'], opt['train']['ema_decay']) == (-1, 0.0)
    assert isinstance(opt['train']['total_iter'], int)
    assert opt['val'] is None
    assert opt['logger'] == {
        'print_freq': 100,
        'save_checkpoint_freq': 5000,
        'checkpoint_format': 'pth',
        'keep_last': None,
        'keep_best': False,
        'use_tb_logger': True,
        'wandb': {'project': None, 'resume_id': None},
    }
    assert opt['find_unused_parameters'] is False
    assert opt['deterministic'] is False
    assert opt['datasets']['val']['num_worker_per_gpu'] == 0


def test_a_tilde_is_the_default_in_the_sections_of_the_runner(parse):
    text = TRAIN.replace('use_tb_logger: false', 'use_tb_logger: ~, wandb: ~')
    opt = parse(text.replace('total_iter: 10', 'total_iter: 10\n  warmup_iter: ~\n  my_opt: ~'))
    assert opt['logger']['use_tb_logger'] is True
    assert opt['logger']['wandb']['project'] is None
    assert opt['train']['warmup_iter'] == -1
    assert opt['train']['my_opt'] is None, 'a ~ of a component stays'


def test_datasets_know_their_phase_scale_and_name(parse):
    datasets = parse()['datasets']
    assert [*datasets] == ['train', 'val', 'val_2']
    facts = [(d['phase'], d['scale'], d['name']) for d in datasets.values()]
    assert facts == [('train', 2, 'train'), ('val', 2, 'Set5'), ('val', 2, 'val_2')]
    no_scale = parse(TRAIN.replace('scale: 2\n', ''))['datasets']['val']
    assert 'scale' not in no_scale


def test_home_folders_are_expanded(parse, monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    opt = parse(TRAIN, *force('path:resume_state=~/1.state'))
    assert opt['datasets']['train']['dataroot_gt'] == '/home/me/gt'
    assert opt['datasets']['train']['dataroot_lq'] == ['/home/me/lq', 'lq']
    assert opt['path']['pretrain_network_g'] == '/home/me/net.pth'
    assert opt['path']['resume_state'] == '/home/me/1.state'


def test_paths_of_a_training_run(parse, tmp_path):
    path = parse()['path']
    folder = tmp_path / 'experiments' / 'tiny'
    assert path['experiments_root'] == path['log'] == str(folder)
    for name in ('models', 'training_states', 'visualization'):
        assert path[name] == str(folder / name)
    path = parse(TRAIN, *force('path:experiments_root=/data/runs'))['path']
    assert path['training_states'] == '/data/runs/tiny/training_states'


def test_paths_of_a_test_run(parse, tmp_path):
    path = parse(TEST, is_train=False)['path']
    folder = tmp_path / 'results' / 'tiny'
    assert path['results_root'] == path['log'] == str(folder)
    assert path['visualization'] == str(folder / 'visualization')
    assert 'models' not in path
    path = parse(TEST, *force('path:results_root=/data/out'), is_train=False)['path']
    assert path['log'] == '/data/out/tiny'


def test_a_test_run_needs_neither_val_nor_train(parse):
    opt = parse(TEST, is_train=False)
    assert opt['is_train'] is False
    assert (opt['val']['suffix'], opt['val']['save_img'], opt['val']['metrics']) == (
        None,
        False,
        None,
    )
    assert {key: d['phase'] for key, d in opt['datasets'].items()} == {
        'test_b': 'test',
        'val': 'val',
    }
    with pytest.raises(OptionError, match='datasets.train: unknown phase; .* test, test_<name>'):
        parse(TEST.replace('test_b', 'train'), is_train=False)


# ---------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('-1', -1),
        ('1e-4', 1e-4),
        ('~', None),
        ('', None),
        ('[1, 2]', [1, 2]),
        ('{a: 1}', {'a': 1}),
        ('a=b', 'a=b'),
        ("'a=b'", 'a=b'),
        ('true', True),
        ('None', 'None'),
        ('C:\\x.png', 'C:\\x.png'),
    ],
)
def test_forced_values_are_yaml(parse, text, value):
    read = parse(TRAIN, *force(f'network_g:new={text}'))['network_g']['new']
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ('entry', 'keys', 'value'),
    [
        ('train:total_iter=2e2', ('train', 'total_iter'), 200),
        ('network_g:rgb_mean:1=0.5', ('network_g', 'rgb_mean', 1), 0.5),
        ('network_g:rgb_mean:-1=0.5', ('network_g', 'rgb_mean', 2), 0.5),
        ('network_g:num_feat=8', ('network_g', 'num_feat'), 8),
        ('train:optim_g:weight_decay=1e-2', ('train', 'optim_g', 'weight_decay'), 1e-2),
        ('train:optim_d={type: SGD}', ('train', 'optim_d'), {'type': 'SGD'}),
        ('val:metrics:psnr:crop_border=4', ('val', 'metrics', 'psnr', 'crop_border'), 4),
        ('val:suffix=x', ('val', 'suffix'), 'x'),
        ('datasets:val:cache_data=true', ('datasets', 'val', 'cache_data'), True),
        ('datasets:val_2:dataroot_gt=/x', ('datasets', 'val_2', 'dataroot_gt'), '/x'),
        ('logger:wandb:project=p', ('logger', 'wandb', 'project'), 'p'),
        ('path:strict_load_d=false', ('path', 'strict_load_d'), False),
        ('path:param_key_x=params', ('path', 'param_key_x'), 'params'),
        ('dist_params:backend=gloo', ('dist_params', 'backend'), 'gloo'),
        (' manual_seed=9', ('manual_seed',), 9),
        ('network_x={type: A}', ('network_x',), {'type': 'A'}),
    ],
)
def test_forced_keys(parse, entry, keys, value):
    opt = parse(TRAIN + 'dist_params: {port: 1}\n', *force(entry))
    for key in keys:
        opt = opt[key]
    assert opt == value


def test_sections_of_the_runner_may_be_forced_into_being(parse):
    text = TRAIN[: TRAIN.index('val: {val_freq')] + 'logger: ~\n'
    entries = force('val:val_freq=7', 'logger:wandb:project=p', 'path:resume_state=~')
    opt = parse(text, *entries)
    assert opt['val']['val_freq'] == 7
    assert opt['logger']['wandb'] == {'project': 'p', 'resume_id': None}


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ('train:brand_new=3', "train has no key 'brand_new'."),
        ('train:totaliter=3', "train has no key 'totaliter'; did you mean 'total_iter'?"),
        ('trian:total_iter=3', "the option file has no key 'trian'; did you mean 'train'?"),
        ('network_d:num_feat=3', "has no key 'network_d'; did you mean 'network_g'?"),
        ('network_g:conv:x=3', "network_g has no key 'conv'."),
        ('datasets:vall:type=x', "datasets has no key 'vall'; did you mean 'val'?"),
        ('datasets:tets={}', "datasets has no key 'tets'."),
        ('network_g:rgb_mean:3=0', 'network_g.rgb_mean is a list of length 3; give an index.'),
        ('network_g:rgb_mean:--1=0', 'network_g.rgb_mean is a list of length 3; give an index.'),
        ('network_g:rgb_mean:x:y=0', 'network_g.rgb_mean is a list of length 3; give an index.'),
        ('network_g:type:x=0', 'network_g.type holds no keys.'),
        ('name', "write it as key:subkey=value, with an '='."),
        ('name=[1', "the value:1: not valid YAML: expected ',' or ']', but got '<stream end>'."),
    ],
)
def test_forced_keys_that_nothing_reads_are_refused(parse, entry, message):
    with pytest.raises(OptionError) as error:
        parse(TRAIN, *force(entry))
    assert str(error.value).startswith(f'--force_yml {entry}: ')
    assert str(error.value).endswith(message)
    assert '\n' not in str(error.value)


def test_a_seed_is_drawn_if_none_is_given(parse):
    seeds = {parse(TRAIN.replace('manual_seed: 3\n', ''))['manual_seed'] for _ in range(4)}
    assert len(seeds) > 1
    assert all(1 <= seed <= 10000 for seed in seeds)


def test_flags_of_the_reference_are_accepted():
    args = parse_args(['-opt', 'a.yml', '--local-rank=3', '--launcher', 'slurm', '--debug'])
    assert (args.opt, args.local_rank, args.launcher, args.debug) == ('a.yml', 3, 'slurm', True)
    args = parse_args(['-opt', 'a.yml', '--local_rank', '2', '--force_yml', 'a=1', 'b=-1'])
    assert (args.local_rank, args.force_yml, args.auto_resume) == (2, ['a=1', 'b=-1'], False)
    assert (args.launcher, args.debug) == ('none', False)


@pytest.mark.parametrize('argv', [[], ['-opt', 'a', '--launcher', 'mpi'], ['-opt', 'a', '--dbug']])
def test_mistyped_flags_end_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count('error: ') == 1


def test_without_a_launcher_there_is_one_process(parse):
    opt = parse()
    assert (opt['dist'], opt['rank'], opt['world_size'], opt['auto_resume']) == (False, 0, 1, False)
    assert parse(TRAIN, '--auto_resume')['auto_resume'] is True


def test_debug_saves_and_checks_often_under_a_name_of_its_own(parse):
    opt = parse(TRAIN, '--debug')
    assert opt['name'] == 'debug_tiny'
    assert opt['path']['models'].endswith('experiments/debug_tiny/models')
    assert (opt['logger']['print_freq'], opt['logger']['save_checkpoint_freq']) == (1, 8)
    assert opt['val']['val_freq'] == 8
    assert opt['train']['total_iter'] == 10


def test_debug_inside_the_name_is_enough(parse):
    opt = parse(TRAIN.replace('tiny', 'my_debug'))
    assert (opt['name'], opt['logger']['print_freq']) == ('my_debug', 1)
    assert parse(TRAIN.replace('tiny', 'debug_x'), '--debug')['name'] == 'debug_x'
    without_val = TRAIN[: TRAIN.index('val: {val_freq')]
    assert parse(without_val, '--debug')['val'] is None
    assert parse(TEST, '--debug', is_train=False)['name'] == 'debug_tiny'


@pytest.mark.parametrize(
    ('gpus', 'batch', 'accumulate'), [(1, 64, 4), (2, 32, 2), (4, 16, 1), (8, 8, 1)]
)
def test_the_batch_of_all_is_shared_among_the_gpus_in_micro_batches(
    parse, monkeypatch, gpus, batch, accumulate
):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    sizes = ('batch_size_per_gpu=16', 'batch_size_total=64')
    opt = parse(TRAIN, *force('num_gpu=auto', *(f'datasets:train:{size}' for size in sizes)))
    assert opt['datasets']['train']['batch_size_per_gpu'] == batch
    assert opt['train']['accumulate'] == accumulate


def test_a_batch_that_cannot_be_shared_evenly_is_refused(parse, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 3)
    entries = ('num_gpu=3', 'datasets:train:batch_size_total=64')
    with pytest.raises(OptionError, match='64 samples cannot be divided evenly among 3'):
        parse(TRAIN, *force(*entries))


@pytest.mark.parametrize(
    ('gpus', 'asked', 'pin_memory', 'mode'),
    [
        (0, {}, False, 'cpu'),
        (0, {'num_worker_per_gpu': 0}, False, None),
        (1, {}, True, 'cuda'),
        (1, {'num_worker_per_gpu': 0}, True, 'cuda'),
        (1, {'pin_memory': 'false'}, False, 'cpu'),
        (1, {'prefetch_mode': 'cpu'}, True, 'cpu'),
        (0, {'prefetch_mode': 'cuda', 'pin_memory': 'true'}, True, 'cuda'),
    ],
)
def test_batches_are_prefetched_as_the_device_has_it_unless_options_say_how(
    parse, monkeypatch, gpus, asked, pin_memory, mode
):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    entries = [f'datasets:train:{key}={value}' for key, value in asked.items()]
    opt = parse(TRAIN, *force('num_gpu=auto', *entries))
    train = opt['datasets']['train']
    assert (train['pin_memory'], train['prefetch_mode']) == (pin_memory, mode)
    assert opt['datasets']['val']['pin_memory'] is (gpus > 0)


# ---------------------------------------------------------------------------- plug-ins

DATASET = """
import os
from torch.utils.data import get_worker_info
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class MyDataset(PairedImageDataset):
    def __getitem__(self, index):
        if get_worker_info() is not None:
            open(f'worker_{os.getpid()}', 'w').close()
        return super().__getitem__(index)
"""


def test_plugins_are_looked_up_where_the_run_starts_too(tmp_path, monkeypatch):
    (tmp_path / 'options').mkdir()
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'options' / 'x.yml').write_text(TRAIN + 'plugins: [mine]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['prog', '-opt', 'options/x.yml'])
    assert parse_options(tmp_path)[0]['plugins'] == [str(tmp_path / 'mine')]
    monkeypatch.chdir('/')
    monkeypatch.setattr(sys, 'argv', ['prog', '-opt', str(tmp_path / 'options/x.yml')])
    with pytest.raises(FileNotFoundError, match=f'no folder {tmp_path}/options/mine, nor /mine'):
        parse_options(tmp_path)


@pytest.mark.slow
def test_spawned_workers_know_the_plugins(run_program, train_opt, tmp_path):
    (tmp_path / 'my_dataset.py').write_text(DATASET)
    opt = train_opt(plugins=['.'], train__total_iter=2)
    opt['datasets']['train'].update(type='MyDataset', num_worker_per_gpu=1)
    del opt['val'], opt['datasets']['val']
    (tmp_path / 'x.yml').write_text(json.dumps(opt))
    (tmp_path / 'start.py').write_text(
        'if __name__ == "__main__":\n'
        '    import multiprocessing\n'
        '    from pathlib import Path\n'
        '    import basicsr.train\n'
        '    multiprocessing.set_start_method("spawn")\n'
        '    basicsr.train.draw_results = lambda *_: None\n'
        '    basicsr.train.train_pipeline(Path.cwd())\n'
    )
    result = run_program('start.py', '-opt', 'x.yml')
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob('worker_*'))) == 1
    assert (tmp_path / 'experiments/tiny/models/net_g_latest.pth').is_file()


# ---------------------------------------------------------------------------- files and texts


def test_options_as_text():
    """Against the reference."""
    opt = {'a': 1, 'b': {'c': None, 'd': {'e': [1, 2]}}}
    expected = '\n  a: 1\n  b:[\n    c: None\n    d:[\n      e: [1, 2]\n    ]\n  ]\n'
    assert dict2str(opt) == expected


def test_the_option_file_is_copied_below_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['train.py', '-opt', 'x.yml'])
    source, folder = tmp_path / 'x.yml', tmp_path / 'exp'
    folder.mkdir()
    source.write_text('name: ü\n', encoding='utf-8')
    copy_opt_file(str(source), str(folder))
    lines = (folder / 'x.yml').read_text(encoding='utf-8').split('\n')
    assert lines[0].startswith('# GENERATE TIME: ')
    assert lines[1:] == ['# CMD:', '# python train.py -opt x.yml', '', 'name: ü', '']


def test_a_changed_option_file_does_not_overwrite_the_earlier_copy(tmp_path):
    source, folder = tmp_path / 'x.yml', tmp_path / 'exp'
    folder.mkdir()
    for text in ('name: a\n', 'name: a\n', 'name: b\n'):
        source.write_text(text)
        copy_opt_file(source, folder)
    copies = sorted(folder.iterdir(), key=lambda file: len(file.name))
    assert [file.name[:1] for file in copies] == ['x', 'x'] and copies[0].name == 'x.yml'
    assert [file.read_text().splitlines()[-1] for file in copies] == ['name: a', 'name: b']


def test_the_copy_in_the_run_folder_is_not_copied_onto_itself(tmp_path):
    (tmp_path / 'x.yml').write_text('name: x\n')
    copy_opt_file(tmp_path / 'x.yml', tmp_path)
    assert (tmp_path / 'x.yml').read_text() == 'name: x\n'


# ---------------------------------------------------------------------------- files of others

RESNET = """
name: 001_MSRResNet_x4_f64b16_DIV2K_1000k_B16G1_wandb
model_type: SRModel
scale: 4
num_gpu: 1
manual_seed: 0
datasets:
  train:
    name: DIV2K
    type: PairedImageDataset
    dataroot_gt: datasets/DIV2K/DIV2K_train_HR_sub
    dataroot_lq: datasets/DIV2K/DIV2K_train_LR_bicubic_X4_sub
    meta_info_file: basicsr/data/meta_info/meta_info_DIV2K800sub_GT.txt
    filename_tmpl: '{}'
    io_backend:
      type: disk
    gt_size: 128
    use_hflip: true
    use_rot: true
    use_shuffle: true
    num_worker_per_gpu: 6
    batch_size_per_gpu: 16
    dataset_enlarge_ratio: 100
    prefetch_mode: ~
  val:
    name: Set5
    type: PairedImageDataset
    dataroot_gt: datasets/Set5/GTmod12
    dataroot_lq: datasets/Set5/LRbicx4
    io_backend:
      type: disk
  val_2:
    name: Set14
    type: PairedImageDataset
    dataroot_gt: datasets/Set14/GTmod12
    dataroot_lq: datasets/Set14/LRbicx4
    io_backend:
      type: disk
network_g:
  type: MSRResNet
  num_in_ch: 3
  num_out_ch: 3
  num_feat: 64
  num_block: 16
  upscale: 4
path:
  pretrain_network_g: ~
  param_key_g: params
  strict_load_g: true
  resume_state: ~
train:
  ema_decay: 0.999
  optim_g:
    type: Adam
    lr: !!float 2e-4
    weight_decay: 0
    betas: [0.9, 0.99]
  scheduler:
    type: CosineAnnealingRestartLR
    periods: [250000, 250000, 250000, 250000]
    restart_weights: [1, 1, 1, 1]
    eta_min: !!float 1e-7
  total_iter: 1000000
  warmup_iter: -1
  pixel_opt:
    type: L1Loss
    loss_weight: 1.0
    reduction: mean
val:
  val_freq: !!float 5e3
  save_img: false
  metrics:
    psnr:
      type: calculate_psnr
      crop_border: 4
      test_y_channel: false
      better: higher
    niqe:
      type: calculate_niqe
      crop_border: 4
      better: lower
logger:
  print_freq: 100
  save_checkpoint_freq: !!float 5e3
  use_tb_logger: true
  wandb:
    project: ~
    resume_id: ~
dist_params:
  backend: nccl
  port: 29500
"""
RRDB = RESNET.replace('type: MSRResNet', 'type: RRDBNet\n  num_grow_ch: 32').replace(
    '  upscale: 4\n', ''
)
SWINIR = (
    RESNET[: RESNET.index('network_g:')]
    + """
network_g:
  type: SwinIR
  upscale: 4
  in_chans: 3
  img_size: 48
  window_size: 8
  img_range: 1.
  depths: [6, 6, 6, 6, 6, 6]
  embed_dim: 180
  num_heads: [6, 6, 6, 6, 6, 6]
  mlp_ratio: 2
  upsampler: 'pixelshuffle'
  resi_connection: '1conv'
"""
    + RESNET[RESNET.index('path:') :]
)
ECBSR = (
    RESNET[: RESNET.index('network_g:')].replace('gt_size: 128', 'gt_size: 128\n    color: y')
    + """
network_g:
  type: ECBSR
  num_in_ch: 1
  num_out_ch: 1
  num_block: 4
  num_channel: 16
  with_idt: False
  act_type: prelu
  scale: 4
"""
    + RESNET[RESNET.index('path:') :].replace('save_img: false', 'save_img: false\n  pbar: False')
)
REALESRGAN = """
name: train_RealESRGANx4plus
model_type: RealESRGANModel
scale: 4
num_gpu: auto
manual_seed: 0
l1_gt_usm: True
percep_gt_usm: True
gan_gt_usm: False
resize_prob: [0.2, 0.7, 0.1]
resize_range: [0.15, 1.5]
gaussian_noise_prob: 0.5
noise_range: [1, 30]
poisson_scale_range: [0.05, 3]
gray_noise_prob: 0.4
jpeg_range: [30, 95]
second_blur_prob: 0.8
resize_prob2: [0.3, 0.4, 0.3]
resize_range2: [0.3, 1.2]
gaussian_noise_prob2: 0.5
noise_range2: [1, 25]
poisson_scale_range2: [0.05, 2.5]
gray_noise_prob2: 0.4
jpeg_range2: [30, 95]
gt_size: 256
queue_size: 180
datasets:
  train:
    name: DF2K+OST
    type: RealESRGANDataset
    dataroot_gt: datasets/DF2K
    meta_info: datasets/DF2K/meta_info.txt
    io_backend: {type: disk}
    blur_kernel_size: 21
    kernel_list: ['iso', 'aniso']
    kernel_prob: [0.6, 0.4]
    sinc_prob: 0.1
    blur_sigma: [0.2, 3]
    betag_range: [0.5, 4]
    betap_range: [1, 2]
    final_sinc_prob: 0.8
    gt_size: 256
    use_hflip: True
    use_rot: False
    use_shuffle: true
    num_worker_per_gpu: 5
    batch_size_per_gpu: 12
    dataset_enlarge_ratio: 1
    prefetch_mode: ~
network_g: {type: RRDBNet, num_in_ch: 3, num_out_ch: 3, num_feat: 64, num_block: 23}
network_d: {type: UNetDiscriminatorSN, num_in_ch: 3, num_feat: 64, skip_connection: True}
network_d_left_eye: {type: FacialComponentDiscriminator}
path:
  pretrain_network_g: experiments/pretrained_models/RealESRNet_x4plus.pth
  param_key_g: params_ema
  strict_load_g: true
  pretrain_network_d_left_eye: ~
  ignore_resume_networks: [network_identity]
  resume_state: ~
train:
  ema_decay: 0.999
  optim_g: {type: Adam, lr: !!float 1e-4, weight_decay: 0, betas: [0.9, 0.99]}
  optim_d: {type: Adam, lr: !!float 1e-4, weight_decay: 0, betas: [0.9, 0.99]}
  scheduler: {type: MultiStepLR, milestones: [400000], gamma: 0.5}
  total_iter: 400000
  warmup_iter: -1
  pixel_opt: {type: L1Loss, loss_weight: 1.0, reduction: mean}
  perceptual_opt:
    type: PerceptualLoss
    layer_weights: {conv1_2: 0.1, conv2_2: 0.1, conv3_4: 1, conv4_4: 1, conv5_4: 1}
    vgg_type: vgg19
    perceptual_weight: 1.0
    range_norm: false
    criterion: l1
  gan_opt: {type: GANLoss, gan_type: vanilla, loss_weight: !!float 1e-1}
  net_d_iters: 1
  net_d_init_iters: 0
logger:
  print_freq: 100
  save_checkpoint_freq: !!float 5e3
  use_tb_logger: true
  wandb: {project: ~, resume_id: ~}
"""
DOWNSTREAM = (
    RESNET.replace('type: MSRResNet', 'type: HAT')
    .replace('    gt_size: 128', '    task: SR\n    gt_size: 128')
    .replace('val:\n  val_freq', 'val:\n  use_chop: True\n  val_freq')
) + 'tile:\n  tile_size: 64\n  tile_pad: 32\nprint_network: false\n'


@pytest.mark.parametrize(
    ('text', 'keys', 'value'),
    [
        (RESNET, ('train', 'optim_g', 'lr'), 2e-4),
        (RRDB, ('train', 'scheduler', 'eta_min'), 1e-7),
        (SWINIR, ('network_g', 'resi_connection'), '1conv'),
        (ECBSR, ('datasets', 'train', 'color'), 'y'),
        (REALESRGAN, ('train', 'gan_opt', 'loss_weight'), 0.1),
        (DOWNSTREAM, ('tile', 'tile_pad'), 32),
    ],
    ids=['resnet', 'rrdb', 'swinir', 'ecbsr', 'realesrgan', 'downstream'],
)
def test_option_files_of_the_reference_and_of_dependents_load_unchanged(parse, text, keys, value):
    opt = parse(text)
    given = yaml_load(text)
    assert opt['network_g'] == given['network_g']
    defaults = TrainOptions(total_iter=1).model_dump()
    assert opt['train'] == defaults | given['train'], 'nothing given is changed'
    for section in ('datasets', 'val', 'logger', 'path'):
        assert given.get(section, {}).keys() <= (opt[section] or {}).keys()
    assert opt['logger']['save_checkpoint_freq'] == 5000
    for key in keys:
        opt = opt[key]
    assert opt == value


def test_a_test_file_of_the_reference_loads_unchanged(parse):
    text = """
    name: RCAN_BIX4-official
    suffix: ~
    model_type: SRModel
    scale: 4
    num_gpu: 1
    crop_border: 4
    save_img: false
    datasets:
      test_1: &set {name: val_set5, type: PairedImageDataset, filename_tmpl: '{}x4'}
      test_2: {<<: *set, name: val_set14}
    network_g: {type: RCAN, rgb_mean: [0.4488, 0.4371, 0.4040]}
    path: {pretrain_network_g: RCAN.pth, strict_load_g: true, resume_state: ~}
    """
    opt = parse(text, is_train=False)
    assert [d['name'] for d in opt['datasets'].values()] == ['val_set5', 'val_set14']
    assert opt['val']['metrics'] is None


def test_parse_options_returns_the_flags_too(parse, tmp_path, monkeypatch):
    parse(TRAIN, '--auto_resume', '--force_yml', 'manual_seed=3')
    args = parse_options(str(tmp_path))[1]
    assert (args.launcher, args.auto_resume, args.debug) == ('none', True, False)
    assert args.force_yml == ['manual_seed=3']
    assert os.path.samefile(args.opt, tmp_path / 'x.yml')


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('mixing', {'mixup': {'prob': 0.5, 'alpha': math.inf}}),
        ('mixing', {'cutmix': {'prob': 0.5, 'alpha': 1.7e308}}),
        ('swa', {'lr': math.inf}),
        ('swa', {'strat': 5}),
        ('posthoc_ema', []),
        ('clip_grad_norm', math.nan),
    ],
)
def test_numbers_without_end_and_unknown_keys_of_train_are_refused(run, train_opt, key, value):
    opt = train_opt()
    opt['train'][key] = value
    with pytest.raises(OptionError, match=f'train.{key}'):
        run(opt)


@pytest.mark.parametrize(
    'name',
    [
        *('', '.', '..', '../x', '/tmp/x', 'a/b', 'a\\b', '~', 'x\n', 'x\x1b[2J', 'x.', 'x '),
        *('con', 'NUL.txt', 'a' * 201, '猫' * 70, 'a\u202eb'),
    ],
)
def test_files_can_be_given_no_name_that_leads_elsewhere(parse, name):
    for option, key in {'name': 'name', 'datasets:val:name': 'datasets.val.name'}.items():
        if key != 'name' and not name:
            continue  # it stands for the key
        with pytest.raises(OptionError, match='(plain folder name|control characters)') as error:
            parse(TRAIN, *force(f'{option}={json.dumps(name)}'))
        assert '\x1b' not in str(error.value)


@pytest.mark.parametrize('section', ['datasets', ''])
def test_a_key_that_files_are_named_after_is_a_plain_name(parse, section):
    key = 'val_/../../x' if section else 'network_/../../x'
    line = f'{key}: {{type: SingleImageDataset, dataroot_lq: x}}'
    text = (
        TRAIN.replace('datasets:\n', f'datasets:\n  {line}\n') if section else f'{TRAIN}\n{line}\n'
    )
    with pytest.raises(OptionError, match='files are named after this key: it must be a plain'):
        parse(text)


def test_a_name_of_other_letters_is_plain(parse):
    for name in ('001_EDSR_x4', '模型', 'v1.5 (b)', '_x', 'console'):
        assert parse(TRAIN, *force(f'name={json.dumps(name)}'))['name'] == name


@pytest.mark.parametrize(
    'entry',
    ['num_gpu', 'logger:keep_last', 'train:total_iter', 'datasets:train:batch_size_per_gpu'],
)
def test_a_truth_is_no_number(parse, entry):
    with pytest.raises(OptionError, match='must be a number, got True'):
        parse(TRAIN, *force(f'{entry}=true'))


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ('backend: foo', "backend: input should be 'nccl' or 'gloo', got 'foo'"),
        ('timeout: 0', 'timeout: input should be greater than 0, got 0'),
        ('timeout: true', 'timeout: must be a number, got True'),
        ('port: 70000', 'port: input should be less than 65536, got 70000'),
        ('adress: a', 'adress: unknown key; there are backend, timeout and port'),
    ],
)
def test_how_processes_meet_is_checked_also_for_one(parse, given, message):
    with pytest.raises(OptionError) as error:
        parse(TRAIN + f'dist_params: {{{given}}}\n')
    assert str(error.value).endswith(f'dist_params.{message}')


def test_a_file_where_results_would_go_is_named(parse, tmp_path):
    (tmp_path / 'afile').touch()
    with pytest.raises(OptionError, match='afile is not a folder: results go to .*afile/'):
        parse(TRAIN, *force(f'path:experiments_root={tmp_path}/afile'))


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ('use_hflip=nope', "use_hflip: must be true or false, got 'nope'"),
        ('use_rot=3', 'use_rot: must be true or false, got 3'),
        ('io_backend=disk', "io_backend: write it as {type: disk}, got 'disk'"),
        ('io_backend=[lmdb]', "io_backend: write it as {type: disk}, got ['lmdb']"),
    ],
)
def test_flags_and_sections_of_datasets_are_checked(parse, entry, message):
    with pytest.raises(OptionError) as error:
        parse(TRAIN, *force(f'datasets:train:{entry}'))
    assert str(error.value) == f'--force_yml: datasets.train.{message}'


def test_a_list_that_the_file_lacks_is_to_be_forced_whole(parse):
    with pytest.raises(OptionError) as error:
        parse(TRAIN, *force('train:losses:0:type=L1Loss'))
    assert str(error.value).endswith(
        'the file does not give train:losses: set it as a whole, train:losses=….'
    )


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        ('L1Loss', "train.losses: needs a list, such as [{type: L1Loss}]: 'L1Loss'"),
        ('[L1Loss]', "train.losses.0: needs a section with a type, got 'L1Loss'"),
    ],
)
def test_losses_are_a_list_of_sections(parse, value, message):
    with pytest.raises(OptionError) as error:
        parse(TRAIN, *force(f'train:losses={value}'))
    assert str(error.value) == f'--force_yml: {message}'


@pytest.mark.parametrize(
    'key', ['network_g', 'train:scheduler', 'train:pixel_opt', 'train:optim_g']
)
@pytest.mark.parametrize('value', ['[]', '{}'])
def test_an_empty_component_is_refused(parse, key, value):
    with pytest.raises(OptionError, match=f'needs a section with a type, got {re.escape(value)}'):
        parse(TRAIN, *force(f'{key}={value}'))
