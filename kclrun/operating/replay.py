"""The settings of a replay: the application's, with leases, outputs and state of its own.

Pure. It decides what a replay may not touch: the live lease table, the destinations of the outputs,
the state, the dead letters, and what watches the fleet.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from posixpath import join
from typing import Final

import msgspec

from kclrun.config.destinations import DeadLetterSettings, OutputSettings, RollSettings
from kclrun.config.outputs import named_outputs, output_places
from kclrun.config.schema import (
    InstanceSettings,
    Settings,
)
from kclrun.config.units import StartPosition
from kclrun.errors import SettingsError
from kclrun.model.lease import replay_tables
from kclrun.model.output import MAIN_OUTPUT, setting_of
from kclrun.model.quotas import TABLE_NAME_CHARACTERS_MAX
from kclrun.model.reading import Replay
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.time import WallTime, utc_text

_LABEL: Final = re.compile(r"[A-Za-z0-9_.]{1,64}\Z", re.ASCII)
# Thirty keys of Kinesis' 256 characters. A start command has 16 KiB beside options and columns.
_KEYS_BYTES_MAX: Final = 8 * 1024
# For one range: two of a thousand sets of keys collide about once in ten thousand times.
_KEYS_DIGITS: Final = 8


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for. `label` is that of `--as`; `processor` replaces the one of
    the settings, and then rows are kept with their cursors, for a comparison. `stops`: up to where
    each shard is read, by its id, to rebuild the state; `until_at` is not used then."""

    start: StartPosition
    until_at: WallTime = WallTime(math.inf)
    stops: Mapping[str, ExtendedSequenceNumber] | None = None
    keys: tuple[str, ...] = ()
    label: str = ""
    processor: str | None = None
    side: str = ""
    has_same_outputs: bool = False

    @property
    def start_text(self) -> str:
        """As `start:` of the settings takes it."""
        at = self.start.at
        if at is None:
            return self.start.sentinel.sequence_number
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")

    @property
    def name(self) -> str:
        """The name of the replay: the same range, keys and label always have the same one, so that
        the same command goes on with a replay that was interrupted, and another never does."""
        begin = "TRIM_HORIZON" if self.start.at is None else _stamp(self.start.at)
        if self.stops is not None:
            stops = "\n".join(sorted(f"{shard} {at}" for shard, at in self.stops.items()))
            return f"rebuild-{begin}-{hashlib.sha256(stops.encode()).hexdigest()[:_KEYS_DIGITS]}"
        parts = [self.label, begin, _stamp(self.until_at)]
        if self.keys:
            keys = "\n".join(sorted(self.keys)).encode()
            parts.append("keys" + hashlib.sha256(keys).hexdigest()[:_KEYS_DIGITS])
        return "-".join(part for part in (*parts, self.side) if part)


def refuse_label(label: str) -> None:
    """Raises: SettingsError for what cannot be a part of a table's name, or holds a dash, by which
    the parts of a name are separated."""
    if not _LABEL.match(label):
        raise SettingsError(
            f"--as: expected 1 to 64 of letters, digits, _ and ., got {label[:80]!r}"
        )


def refuse_keys(keys: Sequence[str]) -> None:
    """Raises: SettingsError for more than a start command has room for (`config/rules.py`)."""
    size = sum(len(key.encode(errors="replace")) for key in keys)
    if size > _KEYS_BYTES_MAX:
        raise SettingsError(
            f"--key: {size:,} bytes, at most {_KEYS_BYTES_MAX:,}: each start of a lease process"
            " sends them. Replay all keys, and let the processor choose"
        )


def replay_table(settings: Settings, asked: ReplayOptions) -> str:
    """The lease table of a replay, never that of the fleet. Raises: SettingsError."""
    table = replay_tables(settings.application) + asked.name
    if len(table) > TABLE_NAME_CHARACTERS_MAX:
        raise SettingsError(f"--as: the lease table would have a name of {len(table)} characters")
    return table


def replay_of(settings: Settings, asked: ReplayOptions) -> Replay:
    """The range, as lease processes get it."""
    names = tuple(place.name for place in output_places(settings, ONLY_STREAM))
    is_compared = asked.processor is not None
    if asked.stops is not None:
        return Replay(stops=asked.stops, row_names=names)
    return Replay(until_at=asked.until_at, keys=asked.keys, row_names=names if is_compared else ())


