import signal
import threading

import pytest

from basicsr.utils.parallel import for_each_file, map_in_order


def test_results_come_in_the_order_of_the_items_whoever_is_first():
    second_is_done = threading.Event()

    def slow_at_first(item):
        if item == 0:
            assert second_is_done.wait(10)
        second_is_done.set()
        return item * item

    assert list(map_in_order(slow_at_first, range(20), 2)) == [n * n for n in range(20)]


def test_no_more_than_a_few_results_wait():
    made = []
    results = map_in_order(made.append, range(1000), 2)
    for taken in range(1, 30):
        next(results)
        assert len(made) <= taken + 4
    results.close()
    assert len(made) <= 33


@pytest.mark.parametrize('workers', [1, 2])
def test_an_error_stops_the_work(workers):
    made = []

    def fail_at_5(item):
        if item == 5:
            raise ValueError('the sixth')
        made.append(item)

    with pytest.raises(ValueError, match='the sixth'):
        list(map_in_order(fail_at_5, range(1000), workers))
    assert len(made) <= 5 + 2 * workers + 1
    with pytest.raises(ValueError, match='workers must be at least 1, got 0'):
        list(map_in_order(made.append, range(3), 0))


def test_an_interruption_stops_the_work():
    made = []

    def interrupt_at_5(item):
        made.append(item)
        if item == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        list(map_in_order(interrupt_at_5, range(100_000), 2))
    assert len(made) < 100_000


@pytest.mark.parametrize('text', ['empty', '{}: empty'])
def test_an_error_names_the_file_once(text, tmp_path):
    def fail(path):
        raise ValueError(text.format(path))

    with pytest.raises(ValueError) as caught:
        list(for_each_file(fail, [tmp_path], 1))
    assert str(caught.value) == f'{tmp_path}: empty'
