"""Startup and signal handling of DataLoader worker processes."""

import importlib
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np


def worker_init_fn(
    worker_id: int, num_workers: int, rank: int, seed: int, modules: Sequence[str] = ()
) -> None:
    """Prepare a worker process: seeds, signals, a single thread, the user's plug-ins."""
    worker_seed = num_workers * rank + worker_id + seed
    random.seed(worker_seed)
    np.random.seed(worker_seed % 2**32)
    heed_parent_alone()
    from basicsr.utils.img_util import cv2

    cv2.setNumThreads(0)
    for module in modules:
        importlib.import_module(module)


def heed_parent_alone() -> None:
    """Let a loader's worker exit only when its parent asks it to or is gone.

    Signals from Ctrl-C in a terminal, torchrun and SLURM reach all processes of a run. The parent
    still needs its workers until its state is saved.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, 'SIGUSR1'):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    parent = multiprocessing.parent_process()  # os.getppid() may be a fork server
    if parent is None:
        return
    if hasattr(signal, 'sigwaitinfo'):  # not on macOS and Windows
        # Blocked in all threads, the signal stays pending for the thread that can see its sender.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_at_request, args=(parent.pid,), daemon=True).start()
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _end_at_request(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
