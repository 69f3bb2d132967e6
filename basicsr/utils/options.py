"""From an option file and a command line to one complete, checked dict.

The tables below are the runner's own options: name, type, default, meaning. Everything else in an
option file belongs to a component (network, dataset, loss, metric, optimizer), whose constructor
signature is its schema.
"""

import argparse
import difflib
import logging
import os
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

logger = logging.getLogger(__name__)

KeyPath = tuple[str | int, ...]


class OptionError(ValueError):
    """What is wrong with an option file or the command line, one line per problem."""


# ---------------------------------------------------------------------------- tables


class Section(BaseModel):
    """A table of options. Keys it does not know are kept; near-misses of its own are refused."""

    model_config = ConfigDict(extra='allow', protected_namespaces=())

    # Optional keys that components read, blank-separated: known for spelling, never filled in.
    also_known: ClassVar[str] = ''
    # Families of keys that end in a name of the user's own, like network_<name>.
    families: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def known(cls) -> set[str]:
        """Names of all keys that are spelt right."""
        return {*cls.model_fields, *cls.also_known.split()}

    @classmethod
    def is_known(cls, key: str) -> bool:
        return key in cls.known() or key.startswith(cls.families)


class DatasetOptions(Section):
    """Keys of ``datasets.val*`` and ``datasets.test*``."""

    also_known = (
        'phase scale dataroot_gt dataroot_lq io_backend meta_info_file meta_info filename_tmpl '
        'recursive gt_size pad_small use_hflip use_rot color mean std'
    )

    name: str = Field('', description='used in log lines and result folders; default: the key')
    type: str = Field(description='class in DATASET_REGISTRY')
    num_worker_per_gpu: int = Field(0, ge=0, description='loader processes per rank')
    pin_memory: bool = Field(False, description='page-locked batches; needed by prefetch_mode cuda')
    persistent_workers: bool = Field(False, description='keep loader processes between passes')


class TrainDatasetOptions(DatasetOptions):
    """Keys of ``datasets.train``."""

    batch_size_per_gpu: int = Field(ge=1, description='samples per rank and step')
    num_worker_per_gpu: int = Field(
        default_factory=lambda: min(4, os.cpu_count() or 1), ge=0, description='per rank'
    )
    dataset_enlarge_ratio: int | float = Field(
        1, gt=0, description='repeats of the set in one epoch'
    )
    prefetch_mode: Literal['cpu', 'cuda'] | None = Field(
        None, description='cpu: a thread keeps batches ready; cuda: also copies them ahead'
    )
    num_prefetch_queue: int = Field(1, ge=1, description='batches kept ready by prefetch_mode cpu')


class PathOptions(Section):
    """Keys of ``path``."""

    also_known = (
        'pretrain_network_g pretrain_network_d param_key_g param_key_d strict_load_g '
        'strict_load_d models training_states log visualization'
    )
    families = ('pretrain_network_', 'param_key_', 'strict_load_')

    resume_state: str | None = Field(None, description='a .state file to go on from')
    ignore_resume_networks: list[str] | None = Field(
        None, description='network_* that a resume loads from its pretrain_network_* after all'
    )
    experiments_root: str | None = Field(None, description='parent of run folders; experiments')
    results_root: str | None = Field(None, description='parent of test folders; results')
    random_weights: bool = Field(False, description='test without pretrain_network_g on purpose')


class TrainOptions(Section):
    """Keys of ``train``."""

    also_known = (
        'optim_g optim_d scheduler pixel_opt perceptual_opt gan_opt ldl_opt net_d_iters '
        'net_d_init_iters'
    )
    families = ('optim_',)

    total_iter: int = Field(ge=1, description='optimizer steps of the run')
    warmup_iter: int = Field(-1, description='linear learning-rate warm-up; -1: none')
    ema_decay: float = Field(0.0, ge=0, lt=1, description='0: no averaged copy of net_g')


class ValOptions(Section):
    """Keys of ``val``."""

    val_freq: int | None = Field(None, ge=1, description='iterations; ~: at the end alone')
    save_img: bool = Field(False, description='write result images')
    suffix: str | None = Field(None, description='ending of image names; ~: the experiment name')
    pbar: bool = Field(False, description='progress bar over the images')
    metrics: dict[str, dict] | None = Field(None, description='free name: {type: …, arguments}')
    self_ensemble: bool = Field(False, description='mean over eight flips and rotations')
    log_images: int = Field(4, ge=0, description='images per set shown in TensorBoard and wandb')


