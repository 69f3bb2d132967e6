"""Choose and load the training state to resume from: --auto_resume, resume_state, rollbacks."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from basicsr.utils.checkpoint import load_checkpoint
from basicsr.utils.checkpoint_series import load_state, numbered_states
from basicsr.utils.dist_util import from_master, get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.misc import check_resume

from .agreement import check_file_of_all
from .preemption import was_begun_by_launcher

logger = logging.getLogger(__name__)


def resume(opt: dict, first_sample: int | None = None) -> tuple[dict, dict[str, Any] | None]:
    """Load the training state to resume from, if any; returns options with its paths, and it.

    ``--auto_resume`` or a restart by torchrun takes the newest intact state of this experiment;
    otherwise, and for a rollback, ``path.resume_state`` applies.

    Args:
        first_sample: After a rollback, the sample to continue with.
    """
    cause = '--auto_resume' if opt['auto_resume'] else None
    if first_sample is None and was_begun_by_launcher(opt['path']['experiments_root']):
        cause = 'Restarted by torchrun'
    chosen = choose_state(opt, cause)
    if chosen is None:
        return opt, None
    opt = deepcopy(opt)
    opt['path']['resume_state'], state = chosen
    if 'samples' not in state:
        _warn_of_1x(chosen[0], state['iter'], opt['manual_seed'])
    seed = state.get('manual_seed', opt['manual_seed'])
    if seed != opt['manual_seed']:
        logger.info('manual_seed stays %d, as in the training state.', seed)
        opt['manual_seed'] = seed
    if state['iter'] > opt['train']['total_iter']:
        raise UserError(
            f'{chosen[0]} has {state["iter"]} iterations, more than train.total_iter '
            f'{opt["train"]["total_iter"]}: raise it to continue.'
        )
    check_resume(opt, state['iter'], state.get('files', ()))
    return opt, state if first_sample is None else {**state, 'samples': first_sample}


def _warn_of_1x(file: str, iteration: int, seed: int) -> None:
    """Say what a state of BasicSR 1.x does not hold, and what takes its place."""
    logger.warning(
        'Resume: %s was written by BasicSR 1.x, which saves neither the position in the data nor '
        'random numbers nor best scores. Data and random numbers continue as in a run of this '
        'version that has reached iteration %d with manual_seed %d; best scores are recorded anew. '
        'Averages continue from params_ema of the networks.',
        *(file, iteration, seed),
    )


def load_resume_state(opt: dict) -> dict[str, Any] | None:
    """``resume`` with the interface of BasicSR 1.x, which modifies ``opt`` in place."""
    resumed, state = resume(opt)
    opt.update(resumed)
    return state


def choose_state(
    opt: Mapping[str, Any], cause: str | None = None
) -> tuple[str, dict[str, Any]] | None:
    """The file and content of the state to resume from, if any; every rank calls it, 0 decides.

    Args:
        cause: Why to take the newest intact state of the experiment, such as the flag
            --auto_resume. Without it, or without such a state, ``path.resume_state`` applies.

    Raises:
        FileNotFoundError, ValueError: The requested state, or every state of the experiment, is
            damaged or lacks a network.
    """
    found: Any = None
    if get_dist_info()[0] == 0:
        try:
            found = _choose(opt, cause)
        except (OSError, ValueError) as error:  # raised by all ranks
            found = error
    file = from_master(found[0] if isinstance(found, tuple) else found)
    if isinstance(file, Exception):
        raise file
    if file is None:
        return None
    check_file_of_all(file)
    return found or (file, load_checkpoint(file))


def _choose(opt: Mapping[str, Any], cause: str | None) -> tuple[str, dict[str, Any]] | None:
    path, problems = opt['path'], []
    folder = path['training_states']
    for file in reversed(numbered_states(folder) if cause else []):
        try:
            state = load_state(file, opt)
            if state['iter'] != int(file.stem):
                raise UserError(f'{file} is the state of iteration {state["iter"]}.')
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        if problems:
            logger.warning('%s: newer states are skipped: %s', cause, ' '.join(problems))
        logger.info('%s: resuming from %s', cause, file)
        return str(file), state
    if problems:
        raise UserError(
            f'{cause}: no state in {folder} can be resumed from: {" ".join(problems)} Restore '
            'the files from a backup; or, to start over, leave --auto_resume out: the folder of '
            'this run is then kept under another name.'
        )
    if cause:
        start = path['resume_state'] or 'starting at iteration 0'
        logger.info('%s: no state in %s; %s.', cause, folder, start)
    if not path['resume_state']:
        return None
    return path['resume_state'], load_state(path['resume_state'], opt)
