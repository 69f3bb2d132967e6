"""VGG, an ImageNet classifier, as an extractor of image features.

Very Deep Convolutional Networks for Large-Scale Image Recognition, Simonyan, Zisserman, ICLR 2015,
https://arxiv.org/abs/1409.1556
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from basicsr.utils.checkpoint import load_checkpoint
from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.download_util import load_file_from_url
from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY
from basicsr.utils.text import did_you_mean

logger = logging.getLogger(__name__)

PRETRAINED_FOLDER = Path('experiments/pretrained_models')
RANDOM_WEIGHTS = 'random'

# Table 1 of the paper: convolutions per block (columns A, B, D, E) and their output channels.
_BLOCKS = {
    'vgg11': (1, 1, 2, 2, 2),
    'vgg13': (2, 2, 2, 2, 2),
    'vgg16': (2, 2, 3, 3, 3),
    'vgg19': (2, 2, 4, 4, 4),
}
_WIDTHS = {'1': 64, '2': 128, '3': 256, '4': 512, '5': 512}


def _layer_names(blocks: Sequence[int]) -> list[str]:
    names = []
    for block, count in enumerate(blocks, 1):
        for index in range(1, count + 1):
            names += [f'conv{block}_{index}', f'relu{block}_{index}']
        names.append(f'pool{block}')
    return names


def insert_bn(names: Sequence[str]) -> list[str]:
    """The layer names with a ``bn`` after every ``conv``."""
    out = []
    for name in names:
        out.append(name)
        if name.startswith('conv'):
            out.append(name.replace('conv', 'bn'))
    return out


# The layers of each type in order, which is also their order in torchvision's ``features``.
NAMES = {vgg_type: _layer_names(blocks) for vgg_type, blocks in _BLOCKS.items()}
NAMES |= {f'{vgg_type}_bn': insert_bn(names) for vgg_type, names in NAMES.items()}


@ARCH_REGISTRY.register()
class VGGFeatureExtractor(nn.Module):
    """Map images (b, 3 or 1, h, w), RGB or gray, to a dict of features by layer name.

    Images are in [0, 1], the range that VGG was trained on; other values are accepted, but its
    features are less meaningful there. Layers deeper than the deepest wanted one are not kept.

    Weights come from the first of these: the file ``weights``; torchvision's file for the type in
    ``experiments/pretrained_models``; the same in torch's cache; a download into that cache.

    Args:
        layer_name_list: ``convB_I`` (before its activation), ``bnB_I``, ``reluB_I`` or ``poolB``,
            for block B = 1 ... 5 and layer I of the block.
        vgg_type: vgg11, vgg13, vgg16 or vgg19, or one of these with batch normalisation: vgg19_bn.
        use_input_norm: Subtract ImageNet's mean and divide by its standard deviation.
        range_norm: Images are in [-1, 1]; bring them to [0, 1] first.
        requires_grad: Let the weights be trained; else they are frozen and stay in eval mode.
        remove_pooling: Leave out the pooling layers.
        weights: A file of torchvision; 'random' is an untrained network, for tests.

    Raises:
        ValueError: The type or a layer is unknown, or a file does not hold weights of the type.
        FileNotFoundError: ``weights`` does not exist, or there are none and none can be downloaded.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        layer_name_list: Sequence[str],
        vgg_type: str = 'vgg19',
        use_input_norm: bool = True,
        range_norm: bool = False,
        requires_grad: bool = False,
        remove_pooling: bool = False,
        pooling_stride: int = 2,
        weights: str | None = None,
    ):
        super().__init__()
        if vgg_type not in NAMES:
            hint = did_you_mean(vgg_type, NAMES)
            raise UserError(f"vgg_type '{vgg_type}' is not one of {', '.join(NAMES)}{hint}")
        names = [n for n in NAMES[vgg_type] if not (remove_pooling and n.startswith('pool'))]
        for name in layer_name_list:
            if name not in names:
                hint = did_you_mean(name, names)
                raise UserError(f"{vgg_type} has no layer '{name}'{hint}")
        if not layer_name_list:
            raise UserError('no layers are given; name those of the features, such as conv5_4.')
        self.vgg_type = vgg_type
        self.layer_name_list = list(layer_name_list)
        self.use_input_norm = use_input_norm
        self.range_norm = range_norm
        self.trainable = requires_grad
        if use_input_norm:
            for key, rgb in (('mean', (0.485, 0.456, 0.406)), ('std', (0.229, 0.224, 0.225))):
                self.register_buffer(key, torch.tensor(rgb).view(1, 3, 1, 1))

        layers = _build_layers(NAMES[vgg_type], pooling_stride)
        if weights != RANDOM_WEIGHTS:
            _load_weights(nn.Sequential(*layers.values()), vgg_type, weights)
        kept = names[: 1 + max(map(names.index, layer_name_list))]
        self.vgg_net = nn.Sequential(OrderedDict((name, layers[name]) for name in kept))
        self.min_size = 1
        for name in kept:
            if name.startswith('pool'):  # each needs a 2x2 window for every output pixel
                self.min_size = (self.min_size - 1) * pooling_stride + 2
        self.requires_grad_(requires_grad)
        self.train(requires_grad)

    def train(self, mode: bool = True) -> 'VGGFeatureExtractor':
        """Frozen weights stay in eval mode, whatever the mode of the network around them."""
        return super().train(mode and self.trainable)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.dim() != 4 or x.shape[1] not in (1, 3):
            raise UserError(f'VGG takes images (b, 3 or 1, h, w), got {tuple(x.shape)}.')
        if min(x.shape[-2:]) < self.min_size:
            raise UserError(
                f'{self.vgg_type} needs images of {self.min_size}x{self.min_size} or more for its '
                f'layers {", ".join(self.layer_name_list)}, got {x.shape[-2]}x{x.shape[-1]}: '
                'enlarge gt_size, or use layers of earlier blocks.'
            )
        x = x.expand(-1, 3, -1, -1)
        if self.range_norm:
            x = (x + 1) / 2
        if self.use_input_norm:
            x = (x - self.mean) / self.std
        features = {}
        for name, layer in self.vgg_net.named_children():
            x = layer(x)
            if name in self.layer_name_list:
                features[name] = x
        return features


