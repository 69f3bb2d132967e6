"""Networks split over two processes on gloo: they train as whole ones, and write the same files."""

import shutil

import pytest
import torch
import torch.distributed as dist
from blind import adversarial
from runs import checkpoint, differences, log_text, rows

from basicsr.models import build_model
from basicsr.models.networks import build_sharding

CHAIN = {'type': 'MSRResNet', 'num_feat': 4, 'num_block': 2, 'upscale': 2}
SHARDED = {'train__sharding': 'fsdp'}

NORMED = """
from torch import nn

from basicsr.utils.registry import ARCH_REGISTRY


@ARCH_REGISTRY.register()
class NormedNet(nn.Module):
    def __init__(self, upscale):
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(2)]
        self.body = nn.Sequential(*blocks)
        self.up = nn.Upsample(scale_factor=upscale)

    def forward(self, x):
        return self.up(x + self.body(x))
"""


def ranks(folder):
    return [torch.load(folder / f'rank_{rank}.pth', weights_only=True) for rank in (0, 1)]


def assert_same_files(a, b, atol=0.0, scores=True):
    """Names, keys, plain tensors; the losses and scores on the way. Exact unless ``atol`` is given.

    Of the states the last one.
    """
    names = sorted(file.name for file in (a / 'models').iterdir())
    assert names == sorted(file.name for file in (b / 'models').iterdir())
    last = max((file.name for file in (a / 'training_states').iterdir()), key=lambda n: int(n[0]))
    for name in (*names, last):
        ours, theirs = (checkpoint(folder, name) for folder in (a, b))
        if atol:
            for content in (ours, theirs):
                content.pop('files', None)  # hashes of what is only close
            assert_close(ours, theirs, atol, name)
        else:
            assert differences(ours, theirs) == [], name
    for ours, theirs in zip(rows(a), rows(b), strict=True):
        for key in ours.keys() | theirs.keys():
            if scores or not key.startswith('metrics/'):
                assert ours[key] == pytest.approx(theirs[key], rel=100 * atol, abs=atol), key


def assert_close(a, b, atol, where):
    """Equal values in nested ones, but for so much in tensors."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, atol=atol, rtol=0, msg=lambda text: f'{where}: {text}')
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a.keys() - {'fused'}:  # torch has fewer fused optimizers for shards
            assert_close(a[key], b[key], atol, f'{where}/{key}')
    elif isinstance(a, list):
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_close(*pair, atol, f'{where}/{index}')
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=100 * atol), where
    else:
        assert a == b, where


NORMED_NET = {'network_g': {'type': 'NormedNet', 'upscale': 2}, 'plugins': ['.']}
KINDS = {
    'plain': {},
    'parts': {'train__accumulate': 2, 'train__clip_grad_value': 1e-3, 'train__amp': 'bf16'}
    | {'train__ema_decay': 0, 'train__checkpoint_activations': True},
    'scaled': {'train__amp': 'fp16', 'train__clip_grad_norm': 1e-2}
    | {'train__optim_g': {'type': 'SGD', 'lr': 0.1, 'momentum': 0.9}},
    'compiled': {'train__compile': {'backend': 'eager'}, 'train__norms': 'frozen', **NORMED_NET},
    'normed': NORMED_NET,
    'gan': {'train__accumulate': 2, 'train__net_d_iters': 2, 'train__ldl_opt': {'type': 'L1Loss'}},
}


@pytest.mark.slow
def test_shards_train_validate_and_resume_as_whole_networks_do(
    run, train_in_two, two_val_opt, tmp_path
):
    """As DistributedDataParallel within 1e-6, as one process with twice the batch within 1e-5.

    A run goes on from its own files bit for bit, and from those of any other kind of run.
    """
    (tmp_path / 'normed_arch.py').write_text(NORMED)

    def opt(kind, name, **more):
        options = {'train__total_iter': 3, 'network_g': CHAIN, **KINDS[kind], **more}
        made = two_val_opt(name=f'{kind}_{name}', **options)
        made['datasets']['train']['dataset_enlarge_ratio'] = 2
        if kind not in ('plain', 'parts', 'normed'):
            made['val'] = None
        if kind == 'gan':
            adversarial(made)
        return made

    batch = {'datasets__train__batch_size_per_gpu': 4}
    one = run(opt('plain', 'one', **batch))
    stopped = [(kind, stop) for kind in ('plain', 'normed', 'gan') for stop in (2, None)]
    folder = train_in_two(
        *((opt(kind, 'ddp'), None) for kind in KINDS),
        *((opt(kind, 'fsdp', **SHARDED), None) for kind in KINDS),
        *((opt(kind, 'cut', **SHARDED), stop) for kind, stop in stopped),
        (opt('scaled', 'changed'), 2),
        (opt('scaled', 'changed', **SHARDED), None),
    )
    for kind in KINDS:
        # With DistributedDataParallel ranks validate with running statistics of their own.
        two = (folder / f'{kind}_{name}' for name in ('fsdp', 'ddp'))
        assert_same_files(*two, 1e-6, scores=kind != 'normed')
    for kind, _ in stopped[::2]:
        assert_same_files(folder / f'{kind}_fsdp', folder / f'{kind}_cut')
    assert_same_files(folder / 'scaled_changed', folder / 'scaled_ddp', 1e-6)

    weights = checkpoint(one, 'net_g_3.pth')['params'].values()
    total = sum(value.numel() for value in weights)
    for network in ('net_g', 'net_g_ema'):
        shares = [rank[network] for rank in ranks(folder / 'plain_fsdp')]
        assert sum(shares) == total
        assert max(shares) < 0.6 * total

    ignored = shutil.ignore_patterns('3.state', '*_3.pth')
    shutil.copytree(folder / 'plain_fsdp', folder / 'plain_alone', ignore=ignored)
    alone = run(opt('plain', 'alone', **batch, **SHARDED), '--auto_resume')
    assert 'resuming from' in log_text(alone)
    assert log_text(alone).count('train.sharding has no effect: this is the only process.') == 1
    for folder_of_two in (folder / 'plain_fsdp', alone):
        assert_same_files(folder_of_two, one, 1e-5)


@pytest.fixture
def alone_in_a_group(monkeypatch):
    """A process group of this process, as torchrun makes one."""
    for name, value in {'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1'}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'train__channels_last': True}, 'channels_last'),
        ({'train__optim_g': {'type': 'LBFGS', 'lr': 1}}, 'LBFGS needs whole tensors'),
        ({'train__optim_g': {'type': 'Rprop', 'lr': 1e-3}}, 'Rprop needs whole tensors'),
    ],
)
def test_what_does_not_go_with_shards_is_refused(options, message, train_opt, alone_in_a_group):
    opt = train_opt(**SHARDED, **options) | {'dist': True, 'is_train': True}
    with pytest.raises(ValueError, match=f'train.sharding.*{message}'):
        build_model(opt)


def test_several_gpus_in_one_process_are_refused():
    opt = {'dist': False, 'num_gpu': 2, 'train': {'sharding': 'fsdp'}}
    with pytest.raises(ValueError, match=r'one process per GPU.*--nproc_per_node=2'):
        build_sharding(opt, torch.device('cpu'))
