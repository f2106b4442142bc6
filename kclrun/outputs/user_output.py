"""An output of user code (`kclrun.Output`) as an output of the runtime.

User code writes, and reports how far its destination is. This module decides which rows wait,
which call is repeated, and with which cursors. Must not know: leases, threads, settings.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kclrun.calling.tracebacks import describe
from kclrun.codec.row_lines import ROW_BYTES_MAX, encode_row_line
from kclrun.errors import (
    ConfigError,
    HaltShard,
    LimitExceeded,
    RecordError,
    RowsRefused,
    SettingsError,
    SinkError,
    Superseded,
)
from kclrun.methods import refuse_deferred_result
from kclrun.model.output import Cursor, RowsOf
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.output import Output, OutputContext
from kclrun.ports import Output as Port
from kclrun.processor import Row
from kclrun.state.boxes import pack_row, unpack_row


def open_user_output(kind: type[Output], named: str, context: OutputContext) -> UserOutput:
    """The output that user code has; nothing of it runs. `named` is how messages call the class."""
    is_tried = kind.try_rows is not Output.try_rows
    if stores_cursor(kind):
        storing = TriedStoringOutput if is_tried else StoringOutput
        return storing(kind, named, context)
    sending = TriedSendingOutput if is_tried else SendingOutput
    return sending(kind, named, context)


def stores_cursor(kind: type[Output]) -> bool:
    """Whether it is an output that has each row exactly once."""
    return kind.commit is not Output.commit


def key_of(of: RowsOf, output: str) -> str:
    """The name of these rows at a destination, for every owner of the shard."""
    created_ms = round(of.stream_created_at * 1000)
    # The redrive of a letter has a cursor of its own, which stays.
    shard = of.shard_id if of.letter is None else f"{of.shard_id}@{Cursor(of.letter)}"
    return f"{of.application}/{of.stream}/{created_ms}/{shard}/{of.generation}/{output}"


class UserOutput(ABC):
    """Implements `ports.Output`; its kinds have `add`, `unsent_bytes` and `commit`.

    Rows wait as bytes, so that user code that changes a row changes a copy. After an error the
    instance is closed, and the next call opens a new one.
    """

    stores_cursor: bool

    def __init__(self, kind: type[Output], named: str, context: OutputContext) -> None:
        self._kind = kind
        self._named = named
        self._context = context
        self._opened: Output | None = None
        self._latest: Output | None = None  # checks rows also while it is closed after an error
        self._checks_rows = kind.check_row is not Output.check_row

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._named})"

    def encode(self, row: Row) -> tuple[bytes, int]:
        """Pack the row; user code may refuse it first."""
        packed = _packed(row)
        if self._checks_rows:
            self._check_row(unpack_row(packed))
        return packed, len(packed)

    def _check_row(self, row: Row) -> None:
        assert self._latest is not None, "begin comes first"
        try:
            self._latest.check_row(row)
        except (TypeError, ConfigError, RecordError):
            raise
        except Exception as error:
            raise TypeError(f"{self._named} refuses the row: {error}") from error

    def begin(self, at: Cursor) -> Cursor:
        with self._calling("open"):
            self._instance()
        return at

    def check(self) -> str:
        with self._calling("open"):
            output = self._instance()
        with self._calling("check"):
            words = output.check()
        return f"{self._named}: {words}" if isinstance(words, str) and words else self._named

    def close(self) -> None:
        output, self._opened = self._opened, None
        if output is not None:
            # Nothing is lost with it, and its lease ends, or goes on with another instance.
            with contextlib.suppress(Exception, SystemExit):
                output.close()

    def _instance(self) -> Output:
        """The instance that is open."""
        if self._opened is None:
            self._opened = self._latest = self._kind()
            _call(self._opened.open, self._context)
        return self._opened

    @abstractmethod
    def add(self, rows: Sequence[bytes], upto: Cursor) -> None: ...

    @property
    @abstractmethod
    def unsent_bytes(self) -> int: ...

    @abstractmethod
    def commit(self) -> Cursor: ...

    @abstractmethod
    def _unwritten(self) -> list[bytes]:
        """The rows that were added and are not known to be written."""

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """Raises: an error of user code as what it means to the runtime. The instance is closed."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.close()
            raise self._meaning(method, error) from error

    def _meaning(self, method: str, error: BaseException) -> SinkError | SettingsError:
        failure = describe(error)
        at = f" ({failure.raised_at})" if failure.raised_at else ""
        where = f"{self._named}.{method}"
        match error:
            case Superseded():
                return Superseded(f"{where}: {error}")
            case RowsRefused():
                words = f"{where} refuses rows{at}: {error}"
                if self._kind.try_rows is not Output.try_rows:
                    return RowsRefused(words)
                return SettingsError(f"{words}\nWith `try_rows` their records would be found")
            case HaltShard() | ConfigError():
                return SettingsError(f"{where}{at}: {error}")
        return SinkError(f"{where} raised {failure.error}{at}\n{failure.traceback_text}".rstrip())


class SendingOutput(UserOutput):
    """An output with `send`: rows are sent as they are added, and `commit` sends the rest."""

    stores_cursor = False

    def __init__(self, kind: type[Output], named: str, context: OutputContext) -> None:
        super().__init__(kind, named, context)
        self._rows: list[bytes] = []
        self._unsent_bytes = 0
        self._upto = Cursor(TRIM_HORIZON)
        self._is_away = False  # until the next commit

    def begin(self, at: Cursor) -> Cursor:
        self._upto = at
        return super().begin(at)

    def add(self, rows: Sequence[bytes], upto: Cursor) -> None:
        """Send the rows; never fails. If a call of user code fails, `commit` repeats it."""
        self._rows.extend(rows)
        self._unsent_bytes += sum(map(len, rows))
        self._upto = upto
        if not self._is_away:
            with contextlib.suppress(SinkError, SettingsError):
                self._send()

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    def commit(self) -> Cursor:
        self._send()
        return self._upto

    def _send(self) -> None:
        self._is_away = True
        most = max(1, self._kind.rows_max)
        while self._rows:
            part = self._rows[:most]
            with self._calling("open"):
                output = self._instance()
            with self._calling("send"):
                _call(output.send, _unpacked(part))
            del self._rows[: len(part)]
            self._unsent_bytes -= sum(map(len, part))
        self._is_away = False

    def _unwritten(self) -> list[bytes]:
        return self._rows


