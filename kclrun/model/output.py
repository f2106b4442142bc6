"""Outputs: where emitted rows go, whose rows they are, and how far a destination has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from kclrun.errors import LimitExceeded, RowsRefused, SettingsError, SinkError
from kclrun.model.names import nearest
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime

# Of the record beside a roll; readers refuse a higher one.
ROLL_VERSION: Final = 1
# The output that `emit` writes to unless it names another one: the setting `output`.
MAIN_OUTPUT: Final = "output"
# What AWS allows in the names of streams and shards, and kclrun in that of an application.
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{0,254}[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}\Z", re.ASCII)
# The largest sub-sequence number: the milliseconds of an AT_TIMESTAMP.
_CURSOR: Final = re.compile(r"([A-Z_]+|\d+)(?:/(\d{1,16}))?(?:\+(\d{1,18}))?\Z")
_ROLL_NAME: Final = re.compile(
    r"(?:0-(AT_TIMESTAMP|TRIM_HORIZON|LATEST)|(0|[1-9]\d{0,128})-(\d{6,10}))(?:\+(\d{6,18}))?\Z"
)


# Why no row is taken, and the state is not changed, outside of a call: what a call emits and
# changes is kept or taken back with it, and belongs to the checkpoint that covers its records.
EMITTED_OUTSIDE: Final = "emit() is for process_records, on_timer and shard_ended, while they run"
CHANGED_OUTSIDE: Final = (
    "context.state is changed in process_records, on_timer and shard_ended, while they run"
)


def setting_of(name: str) -> str:
    """The setting of an output, as messages name it."""
    return MAIN_OUTPUT if name == MAIN_OUTPUT else f"outputs.{name}"


def no_output(to: str, known: Iterable[str]) -> str:
    """Why a row has no place: `to` is not one of the `known` outputs of the settings, by name."""
    names = sorted(known)
    listed = f"The outputs are: {', '.join(names)}" if names else "They have no output"
    if to != MAIN_OUTPUT:
        near = nearest(to, names)
        meant = "" if near is None else f"; did you mean {near!r}?"
        return (
            f"context.emit(…, to={to!r}): there is no outputs.{to} in the settings{meant}\n{listed}"
        )
    if names:
        return (
            "context.emit(row) without `to` is for `output`, which the settings do not have\n"
            f"{listed}"
        )
    return (
        "context.emit() needs a place for the rows: set output.path, or another `output`, in the"
        " settings"
    )


@contextmanager
def naming_output(name: str) -> Iterator[None]:
    """Raises: the error of an output, with its setting: an application may have several. The state,
    which has no name, says itself what it is."""
    try:
        yield
    except (SinkError, SettingsError) as error:
        if not name:
            raise
        named = type(error)(f"{setting_of(name)}: {error}")
        if isinstance(named, RowsRefused):
            named.output = name
        raise named from error


class Cursor(msgspec.Struct, frozen=True, gc=False):
    """Every row of records up to `position` is accounted for, and of the timers that fired after
    that record those of the first `tick`. Ordered and hashable [K1]."""

    position: ExtendedSequenceNumber
    tick: int = 0

    def __lt__(self, other: Cursor) -> bool:
        if self.position == other.position:
            return self.tick < other.tick
        return self.position < other.position

    def __le__(self, other: Cursor) -> bool:
        return not other < self

    def __gt__(self, other: Cursor) -> bool:
        return other < self

    def __ge__(self, other: Cursor) -> bool:
        return not self < other

    def __str__(self) -> str:
        """The text that rows of the lease table and destinations keep: `4957…/3+0`."""
        at = self.position
        sub = f"/{at.sub_sequence_number}" if at.sub_sequence_number else ""
        return f"{at.sequence_number}{sub}" + (f"+{self.tick}" if self.tick else "")

    @classmethod
    def of(cls, reached: ExtendedSequenceNumber) -> Cursor:
        """The cursor of a position with its tick."""
        return cls(reached.of_record, reached.tick)

    @property
    def reached(self) -> ExtendedSequenceNumber:
        """The position with its tick."""
        return self.position if not self.tick else self.position.at_tick(self.tick)

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The cursor that `str` made this text of. Raises: LimitExceeded for any other text."""
        match = _CURSOR.match(text)
        if match is None:
            raise LimitExceeded(f"{text[:40]!r} is not the cursor of an output")
        number, sub, tick = match.groups(default="0")
        return cls(ExtendedSequenceNumber(number, int(sub)), int(tick))


