"""Rules that every file of the package keeps: who imports whom, and what is not done."""

import ast
import re
import sys
from collections import defaultdict
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import basicsr
from basicsr.archs import build_network
from basicsr.data import build_dataset
from basicsr.losses import build_loss
from basicsr.metrics import calculate_metric
from basicsr.models import build_model
from basicsr.run.program import prepare

PACKAGE = Path(basicsr.__file__).parent
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob('*.py'))}
TREES = {name: ast.parse(file.read_text(encoding='utf-8')) for name, file in FILES.items()}

# What the files of a sub-package may import from the others.
LAYERS = {
    'utils': {'version'},
    'ops': {'utils'},
    'data': {'utils'},
    'archs': {'utils', 'ops'},
    'losses': {'utils', 'archs'},
    'metrics': {'utils', 'archs'},
    'models': {'utils', 'data', 'archs', 'losses', 'metrics'},
    'run': {'utils', 'data', 'metrics', 'models'},
    'train.py': {'utils', 'data', 'models', 'run'},
    'test.py': {'utils', 'data', 'models', 'run'},
    'commands': {'utils', 'data', 'models', 'run', 'train', 'test'},
    'cli.py': {'commands', 'version'},
    '__main__.py': {'cli'},
    'version.py': set(),
    '__init__.py': set(),
}

# Distributions whose modules have another name.
MODULE_OF = {'opencv-python': 'cv2', 'pyyaml': 'yaml'}
IMPORTED_WHERE_USED = {'lmdb', 'wandb', 'tensorboard', 'matplotlib'}


def layer_of(name):
    return name.partition('/')[0]


def imports(tree):
    """(node, absolute or dotted name) of all imports in a file; ``from . import x`` is '.'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, '.' * node.level + (node.module or '')


def imports_on_import(tree):
    """The imports that are made when the file itself is imported."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If):
            yield from imports(node)


def calls(tree):
    """(node, dotted name) of all calls of names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def in_files(wrong):
    """``file:line: what`` of everything that ``wrong`` finds in a tree."""
    return [
        f'{name}:{node.lineno}: {what}'
        for name, tree in TREES.items()
        for node, what in wrong(tree)
    ]


# imports


@pytest.mark.parametrize('layer', LAYERS)
def test_imports_point_down(layer):
    used = defaultdict(list)
    for name, tree in TREES.items():
        for _, module in imports(tree) if layer_of(name) == layer else ():
            if module.startswith('basicsr'):
                used[module.split('.')[1]].append(name)
    upward = {target: names for target, names in used.items() if target not in LAYERS[layer]}
    assert upward == {}


def test_no_file_imports_itself_by_way_of_others():
    """Imports within functions count as well."""
    modules = {'basicsr.' + name.removesuffix('.py').replace('/', '.') for name in FILES}
    graph = {}
    for name, tree in TREES.items():
        own = 'basicsr.' + name.removesuffix('.py').replace('/', '.')
        package = own.rpartition('.')[0]
        found = set()
        for node, module in imports(tree):
            module = package + module if module.startswith('.') else module
            module = module.removesuffix('.')
            names = [alias.name for alias in node.names]
            found |= {module, f'{module}.__init__', *(f'{module}.{name}' for name in names)}
        # A package's __init__ is what a name of the package comes from, if no file has that name.
        graph[own] = (found & modules) - {own}

    def cycle(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module]):
            if found := cycle(target, [*path, module]):
                return found
        done.add(module)
        return []

    done = set()
    assert list(filter(None, (cycle(module, []) for module in sorted(graph)))) == []


def test_every_file_belongs_to_a_layer():
    assert {'utils/options.py', 'models/sr_model.py', 'train.py'} <= TREES.keys()
    assert {layer_of(name) for name in FILES} <= LAYERS.keys()


def test_files_of_one_package_import_each_other_relatively_and_others_absolutely():
    for name, tree in TREES.items():
        for _, module in imports(tree):
            assert not module.startswith(('..', f'basicsr.{layer_of(name)}.')), (name, module)
            if '/' not in name and name != '__init__.py':
                assert not module.startswith('.'), (name, module)


def test_files_import_only_what_is_required_to_be_installed():
    text = (PACKAGE.parent / 'requirements.txt').read_text()
    required = {re.split(r'[<>=~;\[ ]', line)[0] for line in text.split('\n') if line.strip()}
    known = {MODULE_OF.get(name, name) for name in required} - IMPORTED_WHERE_USED
    for name, tree in TREES.items():
        for _, module in imports_on_import(tree):
            top = module.partition('.')[0]
            assert top in known | sys.stdlib_module_names | {'basicsr', ''}, (name, module)


PROBE = """
import importlib, logging, multiprocessing, os, pkgutil, random, sys, threading, warnings
import numpy as np
import torch

