"""Reference of all options of a file, those of components included: value, type, meaning."""

import ast
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from .catalogue import Argument, Component, class_in, components
from .option_schema import Section
from .option_section import KeyPath

# Meanings of options that no table and no signature describes, because datasets, models and
# optimizers read them. The first part of a name is the section.
MEANINGS = {
    '.val': 'validation; ~: none',
    '.high_order_degradation': 'make LQ from GT; false: train on pairs',
    '.share_degradation': 'draw sizes and kinds of noise once a batch, as BasicSR 1.x does',
    '.queue_size': 'pairs in the pool that mixes batches; 0: none',
    '.log_recipes': 'write what was drawn for every sample to recipes_<rank>.jsonl',
    '.gt_usm': 'sharpen the target',
    '.l1_gt_usm': 'the pixel loss compares with the sharpened GT',
    '.percep_gt_usm': 'the perceptual loss compares with the sharpened GT',
    '.gan_gt_usm': 'the discriminator sees the sharpened GT',
    'datasets.phase': 'train, val or test; set by the program',
    'datasets.scale': 'GT size / LQ size; ~: the scale of the file',
    'datasets.dataroot_gt': 'GT: a folder, a list of folders, or an LMDB',
    'datasets.dataroot_lq': 'LQ: a folder, a list of folders, or an LMDB',
    'datasets.io_backend': '{type: disk}, {type: lmdb}, or memcached with its keys',
    'datasets.meta_info_file': 'file that lists the names of the images to use; ~: all',
    'datasets.meta_info': 'file that lists the names of the images to use; ~: all',
    'datasets.exclude': 'file that lists the names of images to leave out; ~: none',
    'datasets.filename_tmpl': "base name of the LQ image from that of the GT; default '{}'",
    'datasets.recursive': 'look into sub-folders',
    'datasets.gt_size': 'side of the GT crops in pixels',
    'datasets.pad_small': 'mirror images that are smaller than the crop',
    'datasets.use_hflip': 'flip crops at random',
    'datasets.use_rot': 'rotate crops at random, by multiples of 90 degrees',
    'datasets.color': 'gray or y (luma): one channel; ~: three',
    'datasets.mean': 'subtracted from images in [0, 1], one number per channel',
    'datasets.std': 'images are divided by it after mean, one number per channel',
    'datasets.cache': 'decoded images: auto, off, or a folder',
    'datasets.crop_size': 'side of the GT crop that is degraded; default 25/16 of gt_size',
    'datasets.root_weights': 'how often an image of each folder is used in an epoch',
    'datasets.sigma': 'deviation of the noise in 8-bit levels, or a range to draw it from',
    'datasets.degrade_on': 'device or worker: where LQ is made',
    'datasets.blur_kernel_size': 'largest blur kernel, in pixels',
    'datasets.kernel_list': 'kinds of blur kernels',
    'datasets.kernel_prob': 'a weight for each kind of blur kernel',
    'datasets.blur_sigma': 'lowest and highest width of a blur kernel, in pixels',
    'datasets.betag_range': 'lowest and highest exponent of generalized Gaussian kernels',
    'datasets.betap_range': 'lowest and highest exponent of plateau kernels',
    'datasets.sinc_prob': 'probability of a sinc filter in place of a blur kernel',
    'datasets.final_sinc_prob': 'probability of a sinc filter at the end',
    'datasets.second_blur_prob': 'probability of the second blur',
    'datasets.resize_prob': 'weights of enlarging, reducing and keeping the size',
    'datasets.resize_range': 'lowest and highest factor of the resize',
    'datasets.gaussian_noise_prob': 'probability of Gaussian noise, else Poisson noise',
    'datasets.noise_range': 'lowest and highest sigma of Gaussian noise, in units of 1/255',
    'datasets.poisson_scale_range': 'lowest and highest factor of Poisson noise',
    'datasets.gray_noise_prob': 'probability that noise is gray',
    'datasets.jpeg_range': 'lowest and highest JPEG quality',
    'datasets.gt_usm': 'make LQ from the sharpened GT',
    'datasets.parts': 'options of the sets that are joined',
    'datasets.weights': 'share of each part in an epoch; default: its length',
    'datasets.shards': 'tar files: a file, a pattern, a URL, or a list',
    'datasets.num_samples': 'pairs in all shards; ~: counted',
    'datasets.shuffle_buffer': 'pairs from which the next one is drawn',
    'datasets.shuffle_seed': 'seed of the order of shards and pairs',
    'path.pretrain_network_': 'file of weights to start from; ~: random ones',
    'path.param_key_': 'which weights of that file: params, params_ema, …',
    'path.strict_load_': 'all names and shapes must match; false: load those that do',
    'train.optim_': 'optimizer: {type: …, lr: …, arguments}',
    'train.scheduler': 'schedule of the learning rate, {type: …, arguments}; ~: constant',
    'train.pixel_opt': 'loss between pixels; ~: none',
    'train.perceptual_opt': 'loss between features; ~: none',
    'train.gan_opt': 'adversarial loss; ~: none',
    'train.ldl_opt': 'loss that penalises GAN artifacts; ~: none',
    'train.losses': 'further losses, a list of {type: …, arguments}',
    'train.net_d_iters': 'the generator is trained in every n-th iteration; default 1',
    'train.net_d_init_iters': 'only the discriminator is trained in the first n; default 0',
    'optim.type': 'a class of torch.optim, or module:Class',
    'optim.lr': 'learning rate; the schedule and the warm-up start from it',
    'optim.weight_decay': 'decay of the weights, as the optimizer defines it',
    'optim.betas': 'decay of the averages of the gradient and of its square',
    'optim.momentum': 'decay of the average of the gradient',
    'optim.eps': 'added to the denominator',
    'optim.groups': 'parameters with arguments of their own, [{pattern, lr, …}]',
    'optim.pattern': 'a regular expression, searched for in parameter names',
    'optim.decay_norms': 'false: no weight decay for norms and biases',
    'optim.others': 'optimizer of the parameters that Muon does not train',
    'scheduler.type': 'a schedule of this package or of torch.optim.lr_scheduler',
    'scheduler.gamma': 'factor of the rate at each milestone',
    'scheduler.restart_weights': 'factor of the first rate, for each restart',
    'scheduler.eta_min': 'the rate at the end of a period',
    'networks.num_in_ch': 'channels of the input',
    'networks.num_out_ch': 'channels of the output',
    'networks.num_feat': 'channels of the features',
    'networks.num_block': 'blocks, one after the other',
    'networks.num_grow_ch': 'channels that each dense layer adds',
    'networks.window_size': 'side of the windows of attention; inputs are padded to a multiple',
    'networks.mlp_ratio': 'width of the MLP over that of the features',
    'networks.qkv_bias': 'biases for queries, keys and values',
    'networks.qk_scale': 'factor of the attention logits; ~: 1 / sqrt(channels of a head)',
    'losses.name': 'name in the log',
    'losses.perceptual_weight': 'factor of the perceptual loss; 0: none',
    'losses.style_weight': 'factor of the style loss; 0: none',
    'metrics.crop_border': 'pixels to crop from each side',
    'metrics.input_order': "'HWC' or 'CHW'",
    'metrics.test_y_channel': 'compare the luma',
    'metrics.better': 'higher or lower: which score is better',
    'sampler.type': 'order of the samples',
    'wandb.entity': 'passed to wandb.init',
}

