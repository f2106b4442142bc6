"""The settings of a lease as the values that the cores decide by (`model/policies.py`).

The only place where a setting becomes such a value: for the start commands of the fleet, for the
processors of Spark, and for the verbs. Pure.
"""

from __future__ import annotations

from kclrun.config.log import own_packages
from kclrun.config.processing import ConcurrencySettings
from kclrun.config.schema import OnErrorSettings, Settings
from kclrun.config.state import checkpoint_every
from kclrun.model.policies import (
    CheckpointPolicy,
    Concurrency,
    ErrorPolicy,
    FetchPolicy,
    LogPolicy,
    TracePolicy,
)
from kclrun.model.stream import is_change_stream


def error_policy(on_error: OnErrorSettings) -> ErrorPolicy:
    return ErrorPolicy(
        retries=on_error.retries,
        backoff_s=float(on_error.backoff),
        then=on_error.then,
        max_age_s=None if on_error.max_age is None else float(on_error.max_age),
        limit=on_error.limit,
    )


def checkpoint_policy(settings: Settings) -> CheckpointPolicy:
    every = checkpoint_every(settings)
    return CheckpointPolicy(
        mode=every if isinstance(every, str) else "auto",
        every_s=0.0 if isinstance(every, str) else every,
        uncheckpointed_max=settings.checkpoint.uncheckpointed_max,
    )


def fetch_policy(settings: Settings, stream: str) -> FetchPolicy:
    """How the shards of `stream`, a name or an ARN, are read."""
    fetch = settings.fetch
    # A hot shard is found by its hash keys and split by a user. In DynamoDB Streams, shards have no
    # hash keys, and no user splits them.
    hot_window_s = 0.0 if is_change_stream(stream) else float(settings.observe.hot_window)
    return FetchPolicy(
        idle_s=float(fetch.idle),
        every_s=float(fetch.every),
        buffer_bytes=int(fetch.buffer),
        batch_max=fetch.batch_max,
        kpl_range=fetch.kpl_range,
        hot_window_s=hot_window_s,
    )


def concurrency_of(
    concurrency: ConcurrencySettings | None, settings: Settings
) -> Concurrency | None:
    """`concurrency` of the application, or of one of its streams; None where it is left out."""
    if concurrency is None:
        return None
    return Concurrency(
        records=concurrency.records,
        order=concurrency.order,
        timeout_s=None if concurrency.timeout is None else float(concurrency.timeout),
        grace_s=float(settings.shutdown.grace),
    )


def log_policy(settings: Settings, *, as_json: bool) -> LogPolicy:
    return LogPolicy(
        level=settings.log.level,
        json=as_json,
        levels=dict(settings.log.levels),
        own=own_packages(settings),
    )


def trace_policy(settings: Settings) -> TracePolicy | None:
    """None where no traces are sent."""
    otlp = settings.observe.otlp
    if otlp is None or otlp.traces is None:
        return None
    return TracePolicy(
        endpoint=otlp.endpoint, sample=otlp.traces.sample, context=otlp.traces.context
    )