def _build_layers(names: Sequence[str], pooling_stride: int) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {}
    channels = 3
    for name in names:
        kind = name.rstrip('_0123456789')
        if kind == 'conv':
            width = _WIDTHS[name[len('conv')]]
            layers[name] = nn.Conv2d(channels, width, 3, padding=1)
            channels = width
        elif kind == 'bn':
            layers[name] = nn.BatchNorm2d(channels)
        elif kind == 'relu':
            # Not in place: the features before it may be requested.
            layers[name] = nn.ReLU()
        else:
            layers[name] = nn.MaxPool2d(2, pooling_stride)
    return layers


def _load_weights(layers: nn.Sequential, vgg_type: str, weights: str | None) -> None:
    """Load all layers, since a file of another type may match in the first ones."""
    source, state = _find_weights(vgg_type, weights)
    try:
        if not isinstance(state, Mapping):
            raise RuntimeError(f'{type(state).__name__} instead of a state dict')
        start = 'features.'
        layers.load_state_dict(
            {k[len(start) :]: v for k, v in state.items() if str(k).startswith(start)}
        )
    except RuntimeError as error:
        raise UserError(
            f'{source} does not hold the weights of {vgg_type}; it must be a file of '
            f"torchvision's {vgg_type}, with keys features.0.weight and so on."
        ) from error


def _find_weights(vgg_type: str, weights: str | None) -> tuple[str | Path, object]:
    """The source of the weights, and its content."""
    # Takes seconds to import, which a training without VGG does not need.
    from torchvision.models import get_model_weights

    official = get_model_weights(vgg_type).DEFAULT  # pyright: ignore[reportAttributeAccessIssue]
    file_name = official.url.rpartition('/')[2]
    if weights is not None:
        if not Path(weights).is_file():
            raise FileNotFoundError(
                f'weights: no file {weights} with the weights of {vgg_type}. Name {file_name} from '
                f'{official.url}, or leave the option out to have it looked for or downloaded.'
            )
        return weights, load_checkpoint(weights)

    local = PRETRAINED_FOLDER / file_name
    cached = Path(torch.hub.get_dir(), 'checkpoints', file_name)
    if cached.parts[0] == '~':  # no home folder
        cached = local
    for path in (local, cached):
        if path.is_file():
            return path, load_checkpoint(path)
    logger.info(
        'Downloading the weights of %s from %s to %s (about 500 MB). To use a file of your own, '
        'name it with the option weights.',
        vgg_type,
        official.url,
        cached,
    )
    try:
        load_file_from_url(official.url, cached.parent, progress=get_dist_info()[0] == 0)
    except OSError as error:
        raise FileNotFoundError(
            f'no weights of {vgg_type}: neither {local} nor {cached} exists, and {official.url} '
            f'cannot be downloaded ({error}). Download {file_name} elsewhere, then put it at '
            'one of these places or name it with the option weights (for a perceptual loss: '
            'train.perceptual_opt.weights).'
        ) from error
    return official.url, load_checkpoint(cached)