def state():
    return {
        'python': random.getstate(),
        'numpy': str(np.random.get_state()),
        'torch': torch.get_rng_state().tolist(),
        'numpy errors': np.geterr(),
        'handlers': list(logging.getLogger().handlers),
        'levels': (logging.getLogger().level, logging.getLogger('basicsr').level),
        'threads': (torch.get_num_threads(), threading.active_count()),
        'cudnn': (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        'default dtype': torch.get_default_dtype(),
        'start method': multiprocessing.get_start_method(allow_none=True),
        'files': os.listdir('.'),
        'environment': dict(os.environ),
        'path': list(sys.path),
    }

import cv2, scipy, torchvision, tqdm, yaml, pydantic  # have effects of their own
before = state()
import basicsr
for module in pkgutil.walk_packages(basicsr.__path__, 'basicsr.'):
    importlib.import_module(module.name)
after = state()
print([key for key in before if before[key] != after[key]])
"""


def test_importing_every_module_has_no_effect(run_program):
    result = run_program('-W', 'error', '-c', PROBE)
    assert (result.stdout, result.stderr) == ('[]\n', '')


@pytest.mark.parametrize(
    'module',
    ['basicsr', 'basicsr.cli', 'basicsr.commands.tune', 'basicsr.utils', 'basicsr.utils.options'],
)
def test_what_answers_help_is_imported_without_torch(run_program, module):
    code = f'import sys, {module}; print({{"torch", "cv2", "scipy", "numpy"}} & set(sys.modules))'
    assert run_program('-c', code).stdout == 'set()\n'


# what is not done


def test_devices_come_from_options_or_tensors():
    assert in_files(lambda tree: [c for c in calls(tree) if c[1].endswith('.cuda')]) == []


def test_nothing_is_printed_and_no_text_is_executed():
    names = {'print', 'eval', 'exec', 'compile', 'os.system'}
    assert in_files(lambda tree: [c for c in calls(tree) if c[1] in names]) == []


def test_files_are_loaded_without_running_what_they_hold():
    def unsafe(tree):
        for node, name in imports(tree):
            names = [alias.name for alias in node.names]
            if name in ('pickle', 'dill', 'joblib', 'marshal') and names != ['UnpicklingError']:
                yield node, name
        for node, name in calls(tree):
            options = {k.arg: getattr(k.value, 'value', None) for k in node.keywords}
            if name == 'torch.load' and options.get('weights_only') is not True:
                yield node, 'torch.load without weights_only=True'
            if name == 'np.load' and options.get('allow_pickle'):
                yield node, 'allow_pickle'
            if name in ('yaml.unsafe_load', 'yaml.full_load'):
                yield node, name

    assert in_files(unsafe) == []


def test_no_error_is_caught_without_saying_which():
    def bare(tree):
        return [
            (n, 'except:')
            for n in ast.walk(tree)
            if isinstance(n, ast.ExceptHandler) and not n.type
        ]

    assert in_files(bare) == []


# options


def test_options_stay_as_they_are_whatever_is_built_from_them(train_opt, run, monkeypatch):
    options = {}

    def keep(root_path, is_train=True):
        opt, args = prepare(root_path, is_train)
        options.update(opt)
        return opt, args

    monkeypatch.setattr('basicsr.train.prepare', keep)
    run(train_opt(train__total_iter=1))
    before = deepcopy(options)
    image = torch.rand(16, 16).mul(255).numpy()
    for _ in range(2):
        for dataset in options['datasets'].values():
            assert build_dataset(dataset)[0]
        build_network(options['network_g'])
        build_loss(options['train']['pixel_opt'])
        metric = options['val']['metrics']['psnr']
        assert calculate_metric({'img': image, 'img2': image}, metric) == float('inf')
        model = build_model(options)
        assert model.opt == before
    assert options == before