def settings_of_replay(settings: Settings, asked: ReplayOptions, folder: str) -> Settings:
    """The settings that the replay runs with. `folder` is where its rows go; its
    path is absolute.

    Raises: SettingsError for the other engine.
    """
    if settings.engine == "spark":
        raise SettingsError(
            "engine: spark has no leases to replay with: read the range as a batch"
            " (startingPosition, endingPosition), or set engine: fleet"
        )
    table = replay_table(settings, asked)
    is_compared = asked.processor is not None
    state = settings.state
    letters = DeadLetterSettings(path=join(folder, "dead-letters"))
    streams = tuple(
        msgspec.structs.replace(stream, start=None, processor=asked.processor or stream.processor)
        for stream in settings.streams
    )
    fetch = msgspec.structs.replace(settings.fetch, mode="polling", consumer=None)
    if is_compared:
        fetch = msgspec.structs.replace(fetch, batch_max=1)
    if asked.stops is not None:
        outputs = {}
    elif is_compared:
        outputs = _compared(settings, folder)
    else:
        outputs = _redirected(settings, asked, folder)
    return msgspec.structs.replace(
        settings,
        application=table,
        processor=asked.processor or settings.processor,
        streams=streams,
        start=asked.start_text,
        until="caught-up",
        summary=None,
        # Rows of ended shards stay: they are what a repetition of the command goes on from.
        leases=msgspec.structs.replace(settings.leases, table=None, create=True, cleanup=False),
        fetch=fetch,
        output=outputs.pop(MAIN_OUTPUT, None),
        outputs=outputs,
        state=None
        if state is None
        else msgspec.structs.replace(
            state,
            store=join(folder, "state"),
            outbox=state.outbox and asked.stops is None,
        ),
        on_error=msgspec.structs.replace(settings.on_error, dead_letter=letters)
        if settings.on_error.then == "dead-letter"
        else settings.on_error,
        # The endpoint, the metrics and the instance are those of the fleet.
        observe=msgspec.structs.replace(
            settings.observe, listen=None, cloudwatch=None, story="nowhere"
        ),
        instance=InstanceSettings(watch=False),
    )


def _redirected(settings: Settings, asked: ReplayOptions, folder: str) -> dict[str, OutputSettings]:
    """JSON lines under the folder. A file that grows is cut back to the checkpoint of its reader,
    so even with the same outputs those of a folder are never shared with the fleet."""
    return {
        name: output
        if asked.has_same_outputs and output.path is None
        else OutputSettings(
            path=join(folder, name),
            # Only the main output may be a file that grows.
            roll=None if name == MAIN_OUTPUT else RollSettings(),
            schema=output.schema,
            buffer=output.buffer,
        )
        for name, output in named_outputs(settings)
    }


def _compared(settings: Settings, folder: str) -> dict[str, OutputSettings]:
    """All rows in one file a shard."""
    return {MAIN_OUTPUT: OutputSettings(path=folder)} if named_outputs(settings) else {}


def plan_lines(settings: Settings, replayed: Settings, asked: ReplayOptions) -> Iterator[str]:
    """What the replay will do, in sentences."""
    began = (
        "the oldest record" if asked.start.at is None else utc_text(asked.start.at, "milliseconds")
    )
    yield f"{settings.stream_names}: from {began} up to {utc_text(asked.until_at, 'milliseconds')}"
    if asked.keys:
        keys = "1 partition key" if len(asked.keys) == 1 else f"{len(asked.keys)} partition keys"
        yield f"  keys: only records of {keys} reach the processor"
    yield f"  leases: of its own, in table {replayed.table}; those of the fleet are not touched"
    before = dict(named_outputs(settings))
    for name, output in named_outputs(replayed):
        yield f"  {setting_of(name)}: {_fate(before[name], output)}"
    if replayed.state is not None:
        yield (
            f"  state: begins empty, in {replayed.state.store}: what records before the range"
            " left is missing"
        )
    if replayed.on_error.then == "dead-letter":
        yield f"  dead letters: in {replayed.on_error.dead_letter.path}"
    yield "  What the processor itself does elsewhere, it does again."


def _fate(before: OutputSettings, now: OutputSettings) -> str:
    if now.path is not None:
        shape = "a file a shard" if now.roll is None else "files that are rolled"
        return f"JSON lines in {now.path}, {shape}"
    if before.sql is not None:
        done = "replaced where the key is there" if before.write == "upsert" else "inserted again"
        return f"THE SAME table {before.table}: its rows are {done}"
    if before.dynamodb is not None:
        return f"THE SAME table {before.dynamodb}: items are put again"
    if before.s3 is not None:
        return f"THE SAME place {before.s3}: more objects, named by the replay"
    return "THE SAME destination: messages are sent again"


def _stamp(at: float) -> str:
    """An instant for names, to the millisecond; names of a table have no colons."""
    whole = datetime.fromtimestamp(at, UTC)
    return f"{whole:%Y%m%dT%H%M%S}.{whole.microsecond // 1000:03d}Z"
