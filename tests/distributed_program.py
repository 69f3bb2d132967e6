"""Runs several pipelines one after another inside one process group; torchrun starts it.

The argument is a JSON file: a list of {'pipeline', 'argv', 'die_after' (an iteration) or null}, and
'draw': false to leave out the pictures at the end.
Every rank leaves the weights that it ends with in ``rank_<rank>.pth`` of the run's folder, of a
sharded run how many numbers it keeps of each network, and how often DDP averaged gradients.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import basicsr.train
from basicsr.models.base_model import BaseModel
from basicsr.models.sr_model import SRModel
from basicsr.run.program import close_process_group
from basicsr.test import test_pipeline
from basicsr.train import train_pipeline


class Interrupted(BaseException):
    pass


def write_weights(model):
    nets = {name: getattr(model, name, None) for name in ('net_g', 'net_d', 'net_g_ema')}
    states = {name: model.get_bare_model(net).state_dict() for name, net in nets.items() if net}
    for average in model.averages['g']:
        if average.key == 'params_swa':
            states['swa'] = average.weights.state_dict()
    if model.sharding:  # a rank has parts of weights, and no hook of DDP counts
        states = {name: sum(map(kept, net.parameters())) for name, net in nets.items() if net}
    states['reductions'] = model.reductions
    path = model.opt['path']['experiments_root']
    torch.save(states, Path(path) / f'rank_{model.opt["rank"]}.pth')


def kept(parameter):
    return parameter.to_local().numel()


def count_and_reduce(model, bucket):
    model.reductions += 1
    return allreduce_hook(None, bucket)


def main(plan):
    begin, save, move = BaseModel.update_learning_rate, SRModel.save, BaseModel.model_to_device

    def save_and_write(self, epoch, current_iter):
        save(self, epoch, current_iter)
        if current_iter == -1:
            write_weights(self)

    def move_and_count(self, net):
        net = move(self, net)
        if isinstance(net, DistributedDataParallel):
            net.register_comm_hook(self, count_and_reduce)
        return net

    BaseModel.reductions, draw = 0, basicsr.train.draw_results
    BaseModel.model_to_device = move_and_count
    SRModel.save = save_and_write
    for part in plan:

        def dying_begin(self, current_iter, *args, die_after=part['die_after']):
            if die_after is not None and current_iter > die_after:
                raise Interrupted
            begin(self, current_iter, *args)

        BaseModel.update_learning_rate = dying_begin
        basicsr.train.draw_results = draw if part.get('draw', True) else lambda *_: None
        sys.argv = ['program', *part['argv']]
        try:
            (train_pipeline if part['pipeline'] == 'train' else test_pipeline)(Path.cwd())
        except Interrupted:
            continue


if __name__ == '__main__':
    main(json.loads(Path(sys.argv[1]).read_text()))
    close_process_group()  # as the command does: threads of it would outlive the interpreter
