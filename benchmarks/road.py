"""How much of the package runs from the quickstart's option file to its first optimizer step.

Counted are the distinct lines of functions, and the files and functions that they stand in; lines
that run when a module or a class is defined are left out. This is what a reader has to follow.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from .measure import Result, Row
from .photos import ROOT

PROGRAM = """
import json, sys, threading
from pathlib import Path

import basicsr
from torch.optim.optimizer import register_optimizer_step_post_hook
from basicsr.train import train_pipeline

package, lines = str(Path(basicsr.__file__).parent), set()

class Done(BaseException):
    pass

def stop(*_):
    sys.settrace(None)
    raise Done

def trace(frame, event, _):
    code = frame.f_code
    inside = code.co_filename.startswith(package)
    if not inside or code.co_name == '<module>' or not code.co_flags & 1:  # no fast locals: a class
        return None
    function = code.co_filename[len(package) + 1:], code.co_qualname
    def line(frame, event, _):
        if event == 'line':
            lines.add((*function, frame.f_lineno))
        return line
    return line

register_optimizer_step_post_hook(stop)
sys.settrace(trace)
try:
    train_pipeline(Path(sys.argv.pop(1)))
except Done:
    pass
print(json.dumps(sorted(lines)), file=sys.__stdout__)
"""
OPTIONS = (
    'datasets:train:num_worker_per_gpu=0',
    'datasets:train:cache=off',
    'logger:use_tb_logger=false',
)


def measure(folder: Path, quick: bool) -> Result:
    """One run up to its first step."""
    options = ('-opt', 'options/quickstart.yml', '--force_yml', *OPTIONS)
    output = subprocess.run(
        [sys.executable, '-c', PROGRAM, str(folder), *options],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    lines = json.loads(output.splitlines()[-1])
    files = Counter(file for file, _, _ in lines)
    functions = {(file, name) for file, name, _ in lines}
    rows = [
        Row('files', len(files), '', goal=('<=', 25)),
        Row('functions', len(functions), ''),
        Row('lines', len(lines), '', goal=('<=', 800)),
    ]
    return Result(rows, dict(files.most_common()))
