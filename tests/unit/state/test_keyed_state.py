"""What user code sees of the state."""

from typing import Any

import msgspec
import pytest

from kclrun import RecordProcessor
from kclrun.codec.kpl import effective_hash_key
from kclrun.errors import HaltShard, LimitExceeded, SettingsError, SinkError
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.state.keyed import (
    CHANGE_BYTES,
    Counter,
    KeyState,
    LiveEntries,
    MakeChange,
    OwnKey,
    State,
    Table,
    Undoable,
    growth,
    held_bytes,
)
from kclrun.testing import Claim, Faults, make_record, replay, run_processor
from tests.support.contexts import made_context
from tests.support.tables import over_rows


class Order(msgspec.Struct):
    number: int
    lines: list[str] = []


class Kept:
    def __init__(self, hash_range: HashRange | None = None, max_bytes: int = 10_000) -> None:
        self.changes: list[Undoable] = []
        self.live = LiveEntries({}, self._journal, hash_range, max_bytes)
        self.state = State(self.live)

    def _journal(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        made = change(key, name, value)
        if made is not None:
            self.changes.append(made)


def test_a_key_is_a_mapping_of_names_to_values():
    kept = Kept()
    of_key = kept.state["a"]
    of_key["n"] = 1
    of_key.set("text", "x")
    of_key.update(at=[1, {"b": None}], raw=b"\0")
    assert dict(kept.state[make_record("", key="a")]) == {
        "n": 1,
        "text": "x",
        "at": [1, {"b": None}],
        "raw": b"\0",
    }
    del of_key["n"]
    of_key.delete("never")
    assert of_key.get("n", 0) == 0
    assert list(kept.state) == ["a"]
    assert "a" in kept.state
    of_key.delete()
    assert (len(kept.state), len(of_key), "a" in kept.state) == (0, 0, False)
    assert kept.live.size_bytes == 0
    with pytest.raises(KeyError):
        of_key["n"]
    with pytest.raises(KeyError):
        del of_key["n"]


def test_a_value_is_stored_as_it_was_and_read_with_its_type():
    of_key = Kept().state["a"]
    order = Order(1, ["x"])
    of_key["order"] = order
    order.lines.append("y")
    of_key.get("order")["lines"].append("z")
    assert of_key.get("order", type=Order) == Order(1, ["x"])
    with pytest.raises(msgspec.ValidationError):
        of_key.get("order", type=int)
    with pytest.raises(TypeError):
        of_key["order"] = object()


def test_typed_views_share_the_state():
    state = Kept().state
    counts, orders = Counter(state, "n"), Table(state, "order", Order)
    assert (counts["a"], counts.add("a"), counts.add("a", 2), counts["a"]) == (0, 1, 3, 3)
    counts["b"] = 7
    orders["a"] = Order(5)
    assert (orders["a"], orders.get("b"), orders.get("b", 1), "a" in orders) == (
        *(Order(5), None, 1),
        True,
    )
    assert dict(state["a"]) == {"n": 3, "order": {"number": 5, "lines": []}}
    del orders["a"]
    with pytest.raises(KeyError, match="order"):
        orders["a"]


def test_an_unchanged_value_is_no_change_and_every_change_can_be_taken_back():
    kept = Kept()
    of_key = kept.state["a"]
    of_key["n"] = 1
    of_key["n"] = 1
    assert len(kept.changes) == 1
    of_key["n"] = 2
    of_key["m"] = 3
    del of_key["n"]
    assert dict(of_key) == {"m": 3}
    sizes = kept.live.size_bytes
    while kept.changes:
        kept.live.undo(kept.changes.pop())
    assert (list(kept.state), kept.live.size_bytes) == ([], 0)
    assert sizes > 0


def test_a_shard_above_its_limit_halts_in_words_and_may_still_shrink():
    kept = Kept(max_bytes=20)
    kept.state["a"]["n"] = "x" * 15
    with pytest.raises(HaltShard, match=r"state\.max_bytes \(20 bytes\)"):
        kept.state["b"]["n"] = 12345
    kept.state["a"]["n"] = "x"
    kept.state["b"]["n"] = 12345


@pytest.mark.parametrize(
    ("key", "name"), [("", "n"), ("a", ""), ("a" * 257, "n"), ("a", "n" * 257)]
)
def test_keys_and_names_have_limits(key, name):
    with pytest.raises(LimitExceeded, match="1 to 256 characters"):
        Kept().state[key][name] = 1


@pytest.mark.parametrize(("key", "name"), [("a", "\ud83d"), ("\ud83d", "n")])
def test_a_key_or_a_name_that_no_version_could_hold_is_refused_in_the_call(key, name):
    kept = Kept()
    kept.live.reserved.is_served = True
    with pytest.raises(LimitExceeded, match="lone surrogate"):
        kept.state[key][name] = 1
    with pytest.raises(LimitExceeded, match="lone surrogate"):
        kept.live.set_timer(key, 1.0, name)
    kept.state["ä"]["ö"] = 1
    assert len(kept.changes) == 1


def test_a_timer_at_zero_stays_pending_whatever_the_sign_of_the_zero_is():
    kept = Kept()
    kept.live.reserved.is_served = True
    kept.live.set_timer("a", 0.0)
    kept.live.set_timer("a", -0.0)
    for number in range(100):  # so many replaced timers that the heap is made anew
        kept.live.set_timer("b", 1.0 + number)
    earliest = kept.live.earliest_timer("event")
    assert earliest is not None
    assert (earliest.key, earliest.at) == ("a", 0.0)


def test_a_key_that_a_reshard_would_give_to_no_child_is_refused():
    middle = 2**127
    kept = Kept(HashRange(0, middle - 1))
    for key in "abcdefgh":
        if effective_hash_key(key, None) < middle:
            kept.state[key]["n"] = 1
        else:
            with pytest.raises(LimitExceeded, match="hash range of this shard"):
                kept.state[key]["n"] = 1
    assert 0 < len(kept.state) < 8
    assert effective_hash_key("a", None) <= HASH_KEY_MAX


class Counting(RecordProcessor):
    raises_at = -1

    def initialize(self, context: Any) -> None:
        self.context, self.counts = context, context.counter("n")
        self.calls = 0
        assert isinstance(context.state["a"], KeyState)
        with pytest.raises(SinkError, match="while they run"):
            context.state["a"]["n"] = 1

    def process_records(self, batch: Any, checkpointer: Any) -> None:
        for record in batch:
            self.counts.add(record)
        self.calls += 1
        if self.calls == self.raises_at:
            raise ValueError("once")


class Failing(Counting):
    raises_at = 2


RECORDS = [(key, "") for key in "abacaba"]


def test_the_test_kit_has_the_state_in_memory_and_takes_back_what_a_failed_call_changed():
    expected = {"a": {"n": 4}, "b": {"n": 2}, "c": {"n": 1}}
    assert run_processor(Counting, RECORDS, settings={"fetch": {"batch_max": 2}}).state == expected
    assert (
        run_processor(
            Failing, RECORDS, settings={"fetch": {"batch_max": 2}, "on_error": {"retries": 1}}
        ).state
        == expected
    )
    assert run_processor(Counting, RECORDS, claim=Claim(state={"a": {"n": 5}})).state["a"] == {
        "n": 9
    }


@over_rows("crash_after", range(1, 7))
def test_after_a_crash_the_state_is_that_of_the_checkpoint(crash_after):
    run = replay(
        Counting,
        RECORDS,
        settings={"fetch": {"batch_max": 2}, "checkpoint": {"every": "batch"}},
        faults=Faults(crash_after=crash_after),
    )
    assert run.state == {"a": {"n": 4}, "b": {"n": 2}, "c": {"n": 1}}


def test_without_state_in_the_settings_its_use_is_an_error_in_words():
    context = made_context()
    for use in (lambda: context.state, lambda: context.counter("n")):
        with pytest.raises(SettingsError, match=r"set state\.store in the configuration"):
            use()


@pytest.mark.parametrize(
    "reach",
    [
        lambda own: own.values_of("b"),
        lambda own: own.put("b", "n", b"1"),
        lambda own: own.set_timer("b", 9.0, "t", "event"),
        lambda own: own.delete_timer("b", "t"),
    ],
    ids=["read", "write", "set a timer", "delete a timer"],
)
def test_the_call_of_one_record_reaches_its_own_key_only(reach):
    kept = Kept()
    own = OwnKey(kept.live, "a", kept._journal)
    own.put("a", "n", b"1")

    with pytest.raises(LimitExceeded, match="another key"):
        reach(own)
    assert own.values_of("a") == {"n": b"1"}


@pytest.mark.parametrize(
    ("value", "before", "grows", "held"),
    [
        (b"12345", None, 3 + 2 + 5, 3 + 2 + 5),
        (b"12345", b"1234567", -2, 3 + 2 + 5 + 7),
        (None, b"1234567", -3 - 2 - 7, 3 + 2 + 7),
        (None, None, 0, 3 + 2),
    ],
)
def test_a_change_holds_its_key_its_name_and_both_values_until_it_is_written(
    value, before, grows, held
):
    assert growth("key", "nm", value, before) == grows
    assert held_bytes("key", "nm", value, before) == held + CHANGE_BYTES
