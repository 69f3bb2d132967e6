"""Every option file of the project: it can be run, and it is the published experiment.

``published_experiments.json`` holds what the reference toolkit's file of the same name says, and
how many parameters its network has there.
"""

import functools
import inspect
import json
import math
import re
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from golden import recipe

import basicsr.test
from basicsr.archs import build_network
from basicsr.data import build_dataloader, build_dataset
from basicsr.data.prefetch_dataloader import CPUPrefetcher
from basicsr.models import build_model
from basicsr.run.option_checks import check_unread
from basicsr.utils.img_util import img2tensor, tensor2img
from basicsr.utils.options import parse_options
from basicsr.utils.registry import ARCH_REGISTRY, METRIC_REGISTRY, MODEL_REGISTRY

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / 'options'
FILES = sorted(file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob('*.yml'))
PUBLISHED = json.loads((HERE / 'published_experiments.json').read_text(encoding='utf-8'))

# How many files of the reference toolkit are left out, since what they name does not exist yet:
# networks, or models (of EDVR, DUF and TOFlow; of BasicVSR, IconVSR and BasicVSR++).
WAITING = {
    **{'VideoBaseModel': 14, 'VideoRecurrentModel': 14},
    **{'HiFaceGAN': 3, 'StyleGAN2Generator': 1},
}


def is_training(file):
    return not file.startswith('test/')


def has_key(file, key):
    return re.search(rf'^ *{key}:', (FOLDER / file).read_text(encoding='utf-8'), re.M)


every_file = pytest.mark.parametrize('file', FILES)
every_training_file = pytest.mark.parametrize('file', [*filter(is_training, FILES)])
every_testing_file = pytest.mark.parametrize(
    'file', [file for file in FILES if not is_training(file)]
)
every_published_file = pytest.mark.parametrize('file', PUBLISHED)

# What makes a network small, and no other network.
SMALL = {
    **dict.fromkeys(('num_block', 'num_group', 'num_conv'), 1),
    **{'num_feat': 16, 'num_grow_ch': 4, 'num_channel': 4},
    **{'depths': [2], 'num_heads': [2], 'embed_dim': 12, 'squeeze_factor': 2},
}
LARGE_GT, SMALL_GT = (144, 144), (24, 36)  # to train on, and to restore


def parse(file, *forced):
    """Options of a file as a run gets them; no datasets are needed for that."""
    with pytest.MonkeyPatch.context() as patch:
        argv = ['prog', '-opt', str(FOLDER / file), *(['--force_yml'] if forced else []), *forced]
        patch.setattr('sys.argv', argv)
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


def made_small(file):
    """What --force_yml takes, so that a file runs on a CPU in a moment and means the same."""
    opt = options_of(file)
    forced = ['num_gpu=0', 'strict_options=all']  # a key that nothing reads is an error
    for key in {'network_g', 'network_d'} & opt.keys():
        forced += [f'{key}:{name}={SMALL[name]}' for name in opt[key].keys() & SMALL.keys()]
    if not is_training(file):
        return forced
    for setting in ('batch_size_per_gpu=2', 'num_worker_per_gpu=0', 'pin_memory=false'):
        forced.append(f'datasets:train:{setting}')
    if opt.get('network_d', {}).get('type') != 'VGGStyleDiscriminator':  # it takes one size
        forced.append(f'datasets:train:gt_size={16 * opt["scale"]}')
    if 'perceptual_opt' in opt['train']:  # half a gigabyte would be downloaded
        forced.append('train:perceptual_opt:weights=random')
    return forced


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """A folder with images where the files look for them, and with weights."""
    folder = tmp_path_factory.mktemp('project')
    runs = {options_of(file)['name']: file for file in filter(is_training, FILES)}
    for file in FILES:
        opt = options_of(file)
        for key, dataset in opt['datasets'].items():
            make_images(folder, dataset, LARGE_GT if key == 'train' else SMALL_GT, opt['scale'])
        weights = opt['path'].get('pretrain_network_g')
        if weights and not (folder / weights).exists():
            source = runs.get(Path(weights).parts[1], file)  # its own where it is published
            network = parse(source, *made_small(source))['network_g']
            (folder / weights).parent.mkdir(parents=True, exist_ok=True)
            keys = ('params', 'params_ema')
            torch.save({key: build_network(network).state_dict() for key in keys}, folder / weights)
    return folder


