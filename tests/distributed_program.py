"""Runs several pipelines one after another inside one process group; torchrun starts it.

The argument is a JSON file: a list of {'pipeline', 'argv', 'die_after' (an iteration) or null}.
Every rank leaves the weights that it ends with in ``rank_<rank>.pth`` of the run's folder.
"""

import json
import sys
from pathlib import Path

import torch

from basicsr.models.base_model import BaseModel
from basicsr.models.sr_model import SRModel
from basicsr.test import test_pipeline
from basicsr.train import train_pipeline


class Interrupted(BaseException):
    pass


def write_weights(model):
    nets = {name: getattr(model, name, None) for name in ('net_g', 'net_d', 'net_g_ema')}
    states = {name: model.get_bare_model(net).state_dict() for name, net in nets.items() if net}
    path = model.opt['path']['experiments_root']
    torch.save(states, Path(path) / f'rank_{model.opt["rank"]}.pth')


def main(plan):
    begin, save = BaseModel.update_learning_rate, SRModel.save

    def save_and_write(self, epoch, current_iter):
        save(self, epoch, current_iter)
        if current_iter == -1:
            write_weights(self)

    SRModel.save = save_and_write
    for part in plan:

        def dying_begin(self, current_iter, *args, die_after=part['die_after']):
            if die_after is not None and current_iter > die_after:
                raise Interrupted
            begin(self, current_iter, *args)

        BaseModel.update_learning_rate = dying_begin
        sys.argv = ['program', *part['argv']]
        try:
            (train_pipeline if part['pipeline'] == 'train' else test_pipeline)(Path.cwd())
        except Interrupted:
            continue


if __name__ == '__main__':
    main(json.loads(Path(sys.argv[1]).read_text()))
