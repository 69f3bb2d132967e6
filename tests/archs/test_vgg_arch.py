import json
import logging
import shutil
import warnings
from urllib.error import URLError

import golden
import pytest
import torch
from torch import nn
from torchvision.models import get_model_weights, vgg

from basicsr.archs import build_network
from basicsr.archs.vgg_arch import NAMES, VGGFeatureExtractor, insert_bn
from basicsr.utils.checkpoint import save_checkpoint

CONFIGURATIONS = {'vgg11': 'A', 'vgg13': 'B', 'vgg16': 'D', 'vgg19': 'E'}
VGG11_FILE = 'vgg11-8a719046.pth'


def torchvision_features(vgg_type):
    """The layers before the classifier, as torchvision builds them, with in-place activations."""
    plain = vgg_type.removesuffix('_bn')
    return vgg.make_layers(vgg.cfgs[CONFIGURATIONS[plain]], batch_norm=vgg_type != plain)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Files like torchvision's, and the layers whose weights they hold, by type."""
    made = {}
    for vgg_type in ('vgg11', 'vgg11_bn'):
        torch.manual_seed(1)
        features = torchvision_features(vgg_type).eval()
        state = {f'features.{key}': value for key, value in features.state_dict().items()}
        path = tmp_path_factory.mktemp('vgg') / f'{vgg_type}.pth'
        save_checkpoint(state | {'classifier.6.bias': torch.zeros(1000)}, path)
        made[vgg_type] = path, features
    return made


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty working directory, an empty cache and no network; the list of downloads tried."""
    tried = []

    def download(url, path, *args, **kwargs):
        tried.append(url)
        raise URLError('no route to host')

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    monkeypatch.setattr('basicsr.archs.vgg_arch.load_file_from_url', download)
    return tried


def untrained(layers, *args, **kwargs):
    return VGGFeatureExtractor(layers, *args, weights='random', **kwargs)


@pytest.mark.parametrize('case', golden.params('archs', lambda c: 'VGGFeat' in c['network']))
def test_features_are_the_references(case):
    net = VGGFeatureExtractor(**case['net'], weights='random')
    shapes = {key: list(value.shape) for key, value in net.state_dict().items()}
    states = json.loads((golden.recipe.HERE / 'archs_state.json').read_text())
    assert shapes == states[case['state']]
    if not case.get('structure_only'):
        golden.fill(net, case)
        features = {'out': net(*golden.resolve(case['args']))}
        assert golden.recipe.compare(case, features) is None


# layers


@pytest.mark.parametrize('vgg_type', NAMES)
def test_layers_have_the_order_and_shapes_of_torchvision(vgg_type):
    with torch.device('meta'):
        want = torchvision_features(vgg_type)
        net = untrained(['pool5'], vgg_type)
    kinds = {nn.Conv2d: 'conv', nn.BatchNorm2d: 'bn', nn.ReLU: 'relu', nn.MaxPool2d: 'pool'}
    assert [name.rstrip('_0123456789') for name in NAMES[vgg_type]] == [
        kinds[type(layer)] for layer in want
    ]
    shapes = {
        f'vgg_net.{NAMES[vgg_type][int(key.partition(".")[0])]}.{key.partition(".")[2]}': v.shape
        for key, v in want.state_dict().items()
    }
    state = {key: value.shape for key, value in net.state_dict().items()}
    assert state == {'mean': (1, 3, 1, 1), 'std': (1, 3, 1, 1)} | shapes


def test_names_count_the_blocks_and_the_layers_of_a_block():
    assert NAMES['vgg11'][:8] == [
        *('conv1_1', 'relu1_1', 'pool1', 'conv2_1', 'relu2_1', 'pool2', 'conv3_1', 'relu3_1')
    ]
    assert NAMES['vgg16'][-3:] == ['conv5_3', 'relu5_3', 'pool5']
    assert insert_bn(['conv1_1', 'relu1_1', 'pool1']) == ['conv1_1', 'bn1_1', 'relu1_1', 'pool1']


@pytest.mark.parametrize('vgg_type', ['vgg11', 'vgg11_bn'])
@torch.no_grad()
def test_features_are_those_of_torchvision_for_the_same_file(vgg_type, files):
    path, layers = files[vgg_type]
    net = VGGFeatureExtractor(NAMES[vgg_type], vgg_type, weights=str(path))
    x = torch.rand(2, 3, 32, 40)
    out = net(x)
    y = (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    for name, layer in zip(NAMES[vgg_type], layers, strict=True):
        y = layer(y.clone())
        assert torch.allclose(out[name], y, rtol=1e-4, atol=1e-5), name


def test_only_the_wanted_features_come_out_and_no_deeper_layer_is_kept():
    with torch.device('meta'):
        net = untrained(['relu3_1', 'conv1_2'])
    assert [name for name, _ in net.vgg_net.named_children()][-2:] == ['conv3_1', 'relu3_1']
    out = net(torch.zeros(1, 3, 8, 8, device='meta'))
    assert {name: feature.shape for name, feature in out.items()} == {
        'conv1_2': (1, 64, 8, 8),
        'relu3_1': (1, 256, 2, 2),
    }


def test_features_before_an_activation_may_be_negative():
    out = untrained(['conv1_1', 'relu1_1'])(torch.rand(1, 3, 8, 8))
    assert out['conv1_1'].min() < 0
    assert torch.equal(out['relu1_1'], out['conv1_1'].clamp_min(0))


def test_pooling_can_be_removed_or_take_other_steps():
    x = torch.zeros(1, 3, 12, 9, device='meta')
    with torch.device('meta'):
        removed = untrained(['conv3_1'], remove_pooling=True)
        narrow = untrained(['conv3_1'], pooling_stride=1)
    assert removed(x)['conv3_1'].shape == (1, 256, 12, 9)
    assert narrow(x)['conv3_1'].shape == (1, 256, 10, 7)
    with pytest.raises(ValueError, match="no layer 'pool1'"):
        untrained(['pool1'], remove_pooling=True)


# images


def test_range_norm_takes_images_from_minus_1_to_1():
    net = untrained(['conv1_1'])
    wide = untrained(['conv1_1'], range_norm=True)
    wide.load_state_dict(net.state_dict())
    x = torch.rand(1, 3, 8, 8)
    assert torch.allclose(wide(2 * x - 1)['conv1_1'], net(x)['conv1_1'], atol=1e-5)


def test_without_input_norm_there_is_no_mean_in_the_weights():
    net = untrained(['conv1_1'], use_input_norm=False)
    assert [*net.state_dict()] == ['vgg_net.conv1_1.weight', 'vgg_net.conv1_1.bias']
    x = torch.rand(1, 3, 8, 8)
    assert torch.equal(net(x)['conv1_1'], net.vgg_net.conv1_1(x))


@pytest.mark.parametrize('use_input_norm', [True, False])
def test_a_gray_image_counts_as_one_with_three_equal_channels(use_input_norm):
    net, x = untrained(['relu1_2'], use_input_norm=use_input_norm), torch.rand(2, 1, 8, 8)
    assert torch.equal(net(x)['relu1_2'], net(x.repeat(1, 3, 1, 1))['relu1_2'])


@pytest.mark.parametrize('shape', [(1, 4, 8, 8), (3, 8, 8), (1, 5, 3, 8, 8)])
def test_anything_but_rgb_and_gray_images_is_refused(shape):
    with pytest.raises(ValueError, match='takes images .b, 3 or 1, h, w., got'):
        untrained(['conv1_1'])(torch.rand(shape))


@pytest.mark.parametrize(
    ('layer', 'options', 'smallest'),
    [
        ('conv1_2', {}, 1),
        ('conv5_4', {}, 16),
        ('pool5', {}, 32),
        ('conv5_4', {'pooling_stride': 1}, 5),
        ('conv5_4', {'pooling_stride': 3}, 41),
        ('conv5_4', {'remove_pooling': True}, 1),
    ],
)
def test_an_image_too_small_for_a_layer_is_refused_and_the_smallest_is_not(
    layer, options, smallest
):
    with torch.device('meta'):
        net = untrained([layer], **options)
    size = (smallest, smallest + 3)
    assert net(torch.zeros(1, 3, *size, device='meta'))[layer].shape[2] == 1
    if smallest > 1:
        with pytest.raises(ValueError, match=f'{smallest}x{smallest} or more .*{layer}.*gt_size'):
            net(torch.zeros(1, 3, smallest - 1, 64, device='meta'))


# modes and arguments


def test_frozen_weights_need_no_gradient_and_stay_in_eval_mode():
    parent = nn.Sequential(untrained(['bn1_1'], 'vgg11_bn')).train()
    assert not any(module.training for module in parent[0].modules())
    assert not any(parameter.requires_grad for parameter in parent.parameters())
    before = parent[0].vgg_net.bn1_1.running_mean.clone()
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    parent(x)['bn1_1'].square().mean().backward()
    assert torch.equal(parent[0].vgg_net.bn1_1.running_mean, before)
    assert x.grad is not None and x.grad.abs().max() > 0


def test_weights_can_be_trained_if_asked_for():
    net = untrained(['bn1_1'], 'vgg11_bn', requires_grad=True)
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert net.training and not net.eval().training and net.train().training


def test_unknown_types_and_layers_get_a_suggestion():
    with pytest.raises(ValueError, match="'conv5_5'; did you mean 'conv5_4'"):
        untrained(['conv1_1', 'conv5_5'])
    with pytest.raises(ValueError, match="'bn1_1'; did you mean"):
        untrained(['bn1_1'], 'vgg19')
    with pytest.raises(ValueError, match="'vgg91' is not one of vgg11, .*; did you mean 'vgg19'"):
        untrained(['conv1_1'], 'vgg91')
    with pytest.raises(ValueError, match='no layers are given'):
        untrained([])


# weights


@pytest.mark.parametrize('vgg_type', NAMES)
def test_without_a_file_the_error_names_file_place_address_and_option(vgg_type, offline, tmp_path):
    url = get_model_weights(vgg_type).DEFAULT.url
    name = url.rpartition('/')[2]
    with pytest.raises(FileNotFoundError) as info:
        build_network(
            {'type': 'VGGFeatureExtractor', 'layer_name_list': ['conv1_1'], 'vgg_type': vgg_type}
        )
    message = str(info.value)
    assert name.startswith(f'{vgg_type}-')
    for part in (
        url,
        f'experiments/pretrained_models/{name}',
        str(tmp_path / 'torch/hub/checkpoints' / name),
        'option weights',
        'train.perceptual_opt.weights',
        'no route to host',
    ):
        assert part in message
    assert offline == [url]


@pytest.mark.parametrize('folder', ['experiments/pretrained_models', 'torch/hub/checkpoints'])
def test_a_file_of_the_type_is_found_without_a_download(folder, files, offline, tmp_path):
    (tmp_path / folder).mkdir(parents=True)
    path, layers = files['vgg11']
    shutil.copy(path, tmp_path / folder / VGG11_FILE)
    net = VGGFeatureExtractor(['conv2_1'], 'vgg11')
    assert torch.equal(net.vgg_net.conv2_1.weight, layers[3].weight)
    assert offline == []
    # The file of another type is not taken for it.
    with pytest.raises(FileNotFoundError, match=r'vgg13-\w+\.pth'):
        VGGFeatureExtractor(['conv2_1'], 'vgg13')


def test_weights_are_downloaded_into_the_cache_once(
    files, offline, tmp_path, monkeypatch, caplog, capsys
):
    path, layers = files['vgg11']

    def download(url, folder, progress):
        assert progress
        offline.append(url)
        folder.mkdir(parents=True)
        shutil.copy(path, folder / VGG11_FILE)

    monkeypatch.setattr('basicsr.archs.vgg_arch.load_file_from_url', download)
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter('error')
        for _ in range(2):
            net = VGGFeatureExtractor(['conv2_1'], 'vgg11')
    url = f'https://download.pytorch.org/models/{VGG11_FILE}'
    assert offline == [url]
    assert torch.equal(net.vgg_net.conv2_1.weight, layers[3].weight)
    assert [url in message and 'option weights' in message for message in caplog.messages] == [True]


def test_without_a_home_weights_are_kept_beside_the_experiments(offline, no_home):
    with pytest.raises(FileNotFoundError) as info:
        VGGFeatureExtractor(['conv2_1'], 'vgg11')
    assert f'experiments/pretrained_models/{VGG11_FILE}' in str(info.value)
    assert '~' not in str(info.value)


def test_a_named_file_comes_before_the_others_and_must_exist(files, offline, tmp_path):
    places = tmp_path / 'experiments/pretrained_models'
    places.mkdir(parents=True)
    (places / VGG11_FILE).write_bytes(b'not this one')
    path, layers = files['vgg11']
    net = VGGFeatureExtractor(['conv1_1'], 'vgg11', weights=str(path))
    assert torch.equal(net.vgg_net.conv1_1.weight, layers[0].weight)
    with pytest.raises(FileNotFoundError, match=f'weights: no file gone.pth .*{VGG11_FILE}'):
        VGGFeatureExtractor(['conv1_1'], 'vgg11', weights='gone.pth')
    assert offline == []


def test_a_truncated_file_is_an_error_that_names_it(files, offline, tmp_path):
    path, _ = files['vgg11']
    with path.open('rb') as file:
        (tmp_path / 'short.pth').write_bytes(file.read(100_000))
    with pytest.raises(ValueError, match='short.pth: it is damaged'):
        VGGFeatureExtractor(['conv1_1'], 'vgg11', weights='short.pth')


@pytest.mark.parametrize('vgg_type', ['vgg13', 'vgg16', 'vgg19', 'vgg11_bn'])
def test_the_file_of_another_type_is_refused_even_if_the_wanted_layers_agree(
    vgg_type, files, offline
):
    path, _ = files['vgg11']
    with pytest.raises(ValueError, match=f'vgg11.pth does not hold the weights of {vgg_type};'):
        VGGFeatureExtractor(['conv1_1'], vgg_type, weights=str(path))


@pytest.mark.parametrize('content', [{}, {'params': {}}, [1, 2]])
def test_a_file_without_features_is_refused(content, offline, tmp_path):
    torch.save(content, tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='other.pth does not hold .*features.0.weight'):
        VGGFeatureExtractor(['conv1_1'], 'vgg11', weights='other.pth')


def test_random_weights_are_taken_only_if_asked_for(offline):
    assert untrained(['conv1_1'], 'vgg11')(torch.rand(1, 3, 4, 4))['conv1_1'].std() > 0
    assert offline == []
