"""The keyed state of an application: its settings resolved, and their problems.

Pure. The manager makes a `StatePlace` for the start command of a lease process, and
`kclrun check` for its test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

from kclrun.config.convert import Problem
from kclrun.config.outputs import URL, named_outputs
from kclrun.config.processing import WatermarkSettings
from kclrun.config.schema import Settings
from kclrun.model.output import setting_of
from kclrun.model.state import StatePlace, Watermarks

# As `names.BucketUrl`.
_BUCKET: Final = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=/-]*)?")
# A version in S3 costs one PUT: 1,000 leases pay $430 a month at 30 s, and $1,300 at 10 s.
_EVERY_S: Final = 10.0
_EVERY_IN_S3_S: Final = 30.0
_MEMORY_BYTES: Final = 256 * 2**20
# Of less, the pages of SQLite and a part of a snapshot, which is encoded at once, are the most.
_MEMORY_MIN_BYTES: Final = 64 * 2**20


def state_place(settings: Settings) -> StatePlace | None:
    """The store of the state, resolved; None without state."""
    state = settings.state
    if state is None:
        return None
    watermark = settings.watermark or WatermarkSettings()
    is_bucket = state.store.startswith("s3:")
    return StatePlace(
        path=None if is_bucket else state.store,
        s3=state.store if is_bucket else None,
        max_bytes=int(state.max_bytes),
        retain_s=float(state.retain),
        endpoint_url=settings.aws.url_of("s3") if is_bucket else None,
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
    return _EVERY_IN_S3_S if state is not None and state.store.startswith("s3:") else _EVERY_S


def state_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of the state of a fleet."""
    state = settings.state
    yield from _watermark_rules(settings)
    if state is None:
        return
    at = ("state", "store")
    if state.store.startswith("s3:"):
        if not _BUCKET.fullmatch(state.store):
            yield Problem(at, "expected a text like s3://bucket/prefix")
    elif not state.store or URL.match(state.store):
        yield Problem(
            at,
            "expected a folder that all machines of the application share, or s3://bucket/prefix",
        )
    if state.memory is not None:
        if state.local is None:
            yield Problem(("state", "local"), "expected a folder of this machine, for `memory`")
        if state.memory < _MEMORY_MIN_BYTES:
            yield Problem(("state", "memory"), "expected 64MiB or more")
    yield from _outbox_rules(settings) if state.outbox else ()
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
