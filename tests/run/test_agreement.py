"""What the ranks of a run have to share, with the answers of other ranks made up."""

import copy
import logging
from types import SimpleNamespace

import pytest

from basicsr.run import agreement
from basicsr.run.agreement import (
    check_file_of_all,
    check_same_data,
    check_same_options,
    warn_of_other_programs,
)
from basicsr.utils.options import OptionError

OPT = {
    'scale': 2,
    'path': {'experiments_root': '/a'},
    'datasets': {'train': {'dataroot_gt': '/a/gt', 'gt_size': 32, 'num_worker_per_gpu': 2}},
}


@pytest.fixture
def others(monkeypatch):
    """Have the other ranks answer with what a function makes of this one's answer."""

    def answer(*functions):
        monkeypatch.setattr(agreement, 'get_dist_info', lambda: (0, 1 + len(functions)))
        change = [lambda value: value, *functions]
        monkeypatch.setattr(
            agreement, 'gather_lists', lambda own: [f(copy.deepcopy(own[0])) for f in change]
        )

    return answer


def test_options_that_differ_are_named_with_their_ranks(others):
    others(lambda own: own, lambda own: {**own, 'scale': '4', 'auto_resume': 'True'})
    with pytest.raises(OptionError) as error:
        check_same_options(OPT, auto_resume=False)
    assert 'scale: rank 0, 1: 2; rank 2: 4\n' in str(error.value)
    assert 'auto_resume: rank 0, 1: False; rank 2: True\n' in str(error.value)


def test_options_that_only_one_rank_has_are_named(others):
    others(lambda own: {**own, 'train.amp': "'bf16'"})
    with pytest.raises(OptionError, match=r"train\.amp: rank 0: nothing; rank 1: 'bf16'"):
        check_same_options(OPT)


def test_where_things_are_may_differ(others):
    asked = {}
    others(lambda own: asked.update(own) or own)
    check_same_options(OPT)
    assert asked == {'scale': '2', 'datasets.train.gt_size': '32'}


def test_one_process_agrees_with_itself(tmp_path):
    check_same_options(OPT)
    check_same_data({'val': SimpleNamespace()})
    check_file_of_all(tmp_path / 'missing: is told by who reads it')


def test_another_code_or_torch_is_a_warning(others, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('basicsr'), 'propagate', True)
    others(lambda own: {**own, 'torch': '1.0', 'the code of basicsr': 'abc'})
    warn_of_other_programs()
    text = caplog.text
    assert 'differ in torch (rank 0: ' in text
    assert 'rank 1: 1.0)' in text
    assert 'differ in the code of basicsr (' in text
    assert 'numpy' not in text


class Images:
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)


def digest(paths):
    return agreement._contents(Images(paths))


def test_the_same_files_in_another_folder_are_the_same_data():
    assert digest(['/a/1.png', '/a/2.png']) == digest(['/b/1.png', '/b/2.png'])
    assert digest(['/a/1.png', '/a/2.png']) != digest(['/a/2.png', '/a/1.png'])
    assert digest([{'lq_path': '1', 'gt_path': '2'}]) != digest([{'lq_path': '1', 'gt_path': '3'}])
    assert agreement._contents(iter(())) == (None, '')


def test_of_a_million_files_some_are_looked_at():
    class Many(Images):
        looked = 0

        def __len__(self):
            return 10**6

    class Paths:
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            Many.looked += 1
            return f'{index}.png'

    agreement._contents(Many(Paths()))
    assert 500 < Many.looked <= 1000


def test_other_data_are_an_error(others):
    data = {'val': Images(['1.png', '2.png'])}

    def has(*paths):
        told = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, '_differing', lambda own: told.update(own) or {})
            check_same_data({'val': Images(paths)})
        return told

    others(lambda own: own)
    check_same_data(data)
    fewer, another = has('1.png'), has('1.png', '3.png')
    others(lambda own: fewer)
    with pytest.raises(ValueError, match='dataset val: the number of images .* 0: 2; rank 1: 1'):
        check_same_data(data)
    others(lambda own: another)
    with pytest.raises(ValueError, match='dataset val: .* names of its 2 images differs'):
        check_same_data(data)


def test_a_state_that_one_host_lacks_is_an_error(others, tmp_path):
    others(lambda own: own, lambda own: (False, 'node7'))
    file = tmp_path / '4.state'
    file.touch()
    with pytest.raises(FileNotFoundError, match=r'4\.state does not exist on rank 2 \(node7\)'):
        check_file_of_all(file)
