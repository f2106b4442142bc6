"""Whether a processor's method fits the settings, in words."""

from __future__ import annotations

from kclrun.errors import ProcessorLoadError
from kclrun.methods import fires_timers, is_asynchronous, takes_records
from kclrun.model.policies import Concurrency

# Two calls with one key would both begin from what the key held before them.
NO_ORDER = (
    "state: needs concurrency.order: key: without it records of one partition key run at the same"
    " time, and one would undo what the other remembered\nUse order: key, or remove one of the two"
    " settings"
)


def why_misfit(
    *,
    is_single: bool,
    is_async: bool,
    concurrency: Concurrency | None,
    is_manual: bool,
    has_state: bool = False,
    has_timers: bool = False,
) -> str | None:
    """Why a processor of this kind does not fit these settings, in words; None if it does."""
    if has_timers and is_manual:
        return (
            "on_timer is for checkpoints of the runtime: what a timer changes is committed with the"
            " records before it\nUse a duration, or `batch`, for checkpoint.every"
        )
    if not is_single:
        if concurrency is None:
            return None
        return (
            "concurrency: is for process_record, and this processor has process_records, which gets"
            " whole batches\nWrite process_record(self, record, context), or remove the setting"
        )
    if is_manual:
        return (
            "checkpoint.every: manual is for process_records: with process_record a checkpoint"
            " covers the records that are done, which only the runtime knows\nUse a duration, or"
            " batch"
        )
    if has_state and concurrency is not None and not concurrency.keeps_keys_in_order:
        return NO_ORDER
    if concurrency is not None and concurrency.timeout_s is not None and not is_async:
        return (
            "concurrency.timeout: is for `async def process_record`: a thread cannot be stopped\n"
            "Remove it (what stands still for `stall` is ended in any case), or write async def"
        )
    return None


def require_fit(
    processor: object,
    called: str,
    concurrency: Concurrency | None,
    *,
    is_manual: bool,
    has_state: bool = False,
) -> bool:
    """Whether the processor takes single records. Raises: ProcessorLoadError if it does not fit."""
    is_single = takes_records(processor, called)
    wrong = why_misfit(
        is_single=is_single,
        is_async=is_asynchronous(processor),
        concurrency=concurrency,
        is_manual=is_manual,
        has_state=has_state,
        has_timers=fires_timers(processor),
    )
    if wrong is not None:
        raise ProcessorLoadError(f"{called}: {wrong}")
    return is_single
