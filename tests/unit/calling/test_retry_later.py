"""RetryLater in a row: where it begins, and how long it was."""

from kclrun.calling.retry_later import RetryLaters


def test_calls_that_are_not_repeated_any_more_are_forgotten():
    laters = RetryLaters()
    laters.asked(1, 10.0)

    laters.forget()

    assert laters.over(1, lambda: 11.0) is None
    assert laters.asked(2, 12.0) == 1
