import pytest

from basicsr.utils.plot_util import (
    read_data_from_tensorboard,
    read_data_from_txt_1v,
    read_data_from_txt_2v,
    smooth_data,
)

LOG = """2026-01-01 INFO: Start training
2026-01-01 INFO: [iter:     900, lr:(1.000e-04,)] l_pix: 2.5000e-02 l_percep: 1.0
2026-01-01 INFO: [iter:   1,000, lr:(1.000e-04,)] l_pix: 1.5000e-02 l_percep: 2.0
"""


@pytest.fixture
def log(tmp_path):
    (tmp_path / 'train.log').write_text(LOG)
    return tmp_path / 'train.log'


def test_steps_and_values_are_read_from_a_text_log(log):
    pattern = r'iter: *([\d,]+),.* l_pix: (\S+)'
    assert read_data_from_txt_2v(log, pattern) == ([900, 1000], [0.025, 0.015])
    assert read_data_from_txt_2v(str(log), pattern, True) == ([901, 1001], [0.025, 0.015])


def test_values_alone_are_read_from_a_text_log(log):
    assert read_data_from_txt_1v(log, r'l_percep: (\S+)') == [1.0, 2.0]
    assert read_data_from_txt_1v(log, r'l_gan: (\S+)') == []


def test_a_pattern_of_other_groups_is_refused(log):
    with pytest.raises(ValueError, match=r"'l_pix' must have 1 group\(s\), it has 0"):
        read_data_from_txt_1v(log, 'l_pix')


def test_all_values_of_a_scalar_are_read_from_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in range(11000):  # TensorBoard itself keeps 10,000
        writer.add_scalar('losses/l_pix', step / 2, step)
    writer.close()
    steps, values = read_data_from_tensorboard(tmp_path, 'losses/l_pix')
    assert steps == list(range(11000))
    assert values == [step / 2 for step in range(11000)]
    with pytest.raises(KeyError, match="no scalar 'l_pix'.* It has: losses/l_pix"):
        read_data_from_tensorboard(str(tmp_path), 'l_pix')


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='no file or folder .*gone'):
        read_data_from_tensorboard(tmp_path / 'gone', 'x')


def test_smoothing_is_an_exponential_moving_average():
    assert smooth_data([1, 2, 4], 0.5) == [1, 1.5, 2.75]
    assert smooth_data([1, 2, 4], 0) == [1, 2, 4]
    assert smooth_data([], 0.9) == []
    with pytest.raises(ValueError, match=r'must be in \[0, 1\], got 2'):
        smooth_data([1], 2)
