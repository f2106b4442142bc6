"""The verdict on each output, by what holds up checkpoints."""

import msgspec
import pytest

from kclrun.model.lease import Halt
from kclrun.model.time import WallTime
from kclrun.page.outputs_view import OutputVerdict, Warned, leases_to_ask, outputs_body, verdict_of
from kclrun.page.snapshot import ShownOutput
from tests.unit.page.fleet import ABOUT, NOW, behind, key, lease, snapshot_of

MAIN = ShownOutput("output", "output", "s3://rows/orders", 60.0)
AUDIT = ShownOutput("audit", "outputs.audit", "sqs audit")
ABOUT_TWO = msgspec.structs.replace(ABOUT, outputs=(MAIN, AUDIT))
WORDS = "cannot send to the queue audit: it does not exist (5 messages wait)"
LATE_S = 600.0


def fleet(*seconds, halt=None):
    leases = [lease(number, halt=halt if not number else None) for number in range(len(seconds))]
    lags = {key(number): behind(number, each) for number, each in enumerate(seconds)}
    return snapshot_of(*leases, lags=lags, lags_at=NOW)


def judged(snapshot, **warned):
    found = {key(int(name[1:])): each for name, each in warned.items()}
    return [verdict_of(ABOUT_TWO, snapshot, each, found) for each in (MAIN, AUDIT)]


def test_while_no_shard_is_behind_every_output_is_ok():
    assert judged(fleet(0.0, 100.0)) == [OutputVerdict("ok"), OutputVerdict("ok")]


def test_the_output_that_a_warning_names_is_failing_and_the_other_is_not():
    warned = Warned(WallTime(NOW - 300), f"outputs.audit: {WORDS}")

    assert judged(fleet(LATE_S, 1.0), s0=warned) == [
        OutputVerdict("ok"),
        OutputVerdict("failing", WORDS, (key(0),)),
    ]


def test_a_warning_from_before_the_oldest_unread_record_is_over():
    warned = Warned(WallTime(NOW - 2 * LATE_S), f"outputs.audit: {WORDS}")

    assert [each.word for each in judged(fleet(LATE_S), s0=warned)] == ["behind", "behind"]
    assert judged(fleet(1.0), s0=warned) == [OutputVerdict("ok"), OutputVerdict("ok")]


def test_a_shard_that_is_behind_for_no_known_reason_makes_no_output_failing():
    main, audit = judged(fleet(LATE_S, 1.0))

    assert (main.word, main.shards) == ("behind", (key(0),))
    assert "10m behind" in main.why
    assert audit == main


def test_an_output_that_halted_a_shard_is_failing():
    reason = "the output failed once: outputs.audit: no such queue"
    halt = Halt(reason, WallTime(NOW - 60))

    _, audit = judged(fleet(60.0, 1.0, halt=halt))

    assert audit == OutputVerdict("failing", "no such queue", (key(0),))


@pytest.mark.parametrize("seconds", [(), (None, 1.0)])
def test_where_nothing_is_measured_no_output_is_ok(seconds):
    assert [each.word for each in judged(fleet(*seconds))] == ["not known", "not known"]


def test_only_the_owners_of_the_shards_that_are_furthest_behind_are_asked():
    asked = leases_to_ask(ABOUT_TWO, fleet(1.0, *(LATE_S + number for number in range(9))))

    assert [each.key for each in asked] == [key(9), key(8), key(7), key(6)]


def test_the_page_shows_the_verdict_its_reason_and_the_shard_that_is_held_up():
    warned = {key(0): Warned(WallTime(NOW - 300), f"outputs.audit: {WORDS}")}

    shown = outputs_body(ABOUT_TWO, fleet(LATE_S), warned)

    assert '<span class="state bad">failing</span>' in shown
    assert WORDS in shown
    assert f'It holds up <a href="/shard?key={key(0)}">0</a>' in shown
