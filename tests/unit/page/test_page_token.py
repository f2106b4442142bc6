"""A wrong token makes the next one wait, and is said; the right one works after it."""

import threading

from kclrun.page.token import Token

RIGHT = "an-operators-own-token"


class Time:
    """A clock that only waiting moves."""

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def made(refused=lambda _count: None):
    time = Time()
    return Token(RIGHT, refused, clock=time.clock, wait=time.wait), time


def test_the_right_token_never_waits():
    token, time = made()
    assert all(token.check(RIGHT) for _ in range(100))
    assert time.now == 0.0


def test_three_hundred_wrong_tokens_take_twenty_minutes_and_each_is_said():
    said = []
    token, time = made(said.append)

    assert not any(token.check(f"wrong-{number}") for number in range(300))

    assert time.now > 15 * 60
    assert said == list(range(1, 301))


def test_the_right_token_waits_as_a_wrong_one_does_and_then_works_at_once():
    token, time = made()
    for _ in range(3):
        token.check("wrong")
    before = time.now

    assert token.check(RIGHT)
    assert time.now == before + 1.0
    assert token.check(RIGHT)
    assert time.now == before + 1.0


def test_wrong_tokens_at_once_wait_one_after_the_other():
    token, time = made()
    threads = [threading.Thread(target=token.check, args=("wrong",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.now > 50


def test_the_operator_may_mistype_once():
    token, time = made()
    token.check("mistyped")
    assert token.check(RIGHT)
    assert time.now == 0.25
