"""The methods of a processor: which it has, how they are called, and what they may return.

For the runtime alone: users see the classes of `kclrun.processor`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Final

from kclrun.errors import ProcessorLoadError
from kclrun.processor import RecordProcessor

# The methods of a processor, and the arguments of the runtime's calls.
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "initialize": ("context",),
    "process_records": ("batch", "checkpointer"),
    "process_record": ("record", "context"),
    "on_timer": ("timer", "checkpointer"),
    "shard_ended": ("checkpointer",),
    "lease_lost": (),
    "shutdown_requested": ("checkpointer",),
}


def refuse_deferred(processor: object, called: str, methods: Iterable[str] = METHODS) -> None:
    """Refuse a processor (a class or an instance) with a method whose call runs none of its code.

    Calling an `async def`, or a function with `yield`, only makes an object: the records would
    count as processed, and checkpoints would pass them. `called` names it in the message.
    Raises: ProcessorLoadError.
    """
    for name in methods:
        method = getattr(processor, name, None)
        if name == "process_record" and inspect.iscoroutinefunction(method):
            continue
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise ProcessorLoadError(
                f"{called}: {name} is `async def`: the runtime calls it without an event loop, so"
                " nothing in it would run\n"
                "Write `def`; for asynchronous work write `async def process_record(self, record,"
                " context)`, or call asyncio.run(...) in it"
            )
        if inspect.isgeneratorfunction(method):
            raise ProcessorLoadError(
                f"{called}: {name} has a `yield`, which makes it a generator: nothing in it would"
                " run\n"
                "Remove the `yield`; rows leave with context.emit(row)"
            )


def call_method(processor: RecordProcessor, method: str, *arguments: object) -> None:
    """Call a method of a processor; each returns None once its work is done.

    Raises: the method's exception; ProcessorLoadError as `check_returned`.
    """
    result = getattr(processor, method)(*arguments)
    if result is not None:
        check_returned(method, result)


def check_returned(method: str, result: object) -> None:
    """Check the result of a method that should return None. A value does no harm: it is dropped,
    and one warning in a process says so.

    Raises: ProcessorLoadError for a coroutine or a generator, work that has not begun; calling
    the method again would not change that.
    """
    refuse_deferred_result(method, result)
    kind = type(result).__name__
    if (method, kind) not in _dropped:
        _dropped.add((method, kind))
        warnings.warn(
            f"{method} returned a {kind}, which kclrun drops: rows leave with context.emit(row)",
            UserWarning,
            stacklevel=2,
        )


def refuse_deferred_result(method: str, result: object) -> None:
    """Raises: ProcessorLoadError if `method` returned a coroutine or a generator: work that has not
    begun, and that no repetition of the call begins."""
    is_deferred = (
        inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    )
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns of it later, at another place
    if is_deferred:
        raise ProcessorLoadError(
            f"{method} returned a {type(result).__name__}, and nothing of it has run: a method does"
            " its work and returns None"
        )


# Methods, and the names of the types that they returned.
_dropped: Final[set[tuple[str, str]]] = set()


def takes_records(processor: object, called: str) -> bool:
    """Whether a processor (a class or an instance) has `process_record`, not `process_records`.

    `called` names it in the message. Raises: ProcessorLoadError if it has both, or neither.
    """
    kind = processor if isinstance(processor, type) else type(processor)
    own = [
        name
        for name in ("process_records", "process_record")
        if getattr(kind, name) is not getattr(RecordProcessor, name)
    ]
    if len(own) == 1:
        return own[0] == "process_record"
    if own:
        raise ProcessorLoadError(
            f"{called} defines process_records and process_record: the runtime calls one of them\n"
            "Remove one: process_record for single records, process_records for whole batches"
        )
    raise ProcessorLoadError(
        f"{called} does not define process_records\n"
        "Write process_records(self, batch, checkpointer) for whole batches, or"
        " process_record(self, record, context) for single records"
    )


def fires_timers(processor: object) -> bool:
    """Whether a processor (a class or an instance) has `on_timer`."""
    kind = processor if isinstance(processor, type) else type(processor)
    return getattr(kind, "on_timer", None) not in {None, RecordProcessor.on_timer}


def unused_event_time(processor: object) -> str:
    """Why the processor's `event_time` is never called, in words; empty without a problem."""
    kind = processor if isinstance(processor, type) else type(processor)
    own = getattr(kind, "event_time", None)
    if fires_timers(processor) or own in {None, RecordProcessor.event_time}:
        return ""
    return (
        f"{kind.__name__} defines event_time and no on_timer: event_time is never called. It moves"
        " the watermark of timers and Windows, which call on_timer"
    )


def is_asynchronous(processor: object) -> bool:
    """Whether its `process_record` is `async def`."""
    return inspect.iscoroutinefunction(getattr(processor, "process_record", None))
