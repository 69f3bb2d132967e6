"""Trainings of every model, with every kind of state, killed again and again at random moments."""

import json
from pathlib import Path

import small_run
from blind import adversarial, blind
from tally import Budget, Tally

from basicsr.cli import parse
from basicsr.commands import verify_resume

KILLS = 8  # of one training
ITERATIONS = 24


def run(folder: Path, budget: Budget) -> list[Tally]:
    """Train in one go and with kills (SIGKILL), and compare all files."""
    tallies = []
    for case in budget.cases(len(TRAININGS)):
        what, change = list(TRAININGS.items())[case]
        tally = Tally(f'{what}: killed', 'all files equal an undisturbed run, bit for bit')
        tallies.append(tally)
        place = folder / str(case)
        place.mkdir()
        opt = small_run.options(place, 'run')
        processes = change(opt) or 1
        (place / 'x.yml').write_text(json.dumps(opt))
        flags = ['-opt', str(place / 'x.yml'), '--iters', str(ITERATIONS), '--save-every', '3']
        flags += ['--kills', str(KILLS), '--seed', str(case), '--nproc', str(processes)]
        for kill, problem in enumerate(_problems(parse(['verify-resume', *flags]), place)):
            tally.record(not problem, f'{" ".join(flags)}, kill {kill}: {problem}')
    return tallies


def _problems(args, place):
    """Of each kill that came in time, what differed in the end."""
    told = []
    try:
        status = verify_resume.verify(args, place, told.append)
    except verify_resume.TrainingError as error:
        status, told = 1, [*told, str(error)[-2000:]]
    in_time = sum(line.startswith('kill') and 'after iteration' in line for line in told)
    return [told[-1] if status else ''] * max(in_time, 1)


def _workers(opt):
    opt['datasets']['train'] |= {'num_worker_per_gpu': 2, 'cache': 'auto', 'prefetch_mode': 'cpu'}


def _averages(opt):
    opt['train']['swa'] = {'start': 6, 'every': 2}
    opt['train']['posthoc_ema'] = True


def _stages(opt):
    stages = [{'iters': 7, 'gt_size': [8, 24]}, {'gt_size': 12, 'batch_size_per_gpu': 1}]
    opt['datasets']['train']['progressive'] = stages
    opt['train']['mixing'] = {'mixup': {'prob': 0.5}, 'cutmix': {'prob': 0.5}}


def _parts(opt):
    opt['train'] |= {'accumulate': 2, 'clip_grad_norm': 0.1}
    opt['train']['scheduler'] = {'type': 'CosineAnnealingLR', 'T_max': ITERATIONS}


def _bf16(opt):
    opt['train']['amp'] = 'bf16'


def _schedule_free(opt):
    opt['train']['optim_g'] = {'type': 'schedulefree:AdamWScheduleFree', 'lr': 1e-3}
    opt['train'] |= {'warmup_iter': 5, 'ema_decay': 0}


def _lbfgs(opt):
    opt['train']['optim_g'] = {'type': 'LBFGS', 'lr': 0.5, 'max_iter': 3}
    opt['train']['ema_decay'] = 0


def _several(change):
    def changed(opt):
        change(opt)
        return 2

    return changed


def _esrgan(opt):
    adversarial(opt, 'ESRGANModel')['train']['net_d_iters'] = 2


def _realesrgan(opt):
    blind(opt, 'RealESRGANModel')
    opt |= {'queue_size': 4, 'log_recipes': True}
    opt['datasets']['train']['num_worker_per_gpu'] = 2


def _realesrnet(opt):
    blind(opt)
    opt |= {'queue_size': 4, 'log_recipes': True}


TRAININGS = {
    'SRModel': lambda opt: None,
    'SRModel, two loader processes': _workers,
    'SRModel, averages of weights': _averages,
    'SRModel, stages and mixed batches': _stages,
    'SRModel, gradients in parts': _parts,
    'SRModel, bf16': _bf16,
    'SRModel, schedule-free': _schedule_free,
    'SRModel, LBFGS': _lbfgs,
    'SRGANModel': lambda opt: adversarial(opt) and None,
    'ESRGANModel': _esrgan,
    'RealESRNetModel': _realesrnet,
    'RealESRGANModel': _realesrgan,
    'SRModel, two ranks': _several(_workers),
    'RealESRGANModel, two ranks': _several(_realesrgan),
}
