"""Every option file of the project: it can be run, and it is the published experiment.

``published_experiments.json`` holds what the reference toolkit's file of the same name says, and
how many parameters its network has there.
"""

import functools
import inspect
import json
import logging
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from basicsr.archs import build_network
from basicsr.models import build_model
from basicsr.utils.options import parse_options
from basicsr.utils.registry import ARCH_REGISTRY, DATASET_REGISTRY, METRIC_REGISTRY

TESTS = Path(__file__).resolve().parent
FOLDER = TESTS.parent / 'options'
FILES = sorted(file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob('*.yml'))
PUBLISHED = json.loads((TESTS / 'published_experiments.json').read_text(encoding='utf-8'))


def is_training(file):
    return not file.startswith('test/')


every_file = pytest.mark.parametrize('file', FILES)
every_training_file = pytest.mark.parametrize('file', [*filter(is_training, FILES)])
every_published_file = pytest.mark.parametrize('file', PUBLISHED)


def parse(file):
    """Options of a file as a run gets them; no datasets are needed for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('sys.argv', ['prog', '-opt', str(FOLDER / file)])
        return parse_options(FOLDER, is_train=is_training(file))[0]


options_of = functools.cache(parse)


def arguments_of(network):
    """All arguments of a network's constructor, defaults included."""
    options = dict(network)
    arguments = inspect.signature(ARCH_REGISTRY.get(options.pop('type'))).bind(**options)
    arguments.apply_defaults()
    return json.loads(json.dumps(arguments.arguments, default=str))  # tuples are lists in YAML


@functools.cache
def parameters_of(network):
    """How many parameters the network of these options has; as JSON, which can be cached."""
    with torch.device('meta'):
        net = build_network(json.loads(network))
    return sum(parameter.numel() for parameter in net.parameters())


def part_of(options, pattern):
    """Options cut to the keys of ``pattern``; those of a component are taken whole."""
    if not isinstance(pattern, dict) or not isinstance(options, dict) or 'type' in pattern:
        return options
    return {key: part_of(options.get(key), value) for key, value in pattern.items()}


@every_file
def test_a_file_has_no_unknown_key_and_names_datasets_that_exist(file, caplog):
    with caplog.at_level(logging.WARNING, logger='basicsr'):
        opt = parse(file)
    assert 'Not options of the runner' not in caplog.text
    for dataset in opt['datasets'].values():
        assert DATASET_REGISTRY.get(dataset['type'])


@every_file
def test_losses_optimizer_and_scheduler_of_a_file_build(file):
    opt = deepcopy(options_of(file))
    opt['num_gpu'] = 0
    # Small networks in place of the file's, which the next test builds.
    opt['network_g'] = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}
    if 'network_d' in opt:
        opt['network_d'] = {'type': 'UNetDiscriminatorSN', 'num_in_ch': 3, 'num_feat': 4}
    opt['path'].pop('pretrain_network_g', None)
    train_opt = opt.get('train', {})
    if 'perceptual_opt' in train_opt:  # half a gigabyte would be downloaded
        train_opt['perceptual_opt']['weights'] = 'random'
    model = build_model(opt)
    optimizers = [train_opt[key] for key in ('optim_g', 'optim_d') if key in train_opt]
    assert model.get_current_learning_rate() == [optimizer['lr'] for optimizer in optimizers]
    assert len(model.schedulers) == len(optimizers) * ('scheduler' in train_opt)


@every_file
def test_the_network_of_a_file_builds_with_the_published_number_of_parameters(file):
    parameters = parameters_of(json.dumps(options_of(file)['network_g']))
    if file in PUBLISHED:
        assert parameters == PUBLISHED[file]['parameters']


@every_file
def test_the_discriminator_of_a_file_builds_and_takes_its_crops(file):
    opt = options_of(file)
    if 'network_d' in opt:
        size = opt['datasets']['train']['gt_size']
        with torch.device('meta'):
            logits = build_network(opt['network_d'])(torch.empty(2, 3, size, size))
        assert len(logits) == 2


@every_file
def test_metrics_of_a_file_take_its_arguments_and_leave_out_borders_of_the_scale(file):
    opt = options_of(file)
    for metric in ((opt['val'] or {}).get('metrics') or {}).values():
        taken = inspect.signature(METRIC_REGISTRY.get(metric['type'])).parameters
        assert metric.keys() <= {'type', 'better', *taken}
        assert metric['crop_border'] == opt['scale']


@every_training_file
def test_gt_crops_are_whole_multiples_of_the_scale(file):
    opt = options_of(file)
    assert opt['datasets']['train']['gt_size'] % opt['scale'] == 0


@every_file
def test_a_file_can_be_taken_in_at_a_glance_and_says_how_to_run_it(file):
    text = (FOLDER / file).read_text(encoding='utf-8')
    script = 'train' if is_training(file) else 'test'
    # A degradation is made of thirty ranges and probabilities.
    assert len(text.splitlines()) <= (90 if 'final_sinc_prob' in text else 60)
    assert f'#   python basicsr/{script}.py -opt options/{file}\n' in text


@every_published_file
def test_a_file_is_the_published_experiment_of_its_name(file):
    opt, published = options_of(file), PUBLISHED[file]
    assert arguments_of(opt['network_g']) == arguments_of(published['network_g'])
    assert part_of(opt, published['options']) == published['options']


def test_no_two_files_of_a_kind_write_into_one_folder():
    names = Counter((is_training(file), options_of(file)['name']) for file in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_weights_of_another_run_are_those_that_an_option_file_trains():
    trained = {options_of(file)['name'] for file in filter(is_training, FILES)}
    for file in FILES:
        weights = options_of(file)['path'].get('pretrain_network_g', '')
        if not weights.startswith('experiments/pretrained_models/'):
            assert not weights or weights.split('/')[1] in trained, file
