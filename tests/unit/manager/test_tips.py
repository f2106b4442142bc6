"""Whether the shards of other owners are read, for `--until caught-up`: the stream decides."""

from kclrun.errors import ExpiredIterator, NotFound, Unavailable
from kclrun.manager.tips import TipsElsewhere, why_not_caught_up
from kclrun.model.lease import Lease
from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kclrun.model.stream import ONLY_STREAM
from tests.support.build import position as at
from tests.support.tables import over_rows


def lease(checkpoint, **fields):
    return Lease(key="s0", checkpoint=checkpoint, owner="kclrun:g:other:n", **fields)


class Reader:
    """A shard with records of these numbers. `gap` empty pages come before each tip."""

    def __init__(self, *numbers, gap=0, is_closed=False, fails=None):
        self.numbers = list(numbers)
        self.gap, self.is_closed, self.fails = gap, is_closed, fails

    def iterator(self, shard_id, start):
        assert shard_id == "s0"
        number = int(start.sequence_number or 0)
        return f"{number + (start.kind.value == 'AFTER_SEQUENCE_NUMBER')}"

    def fetch(self, iterator, limit):
        if self.fails is not None:
            raise self.fails
        unread = [number for number in self.numbers if number >= int(iterator)]
        page, rest = unread[:limit], unread[limit:]
        self.gap -= not page
        behind = 1_000 if rest or (self.gap >= 0 and not page) else 0
        following = str(page[-1] + 1) if page else iterator
        is_end = self.is_closed and not rest
        return FetchedPage(
            tuple(Record(b"x", "k", str(number)) for number in page),
            None if is_end else following,
            behind,
        )


class Pool:
    def run(self, job, then, otherwise):
        try:
            result = job()
        except Exception as error:
            otherwise(error)
        else:
            then(result)


class Looks:
    def __init__(self, reader, start_at=None):
        self.now, self.broken = 100.0, []
        self.tips = TipsElsewhere(
            {ONLY_STREAM: reader},
            lambda _: start_at,
            pool=Pool(),
            now=lambda: self.now,
            broke=self.broken.append,
        )

    def at(self, now, *leases):
        self.now = now
        self.tips.are_read(leases)
        return self.tips.are_read(leases)


@over_rows(
    ("claim", "reader", "row", "is_read"),
    [
        ("the last record is checkpointed", Reader(1, 2, 9), lease(at(9)), True),
        ("one is not", Reader(1, 2, 9), lease(at(2)), False),
        ("nothing is in it", Reader(), lease(TRIM_HORIZON), True),
        ("nothing was read", Reader(1), lease(TRIM_HORIZON), False),
        ("from a pinned tip", Reader(), lease(LATEST, latest_pinned_at=5.0), True),
        ("from a tip that is not known", Reader(), lease(LATEST), False),
        ("from an instant that is not known", Reader(), lease(AT_TIMESTAMP), False),
        ("a closed shard ends", Reader(1, 9, is_closed=True), lease(at(9)), False),
        ("trimmed", Reader(fails=NotFound("gone")), lease(at(9)), False),
        ("an outage", Reader(fails=Unavailable("down")), lease(at(9)), False),
        ("without a reader", None, lease(at(9)), False),
    ],
)
def test_a_shard_is_read_if_nothing_is_above_its_checkpoint(claim, reader, row, is_read):
    assert Looks(reader).at(100.0, row) == is_read, claim


def test_a_gap_before_the_tip_is_walked_over_several_looks():
    looks = Looks(Reader(9, gap=12))

    found = [looks.at(100.0 + 2 * number, lease(at(9))) for number in range(4)]

    assert (found[0], found[-1]) == (False, True)


def test_a_look_says_nothing_later_and_nothing_about_another_checkpoint():
    looks = Looks(Reader(9))
    assert looks.at(100.0, lease(at(9)))
    assert not looks.tips.are_read([lease(at(8))])
    looks.now = 100.5
    assert looks.tips.are_read([lease(at(9))])

    looks.tips._is_looking = True  # the next look takes long
    looks.now = 106.0

    assert not looks.tips.are_read([lease(at(9))])


def test_a_record_that_came_meanwhile_is_seen_until_it_is_checkpointed():
    reader = Reader(9)
    looks = Looks(reader)
    assert looks.at(100.0, lease(at(9)))
    reader.numbers.append(10)

    assert [looks.at(now, lease(at(9))) for now in (103.0, 106.0)] == [False, False]
    assert looks.at(109.0, lease(at(10)))


def test_an_iterator_that_expired_is_made_again():
    reader = Reader(9)
    looks = Looks(reader)
    assert looks.at(100.0, lease(at(9)))
    reader.fails = ExpiredIterator("old")
    assert not looks.at(500.0, lease(at(9)))
    reader.fails = None

    assert looks.at(503.0, lease(at(9)))


def test_a_bug_of_ours_is_not_an_answer():
    looks = Looks(Reader(fails=ZeroDivisionError("bug")))

    assert not looks.at(100.0, lease(at(9)))
    assert isinstance(looks.broken[0], ZeroDivisionError)


class Core:
    def __init__(self, *rows, blockers=()):
        self.rows, self.reasons = rows, blockers

    def blockers(self, now):
        return self.reasons

    def read_elsewhere(self):
        return self.rows


def test_the_reasons_of_the_table_come_before_the_stream_is_asked():
    def never(leases):
        assert not leases
        return True

    assert why_not_caught_up(Core(lease(at(9)), blockers=("x",)), 1.0, never) == ("x",)
    assert why_not_caught_up(Core(), 1.0, never) == ()
    (reason,) = why_not_caught_up(Core(lease(at(9))), 1.0, lambda _: False)
    assert "kclrun:g:other:n" in reason
