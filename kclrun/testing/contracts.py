"""Contracts of a processor, each checked in one line: a crash, the order of calls and the order of
records do not change its result."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kclrun.calling.in_memory.life import Run
from kclrun.model.record import Record
from kclrun.processor import RecordProcessor
from kclrun.testing.plans import plan_of
from kclrun.testing.records import RecordLike, make_records
from kclrun.testing.runs import replay_planned, run_planned

Result = Callable[[Run], object]
# No settings have it: batches are of another size for each seed.
_OF_THE_SEED: Final = 0


def _result(run: Run) -> object:
    # A record that a second life gives up again has one letter.
    given_up = sorted({record.position for record in run.given_up})
    return {
        "rows": run.outputs,
        "given_up": given_up,
        "position": run.position,
        "state": run.state,
        "timers": run.timers,
    }


def _unordered(run: Run) -> object:
    rows = {name: sorted(map(msgspec.json.encode, rows)) for name, rows in run.outputs.items()}
    return {
        "rows": rows,
        "given_up": sorted(bytes(record.data) for record in run.given_up),
        "state": run.state,
    }


def _call(fresh: Callable[[], object] | None) -> None:
    if fresh is not None:
        fresh()


def _require_same(where: str, expected: object, found: object) -> None:
    if found != expected:
        raise AssertionError(
            f"{where} the result is another\nundisturbed: {expected}\n{where}: {found}"
        )


def assert_any_order_gives_the_same(
    processor: type[RecordProcessor],
    records: Iterable[RecordLike],
    *,
    seeds: Iterable[int] = range(25),
    concurrency: int = 64,
    result: Result | None = None,
    **run: Any,
) -> None:
    """Run a processor one record at a time, and then once for each seed with records at the same
    time, whose calls return in the order that the seed says.

    `result` is what must be the same: the rows of each output, the records given up, the last
    position, the state and the pending timers, unless you say otherwise; `run.processors` has the
    instance. The other arguments are those of `run_processor`, such as `settings`.
    Raises: AssertionError with the seed and both results; the errors of the processor.

    >>> from kclrun import RecordProcessor
    >>> class Shout(RecordProcessor):
    ...     async def process_record(self, record, context):
    ...         context.emit({"text": record.data.decode().upper()})
    >>> assert_any_order_gives_the_same(Shout, ["a", "b", "c"])
    """
    plan, of = plan_of(processor, **run), result or _result
    kept = list(make_records(records, first_arrival_s=plan.first_arrival_s))
    one_by_one = msgspec.structs.replace(plan, concurrency=None)
    expected = of(run_planned(processor, kept, one_by_one))
    for seed in seeds:
        mixed = msgspec.structs.replace(plan, concurrency=concurrency, seed=seed)
        _require_same(f"with seed={seed}", expected, of(run_planned(processor, kept, mixed)))


def assert_idempotent(
    processor: type[RecordProcessor],
    records: Iterable[RecordLike],
    *,
    crashes: int = 25,
    fresh: Callable[[], object] | None = None,
    result: Result | None = None,
    **run: Any,
) -> None:
    """Run a processor undisturbed, and then with a crash after so many records and a second life
    from the last checkpoint: at `crashes` places, evenly over the records, and with
    `checkpoint.every: manual` also in each of its own checkpoints.

    It fails if a crash loses something (a count in `self` that began before the checkpoint) or,
    where `result` reads a system outside, leaves something twice (a row inserted, a file appended).
    `fresh` is called before each run and empties these systems. `result` must be the same, as in
    `assert_any_order_gives_the_same`. The other arguments are those of `run_processor`; left out,
    batches are of a quarter of the records, with a checkpoint after each.
    Raises: AssertionError with the place of the crash and both results; the processor's errors.

    >>> from kclrun import RecordProcessor
    >>> class Count(RecordProcessor):
    ...     seen = 0
    ...     def initialize(self, context):
    ...         self.emit = context.emit
    ...     def process_records(self, batch, checkpointer):
    ...         self.seen += len(batch)
    ...     def shard_ended(self, checkpointer):
    ...         self.emit({"seen": self.seen})
    >>> assert_idempotent(Count, "abcd")
    Traceback (most recent call last):
    ...
    AssertionError: with crash_after=2 the result is another
    ...
    """
    kept = list(make_records(records, first_arrival_s=run.get("first_arrival_s")))
    defaults = {"checkpoint": "batch", "batch_max": max(1, len(kept) // 4)}
    plan, of = plan_of(processor, defaults=defaults, **run), result or _result
    _call(fresh)
    undisturbed = run_planned(processor, kept, plan)
    expected = of(undisturbed)
    places = [("crash_after", at) for at in _spread(len(kept), crashes)]
    if plan.checkpoint == "manual":
        own = len(undisturbed.checkpoints)
        places += [("crash_at_checkpoint", at) for at in _spread(own, crashes)]
    for name, at in places:
        _call(fresh)
        found = of(replay_planned(processor, kept, plan.crashing(name, at)))
        _require_same(f"with {name}={at}", expected, found)


def assert_order_independent(
    processor: type[RecordProcessor],
    records: Iterable[RecordLike],
    *,
    seeds: Iterable[int] = range(25),
    keep_key_order: bool = True,
    fresh: Callable[[], object] | None = None,
    result: Result | None = None,
    **run: Any,
) -> None:
    """Run a processor over the records as they are, and then once for each seed over the same
    records in another order; those of one partition key keep theirs, unless `keep_key_order` says
    otherwise. So they come after a reshard, from several producers, or in other batches.

    The rows of each output must be the same, in any order, and so must the payloads given up and
    the state, unless `result` says otherwise; `fresh` is called before each run. The other
    arguments are those of `run_processor`.
    Raises: AssertionError with the seed and both results; the errors of the processor.

    >>> from kclrun import RecordProcessor
    >>> class Shout(RecordProcessor):
    ...     def process_record(self, record, context):
    ...         context.emit({"text": record.data.decode().upper()})
    >>> assert_order_independent(Shout, [("k", "a"), ("k", "b"), ("l", "c")])
    """
    plan, of = plan_of(processor, defaults={"batch_max": _OF_THE_SEED}, **run), result or _unordered
    kept = list(make_records(records, first_arrival_s=plan.first_arrival_s))
    is_cut = plan.batch_max == _OF_THE_SEED
    if is_cut:
        plan = msgspec.structs.replace(plan, batch_max=max(1, len(kept)))
    _call(fresh)
    expected = of(run_planned(processor, kept, plan))
    for seed in seeds:
        _call(fresh)
        mixed = _mixed(kept, random.Random(seed), keep_key_order=keep_key_order)
        size = 1 + seed % max(1, len(kept))
        cut = msgspec.structs.replace(plan, batch_max=size) if is_cut else plan
        _require_same(f"with seed={seed}", expected, of(run_planned(processor, mixed, cut)))


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers from 1 to `count`, evenly, the last among them."""
    return sorted({round(count * (n + 1) / most) for n in range(most)} - {0})


def _mixed(
    records: Sequence[Record], chance: random.Random, *, keep_key_order: bool
) -> list[RecordLike]:
    """The records in another order, at the places and times of the former ones."""
    order = list(records)
    chance.shuffle(order)
    if keep_key_order:
        of_key: dict[str, deque[Record]] = defaultdict(deque)
        for record in records:
            of_key[record.partition_key].append(record)
        order = [of_key[record.partition_key].popleft() for record in order]
    return [
        {
            "data": bytes(record.data),
            "key": record.partition_key,
            "ordinal": at,
            "arrived_at_s": place.approximate_arrival_timestamp,
        }
        for at, (record, place) in enumerate(zip(order, records, strict=True))
    ]
