"""`kclrun lag` over a stream and rows in memory: each shard's line, the totals, the exit code."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from kclrun.cli import lag as verb
from kclrun.errors import NotFound, Throttled, Unavailable
from kclrun.model.lease import OFFERED, Halt, OwnerId
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.operating.summaries import Lag
from tests.unit.cli.memory_site import BEGUN, A, Called, key

LOWER, UPPER = 0, 2**128 - 1
NOTHING = "nothing unread (retention is 1d)"


def shards_of(call: Callable[..., Called], *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    code, said, reported = call("lag --json", *more)
    assert (code, reported) == (0, [])
    whole = json.loads("\n".join(said))
    return whole, {shard["shard"]: shard for shard in whole["shards"]}


def test_before_the_first_start_every_shard_is_measured_from_where_it_will_begin(site, call):
    site.put(LOWER)
    site.put(UPPER, after_s=40.0)
    site.clock.now += 60.0

    whole, shards = shards_of(call)
    assert (whole["application"], whole["stream"], whole["retention_s"]) == (
        "orders",
        "orders",
        86_400.0,
    )
    assert (whole["behind_s_max"], whole["loss_in_s_min"], whole["unknown"]) == (
        100.0,
        86_300.0,
        0,
    )
    assert shards[key(0)] == {
        "shard": key(0),
        "state": "no lease",
        "owner": "",
        "checkpoint": "",
        "behind_s": 100.0,
        "oldest_at": "2023-11-14T22:14:20.000Z",
        "loss_in_s": 86_300.0,
        "is_trimmed": False,
        "note": "not begun: there is no lease",
    }
    assert shards[key(1)]["behind_s"] == 60.0
    said = call("lag")[1]
    assert re.split(" {2,}", said[1])[2:6] == ["-", "-", "1m 40s", "23h 58m"]
    tip, shards = shards_of(call, "--set", "start=LATEST")
    assert tip["behind_s_max"] == 0.0
    assert shards[key(0)]["note"] == "not begun: there is no lease; it would begin at the tip"
    # Between the two records.
    at, shards = shards_of(call, "--set", "start=2023-11-14T22:14:50Z")
    assert at["behind_s_max"] == 60.0
    assert shards[key(0)]["behind_s"] == 0.0


def test_the_lag_is_the_age_of_what_is_not_checkpointed(site, call):
    (first,) = site.put(LOWER)
    site.put(LOWER, after_s=10.0)
    site.put(UPPER, after_s=20.0)
    site.clock.now += 5.0
    site.plant(0, A, checkpoint=ExtendedSequenceNumber(first))
    site.plant(1, checkpoint=LATEST)

    whole, shards = shards_of(call)
    assert (shards[key(0)]["behind_s"], shards[key(0)]["owner"]) == (25.0, A)
    assert shards[key(0)]["loss_in_s"] == 86_375.0
    assert (shards[key(1)]["behind_s"], shards[key(1)]["loss_in_s"]) == (None, None)
    assert (whole["unknown"], whole["behind_s_max"]) == (1, 25.0)

    code, said, reported = call("lag")
    assert (code, reported, said[-2]) == (0, [], "")
    assert said[0].split() == [
        "shard",
        "state",
        "owner",
        "checkpoint",
        "behind",
        "loss",
        "in",
        "note",
    ]
    cells = re.split(" {2,}", said[1])
    assert (cells[0], cells[2], cells[4:]) == (key(0), A, ["25s", "23h 59m"])
    assert said[-1] == (
        f"2 shards; 1 without an owner; 1 not known; at most 25s behind ({key(0)});"
        f" first loss in 23h 59m ({key(0)}), retention is 1d"
    )


def test_where_nothing_is_to_be_noted_there_is_no_column_for_it(site, call):
    site.plant(0, A)
    site.plant(1, A)

    said = call("lag")[1]

    assert said[0].split()[-1] == "in"
    assert said[1].split() == [key(0), "owned", A, "TRIM_HORIZON", "0.0s", "-"]
    assert said[-1] == f"2 shards; at most 0.0s behind; {NOTHING}"
    site.plant(0, checkpoint=SHARD_END)
    site.plant(1, checkpoint=SHARD_END)
    assert call("lag")[1][-1] == "Nothing is left to read: every shard has ended."


def test_a_monitor_is_answered_by_the_exit_code(site, call):
    site.put(LOWER)
    site.clock.now += 300.0
    site.plant(0, A)
    site.plant(1, A)

    assert call("lag --max-behind 5m")[::2] == (0, [])
    assert call("lag --max-behind 299s")[::2] == (
        1,
        [f"Further behind than 299s, or not known: {key(0)} 5m"],
    )
    site.plant(1, A, checkpoint=LATEST)
    assert call("lag --max-behind 5m --json")[::2] == (
        1,
        [f"Further behind than 5m, or not known: {key(1)} ?"],
    )


def test_children_that_wait_and_parents_that_are_done_are_told_apart(site, call):
    shards = site.stream().list_shards()
    site.kinesis.split_shard(
        site.kinesis.stream("orders", None, WallTime(site.clock.now)),
        shards[0].shard_id,
        2**126,
        WallTime(site.clock.now),
    )
    site.clock.now += 60.0
    site.plant(0, A, halt=Halt("bad row", WallTime(1.0)))
    site.plant(1, A)
    site.plant(3, OwnerId(OFFERED), offered_by=A, parents=frozenset({key(0)}))

    _, found = shards_of(call)

    assert list(found) == [key(0), key(1), key(2), key(3)]
    assert (found[key(0)]["state"], found[key(0)]["note"]) == ("halted", "bad row")
    assert found[key(2)]["note"] == f"no lease yet: it is made when {key(0)} ended"
    assert (found[key(3)]["state"], found[key(3)]["owner"]) == ("offered", "")
    assert found[key(3)]["note"] == f"waits for {key(0)}; given away by {A}"


def test_of_several_streams_each_shard_is_measured_in_its_own(site, call):
    site.make_stream("audits", 1)
    now = WallTime(site.clock.now)
    site.kinesis.set_retention(site.kinesis.stream("audits", None, now), 48, now, longer=True)
    site.clock.now += 60.0
    site.configure(
        "application: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
        "streams: [{name: orders, start: LATEST}, {name: audits}]\n"
    )
    site.put(LOWER, stream="audits")
    site.clock.now += 30.0
    site.plant(0, A, stream="1:returns:9:")
    created = {name: int(site.stream(name).summary().created_at) for name in ("orders", "audits")}
    orders, audits = (f"123456789012:{name}:{at}:" for name, at in created.items())

    code, said, reported = call("lag --json")
    shards = {each["shard"]: each for each in json.loads("\n".join(said))["shards"]}
    assert json.loads("\n".join(said))["retention_s"] == 86_400.0  # the shortest
    assert (code, reported) == (
        0,
        [f"Not measured, their stream is not of the application: returns:{key(0)}"],
    )
    assert {name: each["behind_s"] for name, each in shards.items()} == {
        key(0, audits): 30.0,
        key(0, orders): 0.0,
        key(1, orders): 0.0,
    }
    # A table with rows: what is new begins at its beginning, also where `start` is LATEST.
    site.plant(0, A, stream=audits)
    site.plant(0, A, stream=orders)
    code, said, _ = call("lag")
    assert [line.split()[0] for line in said[1:4]] == [
        f"orders:{key(0)}",
        f"orders:{key(1)}",
        f"audits:{key(0)}",
    ]
    assert "no lease: a running manager makes one within a few cycles" in said[2]


# How long it tries, and whose clock it believes


class Pages:
    """A reader that answers with these pages or errors, one after the other."""

    def __init__(self, *answers: FetchedPage | Exception) -> None:
        self.answers = list(answers)
        self.limits: list[int] = []

    def iterator(self, *_: object) -> str:
        return "i"

    def fetch(self, _iterator: str, limit: int) -> FetchedPage:
        self.limits.append(limit)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def measured(pages: Pages, position: ExtendedSequenceNumber = TRIM_HORIZON) -> verb.Lag:
    start = StartPoint(IteratorType.TRIM_HORIZON)
    return verb.measure(pages, key(0), start, position)


def record(at: float) -> FetchedPage:
    return FetchedPage([Record(b"x", "k", "77", at)], "i", 0)


def gap(behind_ms: int) -> FetchedPage:
    return FetchedPage([], "i", behind_ms)


def test_throttles_are_waited_out_five_times_and_gaps_four(site):
    def lag_after(*answers: FetchedPage | Exception) -> tuple[verb.Lag, int]:
        site.clock.slept.clear()
        pages = Pages(*answers)
        lag = measured(pages)
        # The record of the checkpoint, and the next one.
        assert set(pages.limits) == {2}
        return lag, len(pages.limits)

    at = site.clock.now
    assert lag_after(*[Throttled("slow")] * 4, gap(0)) == (Lag(0.0), 5)
    assert site.clock.slept == pytest.approx([0.3, 0.6, 1.2, 2.25])
    assert lag_after(Unavailable("503")) == (Lag(None, note="not known: 503"), 5)
    assert lag_after(NotFound("gone"))[0].is_trimmed

    found, asked = lag_after(gap(7_000))
    assert (found.behind_s, asked, site.clock.slept) == (7.0, 5, [0.25] * 4)
    assert found.note == "no record found so near; the lag is that of the service"
    found, asked = lag_after(gap(7_000), gap(7_000), record(at))
    assert (found.note, asked) == ("", 3)
    end = FetchedPage([], None, None)
    assert lag_after(end) == (Lag(0.0), 1)


@pytest.mark.parametrize(
    ("service_ahead_s", "behind_s"),
    [(0.0, 10.0), (1.5, 10.0), (-1.5, 10.0), (1.75, 11.75), (60.0, 70.0), (-60.0, 0.0)],
)
def test_the_services_clock_counts_where_the_two_do_not_agree(site, service_ahead_s, behind_s):
    now = site.clock.now
    page = FetchedPage(
        [Record(b"x", "k", "77", now - 10.0)],
        "i",
        0,
        served_at=WallTime(now + service_ahead_s),
    )
    assert measured(Pages(page)).behind_s == behind_s
    assert now > BEGUN


def test_whether_the_checkpoints_record_is_gone_is_seen_at_the_first_that_comes(site):
    start = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, "70")
    position = ExtendedSequenceNumber("70")
    there = FetchedPage([Record(b"x", "k", "70", 1.0)], "i", 9)
    later = record(site.clock.now)

    lag = verb.measure(Pages(later), key(0), start, position)
    assert (lag.is_trimmed, lag.note) == (
        True,
        "the checkpoint's record is past retention: records may be lost",
    )
    # The first record that comes decides: the checkpoint's own may come alone.
    lag = verb.measure(Pages(there, later), key(0), start, position)
    assert (lag.behind_s, lag.is_trimmed, lag.note) == (0.25, False, "")
