"""RetryLater in a row: where it begins, and how long it was."""

from kclrun.calling.retry_later import RetryLaters, Waited


def test_a_row_ends_with_the_call_that_returns():
    laters = RetryLaters()

    assert laters.over("call", lambda: 1.0) is None
    assert [laters.asked("call", now) for now in (10.0, 12.0, 15.0)] == [1, 2, 3]
    assert laters.over("call", lambda: 20.0) == Waited(3, 10.0)
    assert laters.over("call", lambda: 21.0) is None
    assert laters.asked("call", 30.0) == 1


def test_records_that_wait_at_the_same_time_are_one_row():
    laters = RetryLaters()

    assert [laters.asked(number, 10.0 + number) for number in (1, 2, 1)] == [1, 2, 3]
    assert laters.over(1, lambda: 15.0) is None
    assert laters.asked(3, 16.0) == 4
    assert laters.over(2, lambda: 17.0) is None
    assert laters.over(3, lambda: 18.0) == Waited(4, 7.0)


def test_calls_that_are_not_repeated_any_more_are_forgotten():
    laters = RetryLaters()
    laters.asked(1, 10.0)

    laters.forget()

    assert laters.over(1, lambda: 11.0) is None
    assert laters.asked(2, 12.0) == 1