_METRICS = ('val', 'metrics')
_SCHEDULES = {'MultiStepLR': 'MultiStepRestartLR'}


class Entry(NamedTuple):
    """An option of a file.

    Attributes:
        type: The values that it takes, as users write them.
        meaning: A sentence, or ''.
    """

    path: KeyPath
    value: Any
    type: str
    meaning: str


def entries(section: Mapping, table: type[Section] | None, path: KeyPath = ()) -> Iterator[Entry]:
    """All options of a section and of those below it, with defaults of components.

    Args:
        section: Checked options.
        table: The table of the section; None if it is a component's.
        path: Key path of the section.
    """
    kind, component = _component(path, section)
    for key, value in section.items():
        inner, here = _table_of(table, key), (*path, str(key))
        parts = list(enumerate(value)) if isinstance(value, list) else []
        if isinstance(value, dict) and value and (inner or _kind(here) or here == _METRICS):
            yield from entries(value, inner, here)
        elif parts and all(isinstance(part, dict) for _, part in parts):
            for index, part in parts:
                yield from entries(part, inner, (*here, str(index)))
        else:
            entry = _entry(here, value, table, kind, component)
            if kind and not entry.meaning:
                entry = entry._replace(meaning=f'argument of {section.get("type")}')
            yield entry
    for argument in component.arguments if component else ():
        if argument.name not in section:
            value = None if argument.default is None else _literal(argument.default)
            yield Entry(
                (*path, argument.name), value, argument.type, meaning_of_argument(argument, kind)
            )


