"""Any order in which calls of single records end: effects once, a key's order kept, a prefix that
only grows."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kclrun.calling.concurrency import RecordWindow, Settled
from kclrun.calling.failures import Breaker, LetGo
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.time import Instant, WallTime

POLICY = ErrorPolicy(retries=2, backoff_s=1.0, then="dead-letter")


class Shell:
    """Performs what the window says; `chance` says which call ends next, and when it is stopped."""

    def __init__(self, keys, records, order, chance):
        self.window = RecordWindow(Concurrency(records, order), POLICY, Breaker(1_000))
        self.keys, self.chance = keys, chance
        self.now = Instant(0.0)
        self.running, self.effects, self.ended = [], [], []
        self.settled = 0

    def admit(self, first, end):
        self.window.admit([Record(b"x", key, "1") for key in self.keys[first:end]])

    def start(self):
        for number in self.window.starts(self.now):
            rivals = [n for n in self.running if self.keys[n] == self.keys[number]]
            assert self.window._order == "none" or not rivals, "two of a key at a time"
            self.running.append(number)
            assert len(self.running) <= self.window._records_max

    def end_one(self, fails):
        """`fails`: how often each record raises."""
        number = self.running.pop(self.chance.randrange(len(self.running)))
        if fails[number]:
            fails[number] -= 1
            self.window.raised(number, ValueError("no"), self.now, WallTime(0.0))
        else:
            self.window.returned(number)
            self.ended.append(number)

    def settle(self):
        while (step := self.window.next_step(self.now)) is not None:
            match step:
                case Settled(upto):
                    assert upto > self.settled, "the prefix only grows"
                    self.effects += range(self.settled, upto)
                    self.settled = upto
                case LetGo(number):
                    assert number == self.settled == self.window.first
                    self.ended.append(number)
                    self.window.let_go(number)
                case halted:
                    raise AssertionError(halted)

    def run(self, fails):
        while True:
            self.settle()
            self.start()
            if self.running:
                self.end_one(fails)
            elif self.window.wake_instant is not None:
                self.now = max(self.now, self.window.wake_instant)
            elif self.window.is_over:
                return


@given(
    keys=st.text("abcde", min_size=1, max_size=40),
    records=st.sampled_from([1, 2, 3, 8, 64]),
    order=st.sampled_from(["key", "none"]),
    failing=st.sets(st.integers(0, 39), max_size=5),
    calls=st.integers(1, 4),
    cut=st.integers(0, 40),
    chance=st.integers(0, 2**16).map(random.Random),
)
def test_in_any_order_each_record_ends_once_and_in_its_keys_order(
    keys, records, order, failing, calls, cut, chance
):
    # More than two failures: a dead letter; fewer: a success after repetitions.
    fails = [calls if number in failing else 0 for number in range(len(keys))]
    shell = Shell(keys, records, order, chance)
    shell.admit(0, cut)
    for _ in range(chance.randrange(5)):
        shell.start()
        if shell.running:
            shell.end_one(fails)
        shell.settle()
    shell.admit(cut, len(keys))

    shell.run(fails)

    assert shell.effects == list(range(len(keys)))
    assert sorted(shell.ended) == list(range(len(keys)))
    for key in set(keys) if order == "key" else ():
        own = [number for number in shell.ended if keys[number] == key]
        assert own == sorted(own)
    assert records > 1 or shell.ended == sorted(shell.ended)


@given(
    keys=st.text("abcde", min_size=1, max_size=40),
    records=st.sampled_from([1, 2, 3, 8]),
    failing=st.sets(st.integers(0, 39), max_size=5),
    after=st.integers(0, 40),
    chance=st.integers(0, 2**16).map(random.Random),
)
def test_a_stop_at_any_point_leaves_no_record_done_for_nothing_unless_one_raised(
    keys, records, failing, after, chance
):
    fails = [int(number in failing) for number in range(len(keys))]
    shell = Shell(keys, records, "key", chance)
    shell.admit(0, len(keys))
    for _ in range(after):
        shell.settle()
        shell.start()
        if shell.running:
            shell.end_one(fails)
        elif shell.window.wake_instant is not None:
            shell.now = max(shell.now, shell.window.wake_instant)

    shell.window.stop()
    shell.run(fails)

    assert shell.effects == list(range(shell.settled))
    assert not shell.running
    if not failing:
        assert sorted(shell.ended) == list(range(shell.settled))