Cursors = tuple[tuple[str, Cursor], ...]


def sorted_cursors(cursors: Mapping[str, Cursor]) -> Cursors:
    """Cursors by the names of their outputs, as a lease and a write keep them."""
    return tuple(sorted(cursors.items()))


class StoredCursors(msgspec.Struct, frozen=True, gc=False):
    """How far each output had the rows when its lease's checkpoint became `at`: both were written
    at once [K2]. A lease whose checkpoint is not `at` was moved by another program."""

    at: ExtendedSequenceNumber
    cursors: Cursors

    def of(self, name: str) -> Cursor | None:
        """The cursor of one output; None if it was not among the outputs then."""
        return dict(self.cursors).get(name)


class RowTrial(msgspec.Struct, frozen=True):
    """Destinations refused rows of records up to `upto` at their commit: the lease begins again
    from its checkpoint, and the rows of each call for these `outputs` are tried before the call
    counts as done. `rounds` counts such beginnings without a commit that passed; that an output
    joins is not another one."""

    upto: ExtendedSequenceNumber
    outputs: tuple[str, ...]
    rounds: int = 1


class RowsOf(msgspec.Struct, frozen=True, kw_only=True):
    """Whose rows they are. Cursors and names at a destination are keyed by everything here but the
    `token` [K4].

    `stream_created_at`: a later stream may have the same name. `generation` counts the resets of
    the application by an operator. `token` is the fencing token of this owner: the
    counter of its claim; a later owner's is greater.

    With `letter` they are the rows of one dead letter that is processed again, and apart from those
    of its shard: the position of its record. `redriven` says where such rows begin and end.
    """

    application: str
    stream: str
    stream_created_at: WallTime
    shard_id: str
    generation: int
    token: int
    letter: ExtendedSequenceNumber | None = None


# For tests of a destination: no rows are sent.
NO_ROWS: Final = RowsOf(
    application="check",
    stream="check",
    stream_created_at=WallTime(0.0),
    shard_id="check",
    generation=0,
    token=0,
)


def redriven(letter: ExtendedSequenceNumber) -> tuple[Cursor, Cursor]:
    """Where the rows of a letter begin, which names them at a destination, and where they end.

    The end is above a commit of the shard at this position: the row of a letter goes over the row
    of a record before it, also if one commit covers both.
    """
    return Cursor(letter), Cursor(letter, 1)


class RollRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the destination keeps of a roll beside its rows: they are those of the records up to
    `end`, a Cursor. `commit` is random, of the one attempt that wrote it; `token` is its owner's.
    With an outbox the first output names the version of the state in `state` [K12].
    """

    end: str
    commit: str
    token: int
    version: int = ROLL_VERSION
    state: str = ""


def refuse_bad_name(name: str) -> None:
    """Raises: SettingsError for a name that is not one of AWS: nothing is named after it."""
    if not _NAME.match(name):
        raise SettingsError(f"{name[:128]!r} is not a name that a file or an object can have")


def roll_folder(of: RowsOf) -> str:
    """Where the rolls of a shard are below the place of an output [K4, K8]. Raises: SettingsError
    for a name that is not one of AWS: nothing is named after it."""
    created = datetime.fromtimestamp(of.stream_created_at, UTC).strftime("%Y%m%dT%H%M%SZ")
    for name in (of.application, of.stream, of.shard_id):
        refuse_bad_name(name)
    # Not the shard's own folder: a roll of it may begin at the position of a letter.
    redriven = "" if of.letter is None else "-redriven"
    return f"{of.application}/{of.stream}/{created}/{of.shard_id}/{of.generation}{redriven}"


def file_name(shard_id: str, generation: int) -> str:
    """The name of a shard's growing file, without its suffix. After a reset the rows begin a file
    of their own: the one before is neither cut back nor continued [K4]."""
    return f"{shard_id}.{generation}" if generation else shard_id


def roll_name(begin: Cursor) -> str:
    """The name of the roll that begins at this cursor, and of no other [K8, R4]. Names of a shard
    sort as its rolls do: one that begins at a sentinel is its first."""
    at = begin.position
    tick = f"+{begin.tick:06}" if begin.tick else ""
    if at.is_sentinel:
        return f"0-{at.sequence_number}{tick}"
    return f"{at.sequence_number}-{at.sub_sequence_number:06}{tick}"


def roll_begin(name: str) -> Cursor | None:
    """The cursor that `roll_name` made this name of; None for any other text."""
    match = _ROLL_NAME.match(name)
    if match is None:
        return None
    sentinel, number, sub, tick = match.groups(default="0")
    position = ExtendedSequenceNumber(number if sentinel == "0" else sentinel, int(sub))
    begin = Cursor(position, int(tick))
    return begin if roll_name(begin) == name else None


class OutputDestination(msgspec.Struct, frozen=True, kw_only=True):
    """One output of the settings, resolved: a lease process opens its destination from this.

    Exactly one of `path`, `s3`, `sql`, `dynamodb`, `kinesis`, `sqs`, `sns`, `firehose` and `use` is
    set. `use` names a class of user code, which gets `options`.
    `s3` is an URL `s3://bucket/prefix`; the others are names, URLs or ARNs. `roll_s` and
    `roll_bytes` end a file or an object; both are 0 for a file that grows (`path`). `key` names
    columns: the key of an upsert, or the column that orders messages. `aggregates`: rows of a
    stream are put into KPL aggregates. `schema` is the text of
    `output.schema`. `endpoint_url` replaces the address of the service.
    """

    name: str
    path: str | None = None
    s3: str | None = None
    sql: str | None = None
    dynamodb: str | None = None
    kinesis: str | None = None
    sqs: str | None = None
    sns: str | None = None
    firehose: str | None = None
    use: str | None = None
    options: dict[str, Any] = {}
    format: str = "json"
    roll_s: float = 0.0
    roll_bytes: int = 0
    buffer_bytes: int = 0
    table: str = ""
    is_upsert: bool = False
    creates_table: bool = False
    key: tuple[str, ...] = ()
    aggregates: bool = False
    schema: str | None = None
    endpoint_url: str | None = None

    @property
    def grows(self) -> bool:
        """Whether it is a file for each shard that is never rolled."""
        return self.path is not None and self.roll_s == 0

    @property
    def stores_cursor(self) -> bool:
        """Whether the destination keeps its cursor with its rows, so that they are there once; one
        of user code may, which is known when its class is loaded."""
        is_rolled = bool(self.path) and not self.grows
        return is_rolled or any(it is not None for it in (self.s3, self.sql, self.use))

    def __repr__(self) -> str:
        """Without the addresses: that of a database may have a password in it."""
        return f"OutputDestination({self.name!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        """The fields for a pretty-printer."""
        return [("name", self.name)]


class Message(msgspec.Struct, frozen=True, gc=False):
    """One row as a message of a queue, a topic or a delivery stream.

    Messages of one `group` keep their order; None has no order to others. A FIFO queue or topic
    drops a message whose `deduplication_id` it took within the last five minutes.
    """

    body: str
    size_bytes: int
    group: str | None = None
    deduplication_id: str = ""

    def __repr__(self) -> str:
        return f"Message({self.size_bytes} bytes)"


class MessageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a service takes: of one message, and of one request with several of them.

    `is_fifo`: every message needs a group and a deduplication id.
    """

    message_bytes_max: int
    batch_bytes_max: int
    batch_messages_max: int
    is_fifo: bool = False
