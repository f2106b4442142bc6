"""Outputs of one's own: the class that users subclass to send emitted rows to any place.

The settings name it: `output: {use: "my.module:MyOutput", options: {…}}`. Contracts stand in the
docstrings, and `kclrun.testing.assert_output_contract` checks them. May know: the model and the
errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import msgspec

__all__ = ["Output", "OutputContext"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # see model/record.py

    O_co = TypeVar("O_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    O_co = TypeVar("O_co", covariant=True)


class OutputContext(msgspec.Struct, Generic[O_co], frozen=True, kw_only=True):
    """Whose rows an output gets. Made by the runtime, one for each shard and owner of its lease.

    `name` is the name of the output in the settings (`output` for the one without a name);
    `options` the mapping of the same name, or what `options_as` of the class makes of it.

    `key` names the rows of this shard at the destination: it has the application, the stream with
    its creation time, the shard, the generation and the name of the output. It is the same for
    every owner of the shard, and another one after `kclrun reset`. A destination that stores a
    cursor stores one for each `key`. `fencing_token` only grows from owner to owner of the shard.
    """

    name: str
    options: O_co
    application: str
    stream: str
    shard_id: str
    key: str
    fencing_token: int


class Output:
    """Where emitted rows go: an HTTP API, a store, a queue. Subclass it, and name the class in the
    settings as `output: {use: "my.module:MyOutput", options: {…}}` or in `outputs`.

    There are two kinds. Define `send`, and each row is there at least once. Or define `begin` and
    `commit`, and each row is there exactly once: the destination stores a cursor with the rows, and
    both change together or not at all.

    The runtime keeps the order of the rows, takes back the rows of a call of the processor that
    raised, holds at most `output.buffer` bytes, and tries again while the destination is away. A
    checkpoint passes a record only when its rows are written.

    An instance is made without arguments, in the process of the lease, for one shard. It serves
    from `open` to `close`. After an error it is closed, and a new instance is opened before the
    call is repeated: a subclass repairs nothing. An instance is never pickled and never crosses a
    fork, unless you open connections while your module is imported: open them in `open`.

    Calls come one at a time, but not always on the same thread (`sqlite3.connect` needs
    `check_same_thread=False`); `check_row` alone is called by several threads at a time. No call
    is made by the thread that renews the lease: while a call hangs, the lease stays, its rows wait,
    and when the buffer is full its records do. The runtime ends no call, so set the time limits of
    your client. The end of a lease waits a second for a call that is under way; then the call is
    left behind, as in a crash.

    What a method raises decides what happens, and the log names the output, the method and the line
    of yours. `Superseded`: another owner has written there; the lease begins again from the
    stored cursor. `RowsRefused`: the destination refuses these rows for their values; see
    `try_rows`. `HaltShard`: no repetition helps; the lease is halted with this reason until an
    operator resumes it. Anything else: the destination is away; the same call comes again after
    1, 2, 4, … 30 s, without end. Put no value of a row and no password into a message.

    With `engine: fleet`. On Spark `use` is refused: the output is a format of Spark there.

    `options_as` is a type for the `options`, such as a msgspec.Struct: `context.options` is one of
    these, and an option that it does not know, or that has another type, is an error of the start
    and of `kclrun check`. `rows_max` is the most rows of one call of `send`.
    """

    options_as: ClassVar[Any] = None
    rows_max: ClassVar[int] = 500

    def open(self, context: OutputContext) -> None:
        """Connect to the destination. The first call of an instance.

        Must not: write, or take anything over from another owner, who may still be writing.
        """

    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows; of an output that has each row at least once.

        Called with 1 to `rows_max` rows, in the order in which they were emitted, as soon as their
        records are done.
        Guaranteed: rows are given again only if this call raised, or after a crash. The rows of one
        call are then not always those of another.
        Must not: return before the destination has acknowledged every row: the checkpoint passes
        them. Nor keep rows for a later call, nor change them.
        """
        raise NotImplementedError

    def begin(self) -> str | None:
        """The cursor that is stored for `context.key`, None if there is none; of an output that has
        each row exactly once.

        Called after `open`, before the first `commit`, and once more after an error or while
        another output of the lease is away.
        Take the key over as well, if the destination is able to: store `context.fencing_token`, so
        that a `commit` with a smaller one is refused from now on. Raise Superseded for a stored
        token above it: it is of a later owner.
        """
        raise NotImplementedError

    def commit(self, rows: Sequence[Mapping[str, Any]], after: str | None, upto: str) -> None:
        """Write the rows and store the cursor `upto`, in one transaction; of an output that has
        each row exactly once.

        `after` is the cursor of the commit before this one, or what `begin` returned. Cursors are
        texts of up to 170 characters, of letters, digits and `/+_`: store them as they are. The
        rows are those between the two, in the order in which they were emitted: at least one.
        Called when a checkpoint is due, or `output.buffer` is full.

        Require, in the same transaction, that the stored cursor is still `after`. Then neither a
        request that arrives late nor another owner adds rows twice. If it is not: `upto` with your
        own token means that this commit was applied before, and its reply was lost: return. Else
        raise Superseded, and leave nothing behind.
        Guaranteed: if the call raises, the same rows are given again with the same cursors, before
        any others. After a crash the next owner gets the rows after the cursor that its `begin`
        returns: a processor that is deterministic emits the same ones.
        Must not: return before rows and cursor are durable. Nor change the rows.
        """
        raise NotImplementedError

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that can never be written. Called by `context.emit` on threads of the
        processor, several at a time, after the first `open`, and also while the instance is closed
        after an error: use nothing that `close` takes away. Without it every row is taken that
        msgspec encodes.

        Raises: TypeError or ValueError, naming the column and never a value. `emit` raises it, so
        that `on_error` decides about the record.
        """

    def try_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Let the destination check the rows, and keep none of them: a transaction that is rolled
        back, a dry run of an API. Optional, for a destination with constraints of its own.

        With it, after `RowsRefused`, the lease begins again from its checkpoint, and the rows of
        each call of the processor are tried before the call counts as done: `on_error` decides
        about the records at fault. Without it, RowsRefused halts the lease.
        Raises: RowsRefused for rows that `send` or `commit` would refuse.
        """
        raise NotImplementedError

    def check(self) -> str | None:
        """The destination in words, if it is there and may be written to: for `kclrun check` and
        the start of a run. Called after `open`, in a process of its own, without `begin`. It may
        take ten seconds.

        Must not: leave anything behind that a reader takes for a row. Raises: whatever you like;
        HaltShard for what a person has to correct.
        """
        return None

    def close(self) -> None:
        """Release connections and files. The last call of an instance, also after an error of
        `open`; not after a crash.

        Must not: write. What `send` and `commit` took is written already; nothing else may appear.
        """
