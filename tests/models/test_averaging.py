"""Averages whose length is chosen after training, and normalisation layers in averages."""

import sys

import numpy as np
import pytest
import torch
from norms import with_norms
from runs import checkpoint, differences, psnr_of
from torch import nn

from basicsr import cli
from basicsr.models import build_model
from basicsr.models.averaging import PowerAverages
from basicsr.models.posthoc import (
    exponent,
    profile_products,
    shares_of_snapshots,
    snapshot_file,
    write_averages,
)
from basicsr.utils.checkpoint import load_checkpoint


class Walker(nn.Module):
    """A weight of some numbers, and a buffer that counts."""

    def __init__(self, size=64, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.register_buffer('steps', torch.tensor(0))

    def walk(self, generator):
        """A step of a random walk that drifts and settles."""
        with torch.no_grad():
            step = torch.randn(self.weight.shape, generator=generator, dtype=self.weight.dtype)
            self.weight += 0.05 * step + 0.01 * (3 - self.weight)
            self.steps += 1


def profile(time, g, end):
    return (g + 1) * time**g / end ** (g + 1)


def middles(end, count=200_000):
    """The middles of equal steps up to ``end``, and their width."""
    return (np.arange(count) + 0.5) * end / count, end / count


# ---------------------------------------------------------------------------- profiles


@pytest.mark.parametrize('length', [0.01, 0.05, 0.1, 0.2, 0.28])
def test_a_profile_has_the_length_that_it_is_made_for(length):
    time, width = middles(7)
    weights = profile(time, exponent(length), 7) * width
    mean = (weights * time).sum()
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    deviation = np.sqrt((weights * (time - mean) ** 2).sum())
    assert deviation / 7 == pytest.approx(length, rel=1e-6)


def test_exponents_are_those_of_the_paper():
    assert exponent(0.05) == pytest.approx(16.97, abs=5e-3)
    assert exponent(0.1) == pytest.approx(6.94, abs=5e-3)
    assert exponent(12**-0.5) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize('length', [0, -0.1, 0.29, float('nan')])
def test_lengths_that_no_profile_has_are_refused(length):
    with pytest.raises(ValueError, match=r'above 0 and at most 0\.2887'):
        exponent(length)


def test_products_of_profiles_are_their_integrals():
    exponents, ends = np.array([16.97, 6.94, 0.5, 0]), np.array([3.0, 5, 5, 8])
    products = profile_products(exponents[:, None], ends[:, None], exponents, ends)
    for i in range(4):
        for j in range(4):
            time, width = middles(min(ends[i], ends[j]))
            both = profile(time, exponents[i], ends[i]) * profile(time, exponents[j], ends[j])
            assert products[i, j] == pytest.approx(both.sum() * width, rel=1e-5)


def test_an_average_weighs_each_iteration_by_its_part_of_the_profile():
    net, generator = Walker(dtype=torch.float64), torch.Generator().manual_seed(0)
    lengths = [0.05, 0.1, 0.25]
    averages = PowerAverages(lengths, lambda: Walker(dtype=torch.float64))
    weights = []
    for iteration in range(1, 61):
        net.walk(generator)
        weights.append(net.weight.detach().clone())
        averages.update(net, iteration)
    borders = torch.arange(61, dtype=torch.float64) / 60
    for length, average in zip(lengths, averages.networks, strict=True):
        parts = (borders ** (exponent(length) + 1)).diff()
        expected = parts @ torch.stack(weights)
        torch.testing.assert_close(average.weight.detach(), expected, atol=1e-13, rtol=0)
        assert average.steps == 60


# ---------------------------------------------------------------------------- reconstruction


@pytest.fixture
def walk(tmp_path):
    """Store 20 snapshots of a walk; returns averages tracked directly, by length."""

    def call(others=(0.03, 0.08, 0.15, 0.2)):
        (tmp_path / 'models').mkdir()
        net, generator = Walker(), torch.Generator().manual_seed(1)
        stored, tracked = (PowerAverages(lengths, Walker) for lengths in ([0.05, 0.1], others))
        for iteration in range(1, 2001):
            net.walk(generator)
            stored.update(net, iteration)
            tracked.update(net, iteration)
            if iteration % 100 == 0:
                torch.save(stored.state_dict(), snapshot_file(tmp_path / 'models', iteration))
        return dict(zip(others, tracked.networks, strict=True)), stored

    return call


def test_other_lengths_are_put_together_from_twenty_snapshots_within_a_percent(walk, tmp_path):
    tracked, stored = walk()
    lines = write_averages(tmp_path, [*tracked, 0.05], tmp_path / 'out' / 'a.pth')
    assert len(lines) == 5
    assert 'a_0.08.pth: length 0.08 at iteration 2000, from 20 snapshots since 100' in lines[1]
    for length, net in [*tracked.items(), (0.05, stored.networks[0])]:
        state = torch.load(tmp_path / f'out/a_{length}.pth', weights_only=True)['params_ema']
        assert state['weight'].dtype == torch.float32
        assert state['steps'] == 2000
        error = (state['weight'] - net.weight).norm() / net.weight.norm()
        assert error < 0.01, length
    assert error < 1e-6  # of a stored one


def test_weights_that_do_not_move_stay_as_they_are_however_few_the_snapshots():
    for count in (2, 3, 20):
        ends = [end for end in range(1, count + 1) for _ in '12']
        for length in (0.04, 0.08, 0.12):
            shares, error = shares_of_snapshots(
                [exponent(0.05), exponent(0.1)] * count, ends, length
            )
            assert shares.sum() == pytest.approx(1, abs=1e-9)
            assert 0 < error < 0.2


def test_snapshots_that_give_no_such_average_are_refused(walk, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'no averages_\*\.pth in .*posthoc_ema'):
        write_averages(tmp_path, [0.1], 'a.pth')
    walk()
    with pytest.raises(FileNotFoundError, match=r'averages_150\.pth; there are those of 100, 200'):
        write_averages(tmp_path, [0.1], 'a.pth', 150)
    with pytest.raises(
        ValueError, match=r'with 2 snapshots; they can give the lengths: 0\.04, 0\.05'
    ):
        write_averages(tmp_path, [0.2], 'a.pth', 200)
    with pytest.raises(ValueError, match=r'length 0\.01: .* with 20 snapshots'):
        write_averages(tmp_path, [0.1, 0.01], 'a.pth')
    with pytest.raises(ValueError, match=r'at most 0\.2887'):
        write_averages(tmp_path, [0.5], 'a.pth')
    larger = PowerAverages([0.05, 0.1], lambda: Walker(65))
    torch.save(larger.state_dict(), snapshot_file(tmp_path / 'models', 100))
    with pytest.raises(ValueError, match=r'averages_100\.pth is of another network'):
        write_averages(tmp_path, [0.1], 'a.pth')
    assert not list(tmp_path.rglob('a*.pth.*'))
    assert not (tmp_path / 'a.pth').exists()


# ---------------------------------------------------------------------------- runs


def test_the_command_makes_a_network_that_a_test_takes(
    run, train_opt, monkeypatch, capsys, tmp_path
):
    plain = run(train_opt(name='plain'))
    folder = run(train_opt(train__posthoc_ema=True, logger__save_checkpoint_freq=1))
    assert differences(*(checkpoint(f, 'net_g_latest.pth') for f in (plain, folder))) == []
    files = {file.name for file in (folder / 'models').glob('averages_*')}
    assert files == {f'averages_{i}.pth' for i in range(1, 7)}

    target = tmp_path / 'average.pth'
    argv = ['basicsr', 'average', str(folder), '--length', '0.1', '--iter', '5', '-o', str(target)]
    monkeypatch.setattr(sys, 'argv', argv)
    cli.main()
    assert f'{target}: length 0.1 at iteration 5, from 5 snapshots' in capsys.readouterr().out
    made, stored = torch.load(target, weights_only=True), checkpoint(folder, 'averages_5.pth')
    assert made.pop('basicsr')['network']['type'] == 'SRVGGNetCompact'
    torch.testing.assert_close(made, {'params_ema': stored['averages'][1]}, atol=1e-6, rtol=0)

    stored_alone = tmp_path / 'stored.pth'
    torch.save({'params': stored['averages'][1]}, stored_alone)
    scores = [
        psnr_of(run, train_opt(), file, key)
        for file, key in ((target, 'params_ema'), (stored_alone, 'params'))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)

    other = str(tmp_path / 'other.pth')
    monkeypatch.setattr(sys, 'argv', [*argv[:4], '0.27', *argv[5:-1], other])
    with pytest.raises(SystemExit, match='1'):
        cli.main()
    assert 'store snapshots more often' in capsys.readouterr().err


def test_a_resume_without_the_averages_or_with_other_lengths_is_refused(run, train_opt):
    folder = run(train_opt(train__total_iter=2, train__posthoc_ema=True))
    with pytest.raises(ValueError, match=r'has the lengths \[0\.05, 0\.1\], not \[0\.1, 0\.2\]'):
        run(train_opt(train__posthoc_ema=[0.1, 0.2]), '--auto_resume')
    (folder / 'models/averages_2.pth').unlink()
    with pytest.raises(ValueError, match=r'no .*averages_2\.pth.* remove train.posthoc_ema'):
        run(train_opt(train__posthoc_ema=True), '--auto_resume')
    assert (run(train_opt(), '--auto_resume') / 'models/net_g_6.pth').is_file()


@pytest.mark.parametrize('lengths', [[0.1], [0.1, 0.1], [0.05, 0.4]])
def test_lengths_of_averages_that_cannot_be_are_refused(run, train_opt, lengths):
    with pytest.raises(ValueError, match=r'train\.posthoc_ema.* got'):
        run(train_opt(train__posthoc_ema=lengths))


# ---------------------------------------------------------------------------- normalisation


def test_averages_of_normalisation_layers_have_their_parameters_averaged_and_buffers_copied(
    train_opt, tmp_path
):
    from basicsr.utils.registry import import_plugins

    opt = with_norms(train_opt(), tmp_path)
    import_plugins([str(tmp_path)])
    swa = {'start': 1, 'every': 1, 'lr': None, 'bn_batches': 0}
    opt['train'] |= {'swa': swa, 'posthoc_ema': [0.05, 0.1]}
    model = build_model(opt | {'dist': False, 'is_train': True})
    names = [name for name, _ in model.net_g.named_parameters() if name.startswith('norms.')]
    assert {name.split('.')[1] for name in names} == {'batch', 'layer', 'instance'}
    means = {name: value.detach().clone() for name, value in model.net_g.named_parameters()}
    total = {name: torch.zeros_like(value) for name, value in means.items()}
    for iteration in range(1, 5):
        model.update_learning_rate(iteration)
        model.feed_data({'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)})
        model.optimize_parameters(iteration)
        model.update_averages(iteration)
        for name, value in model.net_g.named_parameters():
            means[name] = 0.9 * means[name] + 0.1 * value.detach()
            total[name] += value.detach()
    ema, swa, power = model.averages['g']
    assert ema.networks == [model.net_g_ema]
    for average in (*ema.networks, *swa.networks, *power.networks):
        for own, current in zip(average.buffers(), model.net_g.buffers(), strict=True):
            assert torch.equal(own, current)
    for name in names:
        assert not torch.equal(means[name], model.net_g.get_parameter(name)), name
        torch.testing.assert_close(model.net_g_ema.get_parameter(name).detach(), means[name])
        mean = swa.network.get_parameter(name).detach()
        torch.testing.assert_close(mean, total[name] / 4)


def test_an_average_says_which_network_it_is_of(run, train_opt, tmp_path):
    from basicsr.archs import load_network_from

    opt = train_opt(train__posthoc_ema=True, train__total_iter=12)
    folder = run(opt)
    write_averages(folder, [0.1], tmp_path / 'average.pth')
    net = load_network_from(tmp_path / 'average.pth')
    assert type(net).__name__ == opt['network_g']['type']
    state = torch.load(tmp_path / 'average.pth', weights_only=True)['params_ema']
    assert differences(dict(net.state_dict()), state) == []


def test_averages_are_never_written_over_a_file(run, train_opt, tmp_path):
    folder = run(train_opt(train__posthoc_ema=True))
    target = folder / 'models/averages_6.pth'
    before = target.read_bytes()
    with pytest.raises(FileExistsError, match=r'averages_6\.pth exists'):
        write_averages(folder, [0.1], target)
    assert target.read_bytes() == before
    with pytest.raises(ValueError, match='are the same file'):
        write_averages(folder, [0.1, 0.1], tmp_path / 'x.pth')
    write_averages(folder, [0.1], tmp_path / 'a.safetensors')
    write_averages(folder, [0.1], tmp_path / 'a.pth')
    both = (load_checkpoint(tmp_path / f'a.{kind}') for kind in ('safetensors', 'pth'))
    assert differences(*both) == []
    for name in ('', f'{tmp_path}/folder/'):
        with pytest.raises(ValueError, match=r'must end in \.pth or \.safetensors'):
            write_averages(folder, [0.1], name)


def test_a_resume_from_earlier_drops_averages_of_weights_that_are_given_up(run, train_opt):
    opt = train_opt(train__posthoc_ema=True)
    folder = run(opt)
    for state in ('4', '6'):
        (folder / f'training_states/{state}.state').unlink()
    run({**opt, 'train': {**opt['train'], 'total_iter': 3}}, '--auto_resume')
    names = sorted(file.name for file in (folder / 'models').glob('averages_*.pth'))
    assert names == ['averages_2.pth', 'averages_3.pth']


@pytest.mark.parametrize(
    'content',
    [
        4,
        {'params': {'w': torch.ones(2)}},
        {'lengths': [0.05], 'averages': [{'w': None}], 'buffers': []},
        {'lengths': [0.05], 'averages': [{0: torch.ones(2)}], 'buffers': []},
        {'lengths': [0.05], 'averages': [{'w': torch.ones(2, device='meta')}], 'buffers': []},
    ],
)
def test_a_file_without_averages_is_refused(tmp_path, content):
    (tmp_path / 'models').mkdir()
    torch.save(content, tmp_path / 'models/averages_5.pth')
    with pytest.raises(ValueError, match='averages_5.pth does not hold averages of train.posthoc'):
        write_averages(tmp_path, [0.05], tmp_path / 'x.pth')
