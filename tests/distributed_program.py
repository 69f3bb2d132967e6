"""Runs several pipelines one after another inside one process group; torchrun starts it.

The argument is a JSON file: a list of {'pipeline', 'argv', 'die_after' (an iteration) or null}.
"""

import json
import sys
from pathlib import Path

from basicsr.models.sr_model import SRModel
from basicsr.test import test_pipeline
from basicsr.train import train_pipeline


class Interrupted(BaseException):
    pass


def main(plan):
    step = SRModel.optimize_parameters
    for part in plan:

        def dying_step(self, current_iter, die_after=part['die_after']):
            step(self, current_iter)
            if current_iter == die_after:
                raise Interrupted

        SRModel.optimize_parameters = dying_step
        sys.argv = ['program', *part['argv']]
        try:
            (train_pipeline if part['pipeline'] == 'train' else test_pipeline)(Path.cwd())
        except Interrupted:
            continue


if __name__ == '__main__':
    main(json.loads(Path(sys.argv[1]).read_text()))
