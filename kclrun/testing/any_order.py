"""The property of a `process_record`: any order in which its calls return gives the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kclrun.processor import RecordProcessor
from kclrun.testing.records import RecordLike, make_records
from kclrun.testing.runs import Run, run_processor


def _result(run: Run) -> object:
    given_up = [record.position for record in run.given_up]
    kept = {"rows": run.outputs, "state": run.state}
    return {**kept, "given_up": given_up, "position": run.position}


def assert_any_order_gives_the_same(
    processor: type[RecordProcessor],
    records: Iterable[RecordLike],
    *,
    seeds: Iterable[int] = range(25),
    concurrency: int = 64,
    result: Callable[[Run], object] | None = None,
    **settings: Any,
) -> None:
    """Run a processor one record at a time, and then once for each seed with records at the same
    time, whose calls return in the order that the seed says.

    `result` is what must be the same: the rows of each output, the state, the records given up and
    the last position, unless you say otherwise; `run.processors` has the instance. The other
    arguments are those of `run_processor`, such as `order="none"`.
    Raises: AssertionError with the seed and both results; the errors of the processor.

    >>> from kclrun import RecordProcessor
    >>> class Shout(RecordProcessor):
    ...     async def process_record(self, record, context):
    ...         context.emit({"text": record.data.decode().upper()})
    >>> assert_any_order_gives_the_same(Shout, ["a", "b", "c"])
    """
    kept, of = list(make_records(records)), result or _result
    expected = of(run_processor(processor, kept, **settings))
    for seed in seeds:
        run = run_processor(processor, kept, concurrency=concurrency, seed=seed, **settings)
        found = of(run)
        if found != expected:
            raise AssertionError(
                f"with seed={seed} the result is another than one record at a time gives\n"
                f"one at a time: {expected}\n"
                f"seed={seed}: {found}"
            )
