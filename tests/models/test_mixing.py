"""Samples of a batch that are mixed with each other."""

import random

import pytest
import torch
from blind import adversarial, blind
from golden import recipe
from runs import checkpoint, differences, rows

from basicsr.models import build_model
from basicsr.models.mixing import BatchMixing, cutmix, mixup
from basicsr.models.sr_model import SRModel

BOTH = {'mixup': {'prob': 0.4, 'alpha': 1.2}, 'cutmix': {'prob': 0.4, 'alpha': 0.7}}
ALWAYS = {'mixup': {'prob': 1, 'alpha': 1.2}}


def pair(count=3, height=4, width=6, scale=2):
    generator = torch.Generator().manual_seed(1)
    lq = torch.rand(count, 3, height, width, generator=generator)
    return lq, torch.rand(count, 3, scale * height, scale * width, generator=generator)


def test_mixup_is_the_weighted_sum_with_another_sample():
    lq = torch.tensor([0.0, 4.0, 8.0]).view(3, 1, 1, 1)
    mixed, gt = mixup(lq, lq.expand(3, 1, 2, 2), 0.75, 1, random.Random(0))
    assert mixed.flatten().tolist() == [1.0, 5.0, 6.0]
    assert gt.flatten(1).tolist() == [4 * [1.0], 4 * [5.0], 4 * [6.0]]
    images = pair()
    for x, y in zip(images, mixup(*images, 0.3, 2, random.Random(0)), strict=True):
        assert torch.equal(y, 0.3 * x + (1 - 0.3) * x[[2, 0, 1]])


def test_cutmix_pastes_one_rectangle_of_another_sample_into_both_images():
    for seed in range(20):
        lq, gt = pair(3, 8, 12)
        mixed, mixed_gt = cutmix(lq, gt, 0.75, 1, random.Random(seed))
        other = (mixed == lq.roll(-1, 0)).all(1)
        assert other.sum((1, 2)).tolist() == 3 * [4 * 6], 'a quarter of the area'
        rows_of_it, columns = other.any(2), other.any(1)
        assert torch.equal(other, rows_of_it[:, :, None] & columns[:, None, :])
        assert torch.equal(mixed, torch.where(other[:, None], lq.roll(-1, 0), lq))
        large = other.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None]
        assert torch.equal(mixed_gt, torch.where(large, gt.roll(-1, 0), gt))


def test_rectangles_come_everywhere_and_may_be_nothing_or_all():
    lq, gt = pair(2, 4, 4)
    seen = torch.zeros(4, 4, dtype=torch.bool)
    for seed in range(60):
        seen |= (cutmix(lq, gt, 0.75, 1, random.Random(seed))[0] != lq).any(1)[0]
    assert seen.all()
    for weight, expected in ((1.0, (lq, gt)), (0.0, (lq.flip(0), gt.flip(0)))):
        assert differences(list(cutmix(lq, gt, weight, 1, random.Random(0))), list(expected)) == []


