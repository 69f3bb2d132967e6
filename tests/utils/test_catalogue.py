"""The catalogue, which is read from source, says what the registries hold."""

import ast
import inspect

import pytest

from basicsr.utils import registry
from basicsr.utils.catalogue import KINDS, class_in, component, components


@pytest.mark.parametrize('kind', KINDS)
def test_it_knows_every_built_in_component_and_no_other(kind):
    entries = getattr(registry, KINDS[kind][1])
    ours = {
        name.removesuffix('_basicsr')
        for name, entry in entries
        if entry.__module__.startswith('basicsr.')
    }
    assert components(kind).keys() == ours


@pytest.mark.parametrize('kind', ['networks', 'losses'])
def test_arguments_and_defaults_are_those_of_the_signatures(kind):
    for name, entry in components(kind).items():
        signature = inspect.signature(getattr(registry, KINDS[kind][1]).get(name))
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert [a.name for a in entry.arguments] == [p.name for p in named]
        for argument, parameter in zip(entry.arguments, named, strict=True):
            if argument.default is None or argument.name == 'norm_layer':
                assert (argument.default is None) == (parameter.default is parameter.empty)
            else:
                assert ast.literal_eval(argument.default) == parameter.default


def test_a_component_has_summary_paper_and_meanings():
    edsr = component('networks', 'EDSR')
    assert edsr.summary.startswith('Enlarge images (b, num_in_ch, h, w) to')
    assert edsr.papers == ('https://arxiv.org/abs/1707.02921',)
    (scale,) = [a for a in edsr.arguments if a.name == 'upscale']
    assert (scale.type, scale.default, scale.meaning) == ('int', '4', 'A power of 2, or 3.')
    assert [a.name for a in component('metrics', 'calculate_psnr').arguments] == [
        *('crop_border', 'input_order', 'test_y_channel')
    ]


def test_arguments_that_a_base_takes_are_those_of_the_class():
    (weight, reduction) = component('losses', 'L1Loss').arguments
    assert (weight.name, weight.default, weight.meaning) == (
        *('loss_weight', '1.0', 'Factor of the loss.'),
    )
    assert reduction.meaning == "'mean', 'sum', or 'none' for the loss map."


def test_schedules_are_described_too():
    schedule = class_in('models', 'MultiStepRestartLR')
    assert [a.name for a in schedule.arguments][:2] == ['milestones', 'gamma']
    assert class_in('models', 'StepLR') is None


def test_a_near_miss_is_suggested():
    with pytest.raises(KeyError, match="no 'RRDBnet' among the networks; did you mean 'RRDBNet'"):
        component('networks', 'RRDBnet')