class WandbOptions(Section):
    """Keys of ``logger.wandb``; others go to ``wandb.init`` as they are."""

    also_known = 'entity mode group tags notes job_type dir save_code settings name id'

    project: str | None = Field(None, description='~: no wandb')
    resume_id: str | None = Field(None, description='run to go on with; ~: the one of the folder')


class LoggerOptions(Section):
    """Keys of ``logger``."""

    print_freq: int = Field(100, ge=1, description='iterations between log lines')
    save_checkpoint_freq: int = Field(5000, ge=1, description='iterations between checkpoints')
    use_tb_logger: bool = Field(True, description='TensorBoard events in tb_logger/<name>')
    wandb: WandbOptions = Field(default_factory=WandbOptions)


class Options(Section):
    """Top-level keys."""

    families = ('network_',)

    name: str = Field(
        pattern=r'^\w[^/\\:*?"<>|]*$', description='of the run; debug inside: debug mode'
    )
    model_type: str = Field(description='class in MODEL_REGISTRY')
    scale: int | None = Field(None, ge=1, description='GT size / LQ size')
    num_gpu: int | Literal['auto'] = Field('auto', description='0: CPU; auto: all GPUs')
    manual_seed: int | None = Field(None, ge=0, description='~: drawn, and logged')
    deterministic: bool = Field(False, description='deterministic kernels only; slower on GPUs')
    strict_options: bool = Field(True, description='refuse keys that nearly spell a known one')
    plugins: list[str] = Field([], description="folders with the user's *_arch.py, *_model.py, …")
    datasets: dict[str, dict[str, Any]]
    path: PathOptions = Field(default_factory=PathOptions)
    val: ValOptions | None = None
    dist_params: dict[str, Any] = Field({}, description='backend, port, timeout')
    find_unused_parameters: bool = Field(False, description='of DistributedDataParallel')


class TrainingOptions(Options):
    """Top-level keys of a training run."""

    train: TrainOptions
    logger: LoggerOptions = Field(default_factory=LoggerOptions)


class TestOptions(Options):
    """Top-level keys of a test run."""

    val: ValOptions = Field(default_factory=ValOptions)


# ---------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Safe YAML with the float rule of YAML 1.2 (``1e-4`` is a number), no key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == 'tag:yaml.org,2002:merge':
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key in seen:
                raise OptionError(
                    f'{node.start_mark.name}:{line}: {key}: given twice, first in line '
                    f'{seen[key]}; remove one.'
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != 'tag:yaml.org,2002:float']
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float',
    re.compile(
        r'^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN)$'
    ),
    list('-+0123456789.'),
)


def ordered_yaml() -> tuple[type, type]:
    """The (loader, dumper) classes of option files; both keep the order of keys."""
    return _Loader, yaml.SafeDumper


def yaml_load(f: str | Path) -> dict:
    """Read an option file, or YAML text of a mapping.

    Raises:
        FileNotFoundError: ``f`` is neither a file nor text with a ``key: value``.
        OptionError: The YAML is malformed, gives a key twice, or is not a mapping.
    """
    return _load(f)[0]


def _load(f: str | Path) -> tuple[dict, dict[KeyPath, int]]:
    """The mapping of a file or text, and the line of every key path in it."""
    is_text = isinstance(f, str) and ('\n' in f or ': ' in f) and not Path(f[:255]).is_file()
    if not is_text and not Path(f).is_file():
        raise FileNotFoundError(f'no option file {f} (looked in {Path.cwd()}).')
    text = str(f) if is_text else Path(f).read_text(encoding='utf-8')
    loader = _Loader(text)
    loader.name = '<text>' if is_text else str(f)
    try:
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise OptionError(f'{loader.name}:{line}: not valid YAML: {error.problem}.') from None
    except yaml.YAMLError as error:
        raise OptionError(f'{loader.name}: not valid YAML: {error}') from None
    finally:
        loader.dispose()
    if not isinstance(content, dict):
        raise OptionError(f'{loader.name}: an option file is a mapping of keys to values.')
    return content, dict(_lines(node, ()))


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _lines(value, (*path, index))


