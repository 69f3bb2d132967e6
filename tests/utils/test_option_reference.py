"""Every option has its value, type and meaning."""

import pytest

from basicsr.utils.option_reference import entries, meaning
from basicsr.utils.option_tables import (
    DatasetOptions,
    Options,
    PathOptions,
    TrainingOptions,
    TrainOptions,
)
from basicsr.utils.options import OptionFile


@pytest.fixture
def read(train_opt, write):
    def read(*force, **changes):
        file = OptionFile(write(train_opt(**changes)), True, force)
        found = {'.'.join(e.path): e for e in entries(file.checked(), file.table)}
        return found, lambda key: file.origin(tuple(key.split('.')))

    return read


def test_an_option_has_value_type_meaning_and_origin(read, tmp_path):
    found, origin = read('train:total_iter=9', 'train:pixel_opt={type: L1Loss}')
    entry = found['train.total_iter']
    assert (entry.value, entry.type, entry.meaning) == (9, 'int', 'optimizer steps of the run')
    assert origin('train.total_iter') == '--force_yml'
    assert origin('train.pixel_opt.type') == '--force_yml'
    assert origin('train.warmup_iter') == 'default'
    assert found['train.optim_g.lr'].value == 1e-3
    assert found['train.optim_g.lr'].meaning.startswith('learning rate')
    assert origin('train.optim_g.lr') == f'{tmp_path}/tiny.yml:1'


def test_arguments_of_components_that_are_left_out_are_there_with_their_defaults(read):
    found, origin = read()
    assert found['network_g.act_type'].value == 'prelu'
    assert origin('network_g.act_type') == 'default'
    assert found['train.pixel_opt.loss_weight'].meaning == 'Factor of the loss.'
    assert found['train.scheduler.restart_weights'].value == (1,)
    assert found['val.metrics.psnr.input_order'].value == 'HWC'
    assert 'https://arxiv.org/abs/2107.10833' in found['network_g.type'].meaning


def test_lists_of_sections_are_taken_apart(read):
    stages = [{'iters': 3, 'gt_size': 8}, {'gt_size': [8, 16]}]
    found, _ = read(
        datasets__train__progressive=stages,
        train__losses=[{'type': 'MSELoss', 'loss_weight': 2.0}],
        train__optim_g={'type': 'Adam', 'lr': 1e-3, 'groups': [{'pattern': 'body', 'lr': 1.0}]},
    )
    assert found['datasets.train.progressive.1.gt_size'].value == [8, 16]
    assert found['datasets.train.progressive.0.iters'].meaning.startswith('length of the stage')
    assert found['train.losses.0.loss_weight'].meaning == 'Factor of the loss.'
    assert found['train.losses.0.reduction'].value == 'mean'
    assert found['train.optim_g.groups.0.lr'].value == 1.0


@pytest.mark.parametrize(
    ('table', 'path'),
    [
        *((Options, ()), (TrainingOptions, ()), (TrainOptions, ('train',))),
        *((PathOptions, ('path',)), (DatasetOptions, ('datasets', 'train'))),
    ],
)
def test_every_key_that_components_read_has_a_meaning(table, path):
    made = {'models', 'training_states', 'log', 'visualization'}  # by the program
    assert [key for key in set(table.also_known.split()) - made if not meaning((*path, key))] == []


def test_no_option_of_a_plain_file_is_without_a_meaning(read):
    percep = {'type': 'PerceptualLoss', 'layer_weights': {'conv5_4': 1}}
    found, _ = read(train__perceptual_opt=percep)
    assert found['train.perceptual_opt.layer_weights'].value == {'conv5_4': 1}
    assert [key for key, entry in found.items() if not entry.meaning] == []