class _Batch(msgspec.Struct):
    """Rows of one commit. Once it was tried, it stays as it is until its outcome is known."""

    rows: list[bytes]
    upto: Cursor
    size_bytes: int = 0


class StoringOutput(UserOutput):
    """An output with `begin` and `commit`: a commit whose outcome is unknown is repeated with the
    same rows and the same cursors."""

    stores_cursor = True

    def __init__(self, kind: type[Output], named: str, context: OutputContext) -> None:
        super().__init__(kind, named, context)
        self._began: str | None = None
        self._confirmed = Cursor(TRIM_HORIZON)
        self._sent: _Batch | None = None
        self._added: _Batch | None = None

    def begin(self, at: Cursor) -> Cursor:
        try:
            self._began = self._stored()
        except Superseded as error:
            raise SettingsError(
                f"{error}\n"
                "Either another process owns the lease by now, or the lease table is older than the"
                " destination: it was created again, or restored from a backup.\n"
                f"In that case remove the token that is stored there for {self._context.key}"
            ) from error
        self._confirmed = at if self._began is None else max(at, self._parsed(self._began))
        return self._confirmed

    def _stored(self) -> str | None:
        """The cursor that is stored, once the key is taken over."""
        with self._calling("open"):
            output = self._instance()
        with self._calling("begin"):
            stored = output.begin()
            refuse_deferred_result("begin", stored)
        return stored

    def _parsed(self, stored: str) -> Cursor:
        try:
            return Cursor.parse(stored)
        except (LimitExceeded, TypeError) as error:
            raise SettingsError(
                f"{self._named}.begin returned a cursor that no commit stored: {error}"
            ) from None

    def add(self, rows: Sequence[bytes], upto: Cursor) -> None:
        if self._added is None:
            self._added = _Batch([], upto)
        self._added.rows.extend(rows)
        self._added.upto = upto
        self._added.size_bytes += sum(map(len, rows))

    @property
    def unsent_bytes(self) -> int:
        batches = [batch for batch in (self._sent, self._added) if batch is not None]
        return sum(batch.size_bytes for batch in batches)

    def commit(self) -> Cursor:
        while self._sent is not None or self._added is not None:
            if self._sent is None:
                self._sent, self._added = self._added, None
                continue
            # Without rows there is nothing to write exactly once: the cursor may stay.
            if self._sent.rows:
                self._write(self._sent)
            self._confirmed, self._sent = self._sent.upto, None
        return self._confirmed

    def _write(self, batch: _Batch) -> None:
        upto = str(batch.upto)
        if self._opened is None and self._stored() not in {self._began, upto}:
            raise Superseded(f"{self._named}: another owner moved the cursor of its shard")
        with self._calling("commit"):
            output = self._instance()
            _call(output.commit, _unpacked(batch.rows), self._began, upto)
        self._began = upto

    def _unwritten(self) -> list[bytes]:
        sent = self._sent
        if sent is not None and self._stored() == str(sent.upto):
            sent = None  # it was applied, and its reply was lost
        batches = [batch for batch in (sent, self._added) if batch is not None]
        return [row for batch in batches for row in batch.rows]


class _Tried(UserOutput):
    """Implements `ports.TryingOutput`: the destination may refuse rows for their values."""

    def is_tried_with(self, _other: Port) -> bool:
        return False

    def try_rows(
        self, rows: Sequence[bytes], before: Sequence[tuple[Port, Sequence[bytes]]]
    ) -> None:
        own = [row for output, given in before if output is self for row in given]
        waiting = [*self._unwritten(), *own]
        try:
            self._try([*waiting, *rows])
        except RowsRefused as error:
            self._try(waiting)  # are they refused without these rows?
            raise TypeError(str(error)) from None

    def _try(self, rows: Sequence[bytes]) -> None:
        if not rows:
            return
        with self._calling("open"):
            output = self._instance()
        with self._calling("try_rows"):
            _call(output.try_rows, _unpacked(rows))


class TriedSendingOutput(SendingOutput, _Tried):
    """An output with `send` and `try_rows`."""


class TriedStoringOutput(StoringOutput, _Tried):
    """An output with `begin`, `commit` and `try_rows`."""


def _packed(row: Row) -> bytes:
    """Raises: TypeError, naming the column, for a value that no destination can hold."""
    try:
        packed = pack_row(row)
    except (TypeError, ValueError, OverflowError, RecursionError):
        encode_row_line(row)  # raises with the name of the column
        raise TypeError("a value of the row cannot be encoded") from None
    if len(packed) > ROW_BYTES_MAX:
        raise LimitExceeded(f"a row of {len(packed)} bytes; at most {ROW_BYTES_MAX} are taken")
    return packed


def _unpacked(rows: Sequence[bytes]) -> list[dict[str, Any]]:
    return [unpack_row(row) for row in rows]


def _call(method: Callable[..., object], *arguments: object) -> None:
    """Raises: what the method raises; ProcessorLoadError if it returned work that has not begun."""
    refuse_deferred_result(method.__name__, method(*arguments))