# ---------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags that training and testing share."""
    parser = argparse.ArgumentParser(description=sys.modules['__main__'].__doc__)
    parser.add_argument('-opt', required=True, metavar='FILE', help='option file (YAML)')
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm'],
        default='none',
        help='who started several processes; torchrun is recognised without it',
    )
    parser.add_argument(
        '--auto_resume', action='store_true', help='go on from the newest state of this name'
    )
    parser.add_argument(
        '--debug', action='store_true', help='prefix the name with debug_: save, log, check often'
    )
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        '--force_yml',
        nargs='+',
        default=[],
        metavar='A:B=VALUE',
        help='set options of the file, as train:total_iter=200',
    )
    return parser.parse_args(argv)


def _force(opt: dict, entries: Iterable[str], table: type[Section]) -> list[KeyPath]:
    """Apply ``a:b:c=value`` entries, each value read as YAML; returns the paths set."""
    forced = []
    for entry in entries:
        keys, equals, text = entry.partition('=')
        if not equals:
            raise OptionError(f"--force_yml {entry}: write it as key:subkey=value, with an '='.")
        *parents, last = keys.strip().split(':')
        section: Any = opt
        for depth, key in enumerate(parents):
            if section is opt and key not in opt and _table_of(table, [key]) is not None:
                opt[key] = {}  # a section of the runner that the file leaves at its defaults
            section = _step_into(section, key, f'--force_yml {entry}', parents[:depth])
        if isinstance(section, list):
            last = _step_into(section, last, f'--force_yml {entry}', parents, index_only=True)
        elif not isinstance(section, dict):
            raise OptionError(f'--force_yml {entry}: {":".join(parents)} holds no keys.')
        elif last not in section:
            _check_new_key(entry, parents, last, table)
        try:
            section[last] = yaml.load(text, _Loader)  # _Loader is a SafeLoader
        except yaml.YAMLError as error:
            raise OptionError(f'--force_yml {entry}: the value is not valid YAML.') from error
        forced.append((*parents, last))
    return forced


def _step_into(
    section: Any, key: str, entry: str, parents: list[str], index_only: bool = False
) -> Any:
    where = ':'.join(parents) or 'the option file'
    if isinstance(section, list):
        if not key.lstrip('-').isdigit() or not -len(section) <= int(key) < len(section):
            raise OptionError(f'{entry}: {where} is a list of {len(section)}; give an index.')
        return int(key) if index_only else section[int(key)]
    if not isinstance(section, dict) or key not in section:
        known = list(section) if isinstance(section, dict) else []
        raise OptionError(f"{entry}: {where} has no key '{key}'{_did_you_mean(key, known)}")
    return section[key]


def _check_new_key(entry: str, parents: list[str], key: str, table: type[Section]) -> None:
    """Refuse a key that neither the file nor the runner's table of that section knows."""
    section = _table_of(table, parents)
    if section is None:
        return  # a component's section: its constructor knows
    if not section.is_known(key):
        where, hint = ':'.join(parents) or 'the option file', _did_you_mean(key, section.known())
        raise OptionError(f"--force_yml {entry}: unknown key: {where} has no '{key}'{hint}")


def _table_of(table: type[Section], parents: Iterable[str]) -> type[Section] | None:
    """The table of the section at ``parents``; None where a component owns the keys."""
    parents = list(parents)
    if len(parents) == 2 and parents[0] == 'datasets':
        return TrainDatasetOptions if parents[1] == 'train' else DatasetOptions
    for key in parents:
        field = table.model_fields.get(key)
        inner = _section_class(field.annotation) if field else None
        if inner is None:
            return None
        table = inner
    return table