def test_each_kind_has_its_share_of_the_batches_and_weights_of_its_distribution():
    options = {'mixup': {'prob': 0.3, 'alpha': 2.0}, 'cutmix': {'prob': 0.5, 'alpha': 1.0}}
    mixing = BatchMixing(options, 7)
    zero_one = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    plain, pasted, weights = 0, 0, []
    for iteration in range(3000):
        lq, gt = mixing(zero_one, zero_one, iteration)
        if lq is zero_one:
            plain += 1
        elif 0 < lq[0].min() < 1:
            weights.append(1 - float(lq[0, 0, 0, 0]))
        else:
            pasted += 1
        assert torch.equal(lq, gt)
    shares = [number / 3000 for number in (plain, len(weights), pasted)]
    assert shares == pytest.approx([0.2, 0.3, 0.5], abs=0.03)
    found = torch.tensor(weights)
    assert float(found.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(found.var()) == pytest.approx(1 / 20, abs=0.01), '1 / (8 alpha + 4)'


def test_what_is_done_follows_from_seed_rank_and_iteration():
    images = pair(5)
    before = [x.clone() for x in images]

    def mixed(seed=7, rank=0, iteration=1):
        return list(BatchMixing({'mixup': {'prob': 1, 'alpha': 1}}, seed, rank)(*images, iteration))

    assert differences(mixed(), mixed()) == []
    for other in ({'seed': 8}, {'rank': 1}, {'iteration': 2}):
        assert differences(mixed(), mixed(**other))
    assert differences(before, list(images)) == [], 'the batch itself is left as it is'


def test_a_batch_of_one_has_nothing_to_be_mixed_with():
    lq, gt = pair(1)
    assert BatchMixing(ALWAYS, 7)(lq, gt, 1) == (lq, gt)


def test_the_memory_layout_stays():
    lq, gt = (x.to(memory_format=torch.channels_last) for x in pair())
    for kind in (mixup, cutmix):
        for x in kind(lq, gt, 0.5, 1, random.Random(0)):
            assert x.is_contiguous(memory_format=torch.channels_last)


# models


def paired_batch():
    lq, gt = pair(3, 8, 8)
    return {'lq': lq, 'gt': gt}


def blind_batch():
    images = [recipe.det_image(f'mix/{i}', 24, 24, 3) for i in range(3)]
    kernel = torch.zeros(3, 21, 21)
    kernel[:, 10, 10] = 1
    gt = torch.stack([torch.from_numpy(img).permute(2, 0, 1).float() / 255 for img in images])
    return {'gt': gt, 'kernel1': kernel, 'kernel2': kernel, 'sinc_kernel': kernel}


@pytest.mark.parametrize(
    'model_type', ['SRModel', 'SRGANModel', 'ESRGANModel', 'RealESRNetModel', 'RealESRGANModel']
)
def test_every_model_mixes_the_batch_that_it_trains_on(train_opt, model_type):
    opt = train_opt(train__mixing=ALWAYS)
    if model_type.startswith('Real'):
        opt = blind(opt, model_type)
    elif model_type != 'SRModel':
        opt = adversarial(opt, model_type)
    model = build_model(opt | {'dist': False, 'is_train': True, 'rank': 0})
    model.update_learning_rate(5)
    model.feed_data(blind_batch() if model_type.startswith('Real') else paired_batch())
    lq, gt = model.lq, model.gt
    model.mix_batch()
    expected = BatchMixing(ALWAYS, opt['manual_seed'])(lq, gt, 5)
    assert differences([model.lq, model.gt], list(expected)) == []
    assert not torch.equal(model.lq, lq)
    model.optimize_parameters(5)
    assert model.output.shape == gt.shape


# runs


def short(train_opt, name, **overrides):
    opt = train_opt(name=name, val=None, datasets__train__batch_size_per_gpu=4, **overrides)
    del opt['datasets']['val']
    return opt


def results(folder):
    return [checkpoint(folder, name) for name in ('net_g_latest.pth', '6.state')] + rows(folder)


def losses(folder):
    return [row['losses/l_pix'] for row in rows(folder)]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize('workers', [0, 2])
def test_a_run_that_mixes_resumes_bit_for_bit(run, train_opt, monkeypatch, workers):
    options = {'train__mixing': BOTH, 'datasets__train__num_worker_per_gpu': workers}
    whole = results(run(short(train_opt, 'whole', **options)))
    step = SRModel.optimize_parameters

    def dying_step(self, current_iter):
        step(self, current_iter)
        if current_iter == 5:
            raise Interrupted

    opt = short(train_opt, 'cut', **options)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(SRModel, 'optimize_parameters', dying_step)
        run(opt)
    assert differences(whole, results(run(opt, '--auto_resume'))) == []


def test_batches_that_are_not_drawn_give_the_losses_of_the_plain_run(run, train_opt):
    """Until the first one that is mixed; without mixing, and where it is never drawn, for ever."""
    plain = run(short(train_opt, 'plain'))
    rare = run(short(train_opt, 'rare', train__mixing={'mixup': {'prob': 1e-12}}))
    assert differences(results(plain), results(rare)) == []
    mixed, iteration = losses(run(short(train_opt, 'mixed', train__mixing=BOTH))), 1
    images = pair()
    while BatchMixing(BOTH, 7)(*images, iteration)[0] is images[0]:
        iteration += 1
    assert iteration < 6
    equal = [a == b for a, b in zip(losses(plain), mixed, strict=True)]
    assert equal == [number < iteration for number in range(1, 7)]


def test_a_run_trains_on_the_mixed_batch(run, train_opt, monkeypatch):
    seen = []
    mix_batch = SRModel.mix_batch

    def watched(self):
        before = self.lq, self.gt
        mix_batch(self)
        seen.append((before, (self.lq, self.gt)))

    monkeypatch.setattr(SRModel, 'mix_batch', watched)
    opt = short(train_opt, 'seen', train__mixing=BOTH, train__total_iter=4)
    run(opt)
    for iteration, (before, after) in enumerate(seen, 1):
        assert differences(list(BatchMixing(BOTH, 7)(*before, iteration)), list(after)) == []


def test_bytes_parts_and_half_precision_are_mixed_as_well(run, train_opt):
    plain = losses(run(short(train_opt, 'plain', train__mixing=BOTH)))
    bytes_ = short(train_opt, 'bytes', train__mixing=BOTH, datasets__train__uint8_batch=True)
    assert losses(run(bytes_)) == plain
    parts = short(train_opt, 'parts', train__mixing=BOTH, train__accumulate=2)
    assert losses(run(parts)) == pytest.approx(plain, rel=1e-4)
    half = short(train_opt, 'half', train__mixing=BOTH, train__amp='bf16')
    assert losses(run(half)) == pytest.approx(plain, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='asks whether a GPU is waited for')
def test_mixing_does_not_wait_for_the_gpu():
    lq, gt = (x.cuda() for x in pair())
    expected = [BatchMixing(BOTH, 7)(*pair(), iteration) for iteration in range(20)]
    torch.cuda.set_sync_debug_mode('error')
    try:
        mixed = [BatchMixing(BOTH, 7)(lq, gt, iteration) for iteration in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode('default')
    for ours, theirs in zip(mixed, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=0, atol=1e-6)