def make_images(folder, dataset, size, scale):
    """Two GT images for each folder of them, and the LQ images to these."""
    roots = dataset.get('dataroot_gt', [])
    for name in ('0001', '0002'):
        gt = recipe.det_image(name, *size)
        for root in [roots] if isinstance(roots, str) else roots:
            write_image(folder / root / f'{name}.png', gt)
        if 'dataroot_lq' in dataset:
            file = dataset.get('filename_tmpl', '{}').format(name) + '.png'
            write_image(folder / dataset['dataroot_lq'] / file, recipe.box_down(gt, scale))


def write_image(file, image):
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), image)


@pytest.fixture
def project(tree, tmp_path, monkeypatch):
    """A working directory that has what the files name."""
    for name in ('datasets', 'experiments'):
        (tmp_path / name).symlink_to(tree / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights_of(net):
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def names_of_losses(train):
    """What the log shows of a step, for the losses of a train section."""
    prefix = 'l_g_' if 'gan_opt' in train else 'l_'
    names = {'pixel_opt': 'pix', 'perceptual_opt': 'percep', 'gan_opt': 'gan', 'ldl_opt': 'ldl'}
    losses = {prefix + name for option, name in names.items() if option in train}
    if 'gan_opt' in train:
        losses |= {'l_d_real', 'l_d_fake', 'out_d_real', 'out_d_fake'}
    return losses


def networks_of(model):
    names = ('net_g', 'net_d', 'net_g_ema', 'cri_perceptual')
    found = {name: getattr(model, name, None) for name in names}
    return {name: net for name, net in found.items() if net is not None}


def check_start(path, weights):
    """Weights are those of the file that ``path`` names: all of them, or what fits."""
    if 'pretrain_network_g' in path:
        stored = torch.load(path['pretrain_network_g'], weights_only=True)
        stored = stored[path.get('param_key_g', 'params')]
        fitting = {
            name: value
            for name, value in weights.items()
            if name in stored and value.shape == stored[name].shape
        }
        assert len(fitting) == len(weights) if path.get('strict_load_g', True) else fitting
        assert all(torch.equal(value, stored[name]) for name, value in fitting.items())


def check_first_step(net, before, lr):
    """The first step of Adam moves a weight by the learning rate, whatever its gradient is."""
    moved = {
        name: (parameter.detach() - before[name]).abs().max().item()
        for name, parameter in net.named_parameters()
    }
    # A constant before a Sobel or Laplace filter, of ECBSR, may have no gradient at all.
    still = {name for name, distance in moved.items() if not distance and name[-3:] != '.b0'}
    assert still == {name for name in moved if name.endswith('.mask')}, 'frozen ones alone'
    assert max(moved.values()) == pytest.approx(lr, rel=2e-3)


@every_training_file
def test_a_training_file_makes_one_step_as_it_says(file, project):
    opt = parse(file, *made_small(file))
    train, train_set = opt['train'], opt['datasets']['train']
    model = build_model(opt)
    before = {name: weights_of(net) for name, net in networks_of(model).items()}
    check_start(opt['path'], before['net_g'])
    datasets = {key: build_dataset(options) for key, options in opt['datasets'].items()}
    loader = build_dataloader(datasets['train'], train_set, num_gpu=0, seed=0)
    check_unread(opt)
    model.update_learning_rate(1, train['warmup_iter'])
    model.feed_data(CPUPrefetcher(loader).next())
    model.optimize_parameters(1)

    log = model.get_current_log()
    assert set(log) == names_of_losses(train)
    assert all(math.isfinite(value) for value in log.values()), log
    side, channels = train_set['gt_size'], 1 if train_set.get('color') == 'y' else 3
    assert model.lq.shape == (2, channels, side // opt['scale'], side // opt['scale'])
    assert model.output.shape == (2, channels, side, side)
    optimizers = {key: train[f'optim_{key[-1]}'] for key in ('net_g', 'net_d') if key in before}
    assert len(model.schedulers) == len(optimizers) * ('scheduler' in train)
    for name, optimizer in optimizers.items():
        lr = optimizer['lr'] / max(train['warmup_iter'], 1)
        check_first_step(networks_of(model)[name], before[name], lr)
    for name, old in before.get('net_g_ema', {}).items():
        new, decay = model.net_g.get_parameter(name).detach(), train['ema_decay']
        average = model.net_g_ema.get_parameter(name)
        torch.testing.assert_close(average, decay * old + (1 - decay) * new, atol=1e-7, rtol=1e-6)
    for name, old in before.get('cri_perceptual', {}).items():
        assert torch.equal(model.cri_perceptual.get_parameter(name), old)


@every_testing_file
def test_a_testing_file_restores_with_the_weights_that_it_names(file, project, monkeypatch):
    """Every set it names: the images, their sizes and their scores."""
    argv = ['prog', '-opt', str(FOLDER / file), '--force_yml', *made_small(file)]
    monkeypatch.setattr('sys.argv', argv)
    basicsr.test.test_pipeline(project)
    opt = parse(file, *made_small(file))
    path, scale, name = opt['path'], opt['scale'], opt['name']
    net = build_network(opt['network_g']).eval()
    weights = torch.load(path['pretrain_network_g'], weights_only=True)
    net.load_state_dict(weights[path.get('param_key_g', 'params')])
    folder = project / 'results' / name
    results = json.loads((folder / 'results.json').read_text())['sets']
    assert results.keys() == {dataset['name'] for dataset in opt['datasets'].values()}
    for dataset in opt['datasets'].values():
        lq, restored = (
            sorted(images.iterdir())[-1]
            for images in (Path(dataset['dataroot_lq']), folder / 'visualization' / dataset['name'])
        )
        image = cv2.imread(str(lq)).astype('float32') / 255
        with torch.no_grad():
            expected = tensor2img(net(img2tensor(image)[None]))
        assert image.shape == (SMALL_GT[0] // scale, SMALL_GT[1] // scale, 3)
        assert expected.shape == (*SMALL_GT, 3)
        assert np.abs(cv2.imread(str(restored)).astype(int) - expected).max() <= 1
        has_gt = 'dataroot_gt' in dataset
        scores = results[dataset['name']]['metrics']
        assert scores.keys() == (set(opt['val']['metrics'] or {}) if has_gt else set())
        assert all(math.isfinite(score) for score in scores.values())


@every_published_file
def test_the_network_of_a_file_has_the_published_number_of_parameters(file):
    parameters = parameters_of(json.dumps(options_of(file)['network_g']))
    assert parameters == PUBLISHED[file]['parameters']


@pytest.mark.parametrize('file', [file for file in FILES if has_key(file, 'network_d')])
def test_the_discriminator_of_a_file_builds_and_takes_its_crops(file):
    opt = options_of(file)
    size = opt['datasets']['train']['gt_size']
    with torch.device('meta'):
        logits = build_network(opt['network_d'])(torch.empty(2, 3, size, size))
    assert len(logits) == 2


@pytest.mark.parametrize('file', [file for file in FILES if has_key(file, 'metrics')])
def test_metrics_of_a_file_take_its_arguments_and_leave_out_borders_of_the_scale(file):
    opt = options_of(file)
    assert opt['val']['metrics']
    for metric in opt['val']['metrics'].values():
        taken = inspect.signature(METRIC_REGISTRY.get(metric['type'])).parameters
        assert metric.keys() <= {'type', 'better', *taken}
        assert metric['crop_border'] == (opt['scale'] if opt['scale'] > 1 else 0)


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
    assert weights_of_another_run(opt['path']) == published['weights']
    if is_training(file):
        train = opt['train']
        assert train['warmup_iter'] == -1
        assert (train.get('net_d_iters', 1), train.get('net_d_init_iters', 0)) == (1, 0)


def weights_of_another_run(path):
    """How weights are loaded to begin with, if there are any."""
    if 'pretrain_network_g' not in path:
        return None
    return 'strict' if path.get('strict_load_g', True) else 'partial'


def test_every_file_of_the_reference_that_can_be_run_has_a_counterpart():
    known = {*ARCH_REGISTRY.keys(), *MODEL_REGISTRY.keys()}
    assert [name for name in WAITING if name in known] == [], 'add its files'
    assert len(PUBLISHED) + sum(WAITING.values()) == 70


def test_no_two_files_of_a_kind_write_into_one_folder():
    names = Counter((is_training(file), options_of(file)['name']) for file in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_weights_of_another_run_are_those_that_an_option_file_trains():
    trained = {options_of(file)['name'] for file in filter(is_training, FILES)}
    for file in FILES:
        weights = options_of(file)['path'].get('pretrain_network_g', '')
        if not weights.startswith('experiments/pretrained_models/'):
            assert not weights or weights.split('/')[1] in trained, file
