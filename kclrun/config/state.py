"""The keyed state of an application: its settings resolved, and their problems.

Pure. The manager makes a `StateDestination` for the start command of a lease process, and
`kclrun check` for its test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from kclrun.config.convert import Problem
from kclrun.config.names import BUCKET
from kclrun.config.outputs import URL, named_outputs
from kclrun.config.processing import TABLE_SCHEME, StateSettings, WatermarkSettings
from kclrun.config.schema import Settings
from kclrun.model.output import setting_of
from kclrun.model.state import StateDestination, Watermarks
from kclrun.model.table import TABLE, TABLE_ARN

# A version in S3 costs one PUT: 1,000 leases pay $430 a month at 30 s, and $1,300 at 10 s.
_EVERY_S: Final = 10.0
# Spark has a folder `state` there, of its own operators.
STATE_FOLDER: Final = "kclrun-state"
_EVERY_IN_S3_S: Final = 30.0
_MEMORY_BYTES: Final = 256 * 2**20
# Of less, the pages of SQLite and a part of a snapshot, which is encoded at once, are the most.
_MEMORY_MIN_BYTES: Final = 64 * 2**20


def state_place(settings: Settings) -> StateDestination | None:
    """The store of the state, resolved; None without state."""
    state = settings.state
    if state is None:
        return None
    watermark = settings.watermark or WatermarkSettings()
    store = state.store or below_checkpoint(settings.spark.checkpoint) or ""
    is_bucket, table = store.startswith("s3:"), state.table
    is_folder = not is_bucket and table is None
    return StateDestination(
        path=store if is_folder else None,
        s3=store if is_bucket else None,
        dynamodb=table,
        max_bytes=int(state.max_bytes),
        retain_s=float(state.retain),
        endpoint_url=None if is_folder else settings.aws.url_of("s3" if is_bucket else "dynamodb"),
        local=state.local,
        memory_bytes=_MEMORY_BYTES if state.memory is None else int(state.memory),
        watermarks=Watermarks(
            float(watermark.lateness),
            float(watermark.every),
            None if watermark.idle is None else float(watermark.idle),
        ),
        has_outbox=state.outbox,
        may_begin_empty=state.begin == "empty",
    )


def checkpoint_every(settings: Settings) -> float | Literal["batch", "manual"]:
    """`checkpoint.every`, or what it is where it is left out."""
    every = settings.checkpoint.every
    if every is not None:
        return every if isinstance(every, str) else float(every)
    state = settings.state
    is_in_s3 = state is not None and (state.store or "").startswith("s3:")
    return _EVERY_IN_S3_S if is_in_s3 else _EVERY_S


def below_checkpoint(checkpoint: str | None) -> str | None:
    """Where the state of a query is kept if `state.store` is left out; None for a checkpoint of
    Spark's that is neither a folder nor in S3."""
    if not checkpoint:
        return None
    parts = urlsplit(checkpoint)
    folder = f"{parts.path.rstrip('/')}/{STATE_FOLDER}"
    if parts.scheme in {"s3", "s3a", "s3n"}:
        return f"s3://{parts.netloc}{folder}"
    if parts.scheme == "file":
        return unquote(folder)
    return None if URL.match(checkpoint) else f"{checkpoint.rstrip('/')}/{STATE_FOLDER}"


def state_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of the state of a fleet."""
    state = settings.state
    yield from _watermark_rules(settings)
    if state is None:
        return
    yield from _store_rules(state.store)
    if state.memory is not None:
        if state.local is None:
            yield Problem(("state", "local"), "expected a folder of this machine, for `memory`")
        if state.memory < _MEMORY_MIN_BYTES:
            yield Problem(("state", "memory"), "expected 64MiB or more")
    yield from _outbox_rules(settings) if state.outbox else ()
    yield from _size_rules(state)


def spark_state_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of the state of a query, and what it does not have yet on Spark."""
    state = settings.state
    yield from _watermark_rules(settings)
    if settings.watermark is not None and settings.watermark.idle is not None:
        yield Problem(
            ("watermark", "idle"),
            "is for engine: fleet: on Spark timers fire by the records alone",
        )
    if state is None:
        return
    if settings.pipeline is not None:
        yield Problem(("state",), "is for a processor; a pipeline has the state of Spark")
    if settings.streams:
        yield Problem(("state",), "is for one `stream` with engine: spark")
    for name in ("local", "memory", "outbox"):
        if getattr(state, name):
            yield Problem(("state", name), "is for engine: fleet")
    if state.table is not None:
        yield Problem(
            ("state", "store"),
            "a table is for engine: fleet; expected a folder or s3://bucket/prefix",
        )
    elif state.store is not None:
        yield from _store_rules(state.store)
    elif settings.spark.checkpoint and below_checkpoint(settings.spark.checkpoint) is None:
        yield Problem(
            ("state", "store"),
            "is missing: spark.checkpoint is neither a folder nor in S3; name a folder that all"
            " machines share, or s3://bucket/prefix",
        )
    yield from _size_rules(state)


def _store_rules(store: str | None) -> Iterator[Problem]:
    at = ("state", "store")
    if store is not None and store.startswith("s3:"):
        if not re.fullmatch(BUCKET, store):
            yield Problem(at, "expected a text like s3://bucket/prefix")
    elif store is not None and store.startswith((TABLE_SCHEME, "arn:")):
        if not re.fullmatch(f"{TABLE}|{TABLE_ARN}", store.removeprefix(TABLE_SCHEME)):
            yield Problem(at, "expected a text like dynamodb://table, or the ARN of a table")
    elif not store or URL.match(store):
        known = (
            "a folder that all machines of the application share, s3://bucket/prefix, or"
            " dynamodb://table"
        )
        yield Problem(at, f"is missing; {known}" if store is None else f"expected {known}")


def _size_rules(state: StateSettings) -> Iterator[Problem]:
    if state.max_bytes <= 0:
        yield Problem(("state", "max_bytes"), "expected more than nothing, such as 1GiB")


def _outbox_rules(settings: Settings) -> Iterator[Problem]:
    """The first output decides, so it keeps the version's name with its rows; and no output has
    rows before that [K12]."""
    named = named_outputs(settings)
    if not named:
        yield Problem(("state", "outbox"), "is for rows, and there is no `output`")
        return
    for name, output in named:
        at = tuple(setting_of(name).split("."))
        if output.path is not None and output.roll is None:
            yield Problem((*at, "roll"), "is missing: with state.outbox a file is rolled; `{}`")
    name, first = named[0]
    if first.s3 is None and first.sql is None and first.path is None:
        yield Problem(
            tuple(setting_of(name).split(".")),
            "is the first output, and with state.outbox that decides what was done: put one with"
            " s3, sql, or path and roll before it",
        )


def _watermark_rules(settings: Settings) -> Iterator[Problem]:
    watermark = settings.watermark
    if watermark is None:
        return
    if settings.state is None:
        yield Problem(("watermark",), "is for timers, which are kept with `state`: set that")
    if watermark.every <= 0:
        yield Problem(("watermark", "every"), "expected more than nothing, such as 1s")
    if watermark.idle is not None and watermark.idle <= 0:
        yield Problem(("watermark", "idle"), "expected more than nothing, such as 30s")