def _entry(
    path: KeyPath, value: Any, table: type[Section] | None, kind: str, component: Component | None
) -> Entry:
    key, field = path[-1], table.model_fields.get(path[-1]) if table else None
    named = _named(kind, key, value)
    if named:
        links = f' {named.papers[0]}' if named.papers else ''
        return Entry(path, value, 'str', f'{named.summary}{links}')
    if field is not None:
        return Entry(path, value, type_text(field.annotation), field.description or meaning(path))
    for argument in component.arguments if component else ():
        if argument.name == key:
            return Entry(path, value, argument.type, meaning_of_argument(argument, kind))
    text = meaning(path) or MEANINGS.get(f'{kind}.{key}', '')
    return Entry(path, value, type(value).__name__ if value is not None else '', text)


def meaning_of_argument(argument: Argument, kind: str) -> str:
    """The meaning of an argument: from its docstring, or the usual one if that says nothing."""
    usual = MEANINGS.get(f'{kind}.{argument.name}', '')
    own = '' if argument.meaning.startswith('See ') else argument.meaning
    return own or usual or argument.meaning


def _named(kind: str, key: str, value: Any) -> Component | None:
    """The component that the value of ``type`` names."""
    if key == 'model_type':
        return components('models').get(value)
    if key == 'type' and kind == 'scheduler':
        return class_in('models', _SCHEDULES.get(value, value))
    if key == 'type' and kind in ('networks', 'losses', 'metrics', 'datasets'):
        return components(kind).get(value)
    return None


def _component(path: KeyPath, section: Mapping) -> tuple[str, Component | None]:
    """Kind of the component that a section describes ('' for none), and its catalogue entry."""
    kind = _kind(path)
    if kind == 'optim' and 'type' not in section and 'others' not in path:
        return kind, None  # a group
    name = section.get('type')
    return kind, _named(kind, 'type', name) if isinstance(name, str) else None


def _kind(path: KeyPath) -> str:
    if len(path) == 1 and path[0].startswith('network_'):
        return 'networks'
    if len(path) == 2 and path[0] == 'datasets':
        return 'datasets'
    if path[:2] == ('val', 'metrics') and len(path) == 3:
        return 'metrics'
    if path[:1] != ('train',) or len(path) < 2:
        return 'sampler' if path[2:] == ('sampler',) else ''
    if len(path) == 2 + (path[1] == 'losses') and path[1].endswith(('_opt', 'losses')):
        return 'losses'
    return 'optim' if path[1].startswith('optim_') else path[1] * (path[1] == 'scheduler')


def meaning(path: KeyPath) -> str:
    """The meaning of an option that no table and no signature describes; '' if unknown."""
    key, kind = path[-1], _kind(path[:-1])
    section = kind or (path[0] if len(path) > 1 else '')
    names = [f'{section}.{key}', f'{section}.{key.rpartition("_")[0]}_']
    names += [f'datasets.{key}'] if len(path) == 1 else []
    found = next((MEANINGS[name] for name in names if name in MEANINGS), '')
    if not found and key.endswith('2') and (first := meaning((*path[:-1], key[:-1]))):
        return f'{first}, in the second round'
    return found


def _table_of(table: type[Section] | None, key: str) -> type[Section] | None:
    """The table of the section ``key``, or of the entries of the list ``key``."""
    if table is None:
        return None
    if inner := table.inner(key):
        return inner
    parts = [table.model_fields[key].annotation] if key in table.model_fields else []
    while parts:
        part = parts.pop()
        if isinstance(part, type) and not get_args(part) and issubclass(part, Section):
            return part
        parts += get_args(part)
    return None


def _literal(source: str) -> Any:
    try:
        return ast.literal_eval(source)
    except ValueError:
        return source


def type_text(annotation: Any) -> str:
    """An annotation as users write values: int, bool, section, or one of the choices."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return ', '.join(parts)
    if origin in (Union, UnionType):
        return ', '.join(type_text(part) for part in parts if part is not type(None))
    if origin in (dict, list):
        return origin.__name__
    return 'section' if issubclass(annotation, Section) else annotation.__name__