def _section_class(annotation: Any) -> type[Section] | None:
    """The Section in ``X`` or ``X | None``."""
    for candidate in (annotation, *getattr(annotation, '__args__', ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else '.'


# ---------------------------------------------------------------------------- checking


class _Checker:
    """Completes sections of an option file and collects every problem with its place."""

    def __init__(
        self, file: str, lines: dict[KeyPath, int], forced: list[KeyPath], strict: bool = True
    ):
        self._file, self._lines, self._forced, self._strict = file, lines, forced, strict
        self.problems: list[tuple[int, str]] = []
        self.unread: list[str] = []

    def complete(self, table: type[Section], section: dict, path: KeyPath = ()) -> dict:
        """``section`` with the table's defaults filled in, its own order of keys kept."""
        self._check_spelling(table, section, path)
        try:
            filled = table.model_validate(section).model_dump()
        except ValidationError as error:
            for detail in error.errors():
                self.add((*path, *detail['loc']), _explain(detail))
            return section
        return {key: filled[key] for key in section} | filled

    def add(self, path: KeyPath, text: str) -> None:
        line, place = self._place(path)
        self.problems.append((line, f'{place}: {".".join(map(str, path))}: {text}'))

    def _check_spelling(self, table: type[Section], section: dict, path: KeyPath) -> None:
        for key, value in section.items():
            inner = _table_of(table, [key])
            if inner is not None and isinstance(value, dict):
                self._check_spelling(inner, value, (*path, key))
            if table.is_known(str(key)):
                continue
            missing = table.known() - set(section)
            close = difflib.get_close_matches(str(key), missing, n=1, cutoff=0.85)
            if close and self._strict:
                self.add((*path, key), f"unknown key; did you mean '{close[0]}'?")
            else:
                self.unread.append('.'.join(map(str, (*path, key))))

    def _place(self, path: KeyPath) -> tuple[int, str]:
        """Line number, for sorting, and place of the longest part of ``path`` that was given."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._forced:
                return 0, '--force_yml'
            if path[:length] in self._lines:
                line = self._lines[path[:length]]
                return line, f'{self._file}:{line}'
        return 0, self._file


def _explain(detail: Any) -> str:
    if detail['type'] == 'missing':
        return 'required, and not given'
    if detail['type'] == 'string_pattern_mismatch':
        return f'must be a plain folder name, got {detail["input"]!r}'
    return f'{detail["msg"][0].lower()}{detail["msg"][1:]}, got {detail["input"]!r}'


def _complete(
    opt: dict, is_train: bool, file: str, lines: dict[KeyPath, int], forced: list[KeyPath]
) -> dict:
    """Fill in defaults, check types and spelling; all problems are reported at once."""
    checker = _Checker(file, lines, forced, strict=opt.get('strict_options') is not False)
    table = TrainingOptions if is_train else TestOptions
    given = {key: value for key, value in opt.items() if value is not None}
    opt = checker.complete(table, given)
    phases = ('train', 'val') if is_train else ('val', 'test')
    datasets = opt.get('datasets')
    for key in datasets if isinstance(datasets, dict) else ():
        path, phase = ('datasets', key), str(key).partition('_')[0]
        if phase not in phases or str(key).startswith('train_'):
            choices = 'train, val, val_<name>' if is_train else 'val, val_<name>, test, test_<name>'
            checker.add(path, f'unknown phase; the datasets here are {choices}')
        elif isinstance(datasets[key], dict):
            section = TrainDatasetOptions if key == 'train' else DatasetOptions
            datasets[key] = checker.complete(section, datasets[key], path)
    if checker.problems:
        raise OptionError('\n'.join(text for _, text in sorted(checker.problems)))
    if checker.unread:
        logger.warning(
            'Not options of the runner, left to the component that reads them: %s',
            ', '.join(checker.unread),
        )
    return opt


# ---------------------------------------------------------------------------- the whole


def parse_options(root_path: str | Path, is_train: bool = True) -> tuple[dict, argparse.Namespace]:
    """Read the command line and its option file; join the process group; seed.

    Args:
        root_path: Parent of ``experiments/`` and ``results/``.
        is_train: Whether the file describes a training or a test run.

    Returns:
        The complete options, and the flags.

    Raises:
        FileNotFoundError: No such option file or plug-in folder.
        OptionError: Everything that is wrong with the options, one line each.
    """
    args = parse_args()
    opt, lines = _load(args.opt)
    forced = _force(opt, args.force_yml, TrainingOptions if is_train else TestOptions)

    from .dist_util import from_master, get_dist_info, init_dist, launched_by_torchrun
    from .logger import get_root_logger
    from .registry import import_plugins

    launcher = args.launcher
    if launcher == 'none' and launched_by_torchrun():
        launcher = 'pytorch'
    if launcher != 'none':
        init_dist(launcher, **(opt.get('dist_params') or {}))
    get_root_logger()
    opt = _complete(opt, is_train, args.opt, lines, forced)
    opt['dist'] = launcher != 'none'
    opt['rank'], opt['world_size'] = get_dist_info()
    opt['is_train'], opt['auto_resume'] = is_train, args.auto_resume

    opt['plugins'] = [_plugin_folder(folder, args.opt) for folder in opt['plugins']]
    import_plugins(opt['plugins'])

    if opt['manual_seed'] is None:
        opt['manual_seed'] = from_master(random.SystemRandom().randint(1, 10000))
    if args.debug and not opt['name'].startswith('debug'):
        opt['name'] = f'debug_{opt["name"]}'
    opt['num_gpu'] = _usable_gpus(opt['num_gpu'])
    for key, dataset in opt['datasets'].items():
        _complete_dataset(key, dataset, opt['scale'])
    _complete_paths(opt, Path(root_path))
    if is_train and 'debug' in opt['name']:
        opt['logger'].update(print_freq=1, save_checkpoint_freq=8)
        if opt['val']:
            opt['val']['val_freq'] = 8
    _seed_process(opt)
    return opt, args


def _plugin_folder(folder: str, option_file: str) -> str:
    """Plug-in folders are looked up beside the option file first, then where the run starts."""
    beside, here = Path(option_file).parent / folder, Path(folder)
    for candidate in (beside, here):
        if candidate.expanduser().is_dir():
            return str(candidate.expanduser().resolve())
    raise FileNotFoundError(f'plugins: no folder {beside.resolve()}, nor {here.resolve()}.')


def _usable_gpus(num_gpu: int | str) -> int:
    import torch

    available = torch.cuda.device_count()
    if num_gpu == 'auto':
        return available
    if int(num_gpu) > 0 and available == 0:
        logger.warning('num_gpu is %s, but torch sees no CUDA device: running on the CPU.', num_gpu)
        return 0
    return int(num_gpu)


def _complete_dataset(key: str, dataset: dict, scale: int | None) -> None:
    dataset['phase'] = key.partition('_')[0]
    dataset['name'] = dataset['name'] or key
    if scale is not None:
        dataset['scale'] = scale
    for root in ('dataroot_gt', 'dataroot_lq'):
        if isinstance(dataset.get(root), str):
            dataset[root] = os.path.expanduser(dataset[root])
        elif isinstance(dataset.get(root), list):
            dataset[root] = [os.path.expanduser(folder) for folder in dataset[root]]


def _complete_paths(opt: dict, root: Path) -> None:
    path = opt['path']
    for key, value in path.items():
        if isinstance(value, str) and ('resume_state' in key or 'pretrain_network' in key):
            path[key] = os.path.expanduser(value)
    if opt['is_train']:
        folder = Path(path['experiments_root'] or root / 'experiments').expanduser() / opt['name']
        path['experiments_root'] = str(folder)
        path['models'] = str(folder / 'models')
        path['training_states'] = str(folder / 'training_states')
    else:
        folder = Path(path['results_root'] or root / 'results').expanduser() / opt['name']
        path['results_root'] = str(folder)
    path['log'] = str(folder)
    path['visualization'] = str(folder / 'visualization')


def _seed_process(opt: dict) -> None:
    import torch

    from .misc import set_random_seed

    set_random_seed(opt['manual_seed'] + opt['rank'])
    torch.backends.cudnn.benchmark = not opt['deterministic']
    if opt['deterministic']:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)


def dict2str(opt: dict, indent_level: int = 1) -> str:
    """Options as indented lines, for the log."""
    indent, text = '  ' * indent_level, '\n'
    for key, value in opt.items():
        if isinstance(value, dict):
            text += f'{indent}{key}:[{dict2str(value, indent_level + 1)}{indent}]\n'
        else:
            text += f'{indent}{key}: {value}\n'
    return text


def copy_opt_file(opt_file: str | Path, experiments_root: str | Path) -> None:
    """Copy the option file into the run's folder, below three lines on when and how it was used."""
    source, target = Path(opt_file), Path(experiments_root) / Path(opt_file).name
    if target.exists() and source.samefile(target):
        return
    header = f'# GENERATE TIME: {time.asctime()}\n# CMD:\n# {" ".join(sys.argv)}\n\n'
    target.write_text(header + source.read_text(encoding='utf-8'), encoding='utf-8')
