"""The contract of an output of one's own, checked in one call: rows, cursors, owners and crashes.

The output is called as the runtime calls it, over its real destination. Crashes and errors come at
each line of its own code.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

from kclrun.errors import RowsRefused, SettingsError, SinkError, Superseded
from kclrun.loading import decoded_options, refuse_bad_output
from kclrun.model.output import MAIN_OUTPUT, Cursor
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.output import Output, OutputContext
from kclrun.outputs.user_output import UserOutput, open_user_output, stores_cursor
from kclrun.testing.crashes import Crash

_ROWS_MIN: Final = 6
# An output that loops over its rows has many lines: of more than this, the places are spread.
_PLACES_MAX: Final = 100
_SHARD: Final = "shardId-000000000007"
_START: Final = Cursor(TRIM_HORIZON)
# As those of Kinesis: with a number that fits no integer, a sub-sequence number, and a tick.
_CURSORS: Final = tuple(
    Cursor.parse(text)
    for text in (
        "49590338271490256608559692538361571095921575989136588898",
        "49590338271490256608559692540925702759324208523137515618/3",
        "49590338271490256608559692543490834422726841057138442338/12+7",
    )
)

Row = Mapping[str, Any]
_Trace = Callable[[FrameType, str, Any], Any]


def assert_output_contract(
    output: type[Output],
    *,
    rows: Sequence[Row],
    read: Callable[[], Iterable[Row]],
    fresh: Callable[[], object],
    options: Mapping[str, Any] | None = None,
    refused: Row | None = None,
) -> None:
    """Check every promise of `kclrun.Output` over the real destination of an output: rows that
    it took are there, once or at least once as its kind says; in order; after a crash and after an
    error at each line of its code; after a repetition, a late request and the write of a former
    owner. A `fencing_token` is not asked for: an output that requires `after` has each row once.

    `rows` are six or more different rows that the destination takes. `read` returns all rows that
    are there, in their order for each `context.key`, equal to those of `rows`. `fresh` empties the
    destination, its cursors too; it is called before each check. `options` are those of the
    settings. `refused` is a row that the destination refuses for its values.

    Raises: AssertionError that names the broken promise; ProcessorLoadError and SettingsError, as
    `kclrun check`, for a class or options that cannot be used.

    >>> import kclrun
    >>> class Forgetful(kclrun.Output):
    ...     written = []
    ...     def send(self, rows):
    ...         self.written += rows[:-1]
    >>> numbers = [{"n": n} for n in range(6)]
    >>> assert_output_contract(
    ...     Forgetful,
    ...     rows=numbers,
    ...     read=lambda: Forgetful.written,
    ...     fresh=Forgetful.written.clear,
    ... )
    Traceback (most recent call last):
    ...
    AssertionError: Forgetful: send returned, and not all of its rows are there
    ...
    """
    if len(rows) < _ROWS_MIN:
        raise ValueError(f"rows: {_ROWS_MIN} or more different ones are needed")
    refuse_bad_output(output, output.__qualname__)
    given = decoded_options(output, options or {})
    bench = _Bench(output, given, rows, read, fresh)
    for check in _STORING if stores_cursor(output) else _SENDING:
        bench.empty()
        with bench.allowed("a call raises, although nothing is wrong"):
            check(bench)
    if refused is not None:
        bench.empty()
        _refuses(bench, refused)
    bench.empty()


class _Bench:
    """One output and its destination under test."""

    def __init__(
        self,
        kind: type[Output],
        options: Any,
        rows: Sequence[Row],
        read: Callable[[], Iterable[Row]],
        fresh: Callable[[], object],
    ) -> None:
        self.kind = kind
        self.rows = [dict(row) for row in rows]
        self._options = options
        self._read = read
        self._fresh = fresh
        self._files = frozenset(
            inspect.getfile(base) for base in kind.__mro__ if base not in {Output, object}
        )

    def empty(self) -> None:
        gc.collect()  # what a crash has left: connections that nothing closed
        self._fresh()

    def context(self, token: int = 1, shard: str = _SHARD) -> OutputContext[Any]:
        return OutputContext(
            name=MAIN_OUTPUT,
            options=self._options,
            application="contract",
            stream="contract",
            shard_id=shard,
            key=f"contract/contract/0/{shard}/0/{MAIN_OUTPUT}",
            fencing_token=token,
        )

    def instance(self, token: int = 1, shard: str = _SHARD) -> Output:
        """An instance of user code that is open."""
        made = self.kind()
        made.open(self.context(token, shard))
        return made

    def begun(self, token: int = 1, shard: str = _SHARD) -> UserOutput:
        """The output as the runtime has it, at the start of a lease."""
        output = open_user_output(self.kind, self.kind.__qualname__, self.context(token, shard))
        output.begin(_START)
        return output

    def write(self, output: UserOutput, first: int, last: int, upto: Cursor) -> None:
        """Rows from `first` to before `last`, in one commit."""
        output.add(self.encoded(output, first, last), upto)
        output.commit()

    def encoded(self, output: UserOutput, first: int, last: int) -> list[bytes]:
        return [output.encode(row)[0] for row in self.rows[first:last]]

    def there(self) -> list[Row]:
        return [dict(row) for row in self._read()]

    def require_rows(self, expected: Sequence[Row], promise: str) -> None:
        found = self.there()
        if found != list(expected):
            self.broken(promise, expected, found)

    def require_all(self, expected: Sequence[Row], promise: str) -> None:
        """Each row is there, in the order of their first appearances; some more than once."""
        found = self.there()
        firsts = [row for number, row in enumerate(found) if row not in found[:number]]
        if firsts != list(expected):
            self.broken(promise, expected, found)

    def broken(self, promise: str, expected: object = None, found: object = None) -> NoReturn:
        more = "" if expected is None else f"\nexpected: {expected}\nfound: {found}"
        raise AssertionError(f"{self.kind.__qualname__}: {promise}{more}")

    @contextmanager
    def allowed(self, promise: str) -> Iterator[None]:
        """An error of the output breaks the promise."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{self.kind.__qualname__}: {promise}\n{type(error).__name__}: {error}"
            ) from error

    def interrupted(self, at: int, error: BaseException) -> _Interrupted:
        return _Interrupted(self._files, at, error)


class _Interrupted:
    """Raises an error at one step of user code: before a line, or when a function returns. `line`
    is where that was; None if the code did not get there."""

    def __init__(self, files: frozenset[str], at: int, error: BaseException) -> None:
        self._files = files
        self._at = at
        self._error = error
        self._former: Any = None
        self.steps = 0
        self.line: str | None = None

    def __enter__(self) -> _Interrupted:
        self._former = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)
        self._error.__traceback__ = None  # it keeps what user code had, such as connections

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> _Trace | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event in {"line", "return"}:
            self.steps += 1
            if self.steps == self._at:
                self.line = f"line {frame.f_lineno} of {frame.f_code.co_name}"
                raise self._error
        return self._trace


# Of both kinds.


def _check_leaves_nothing(bench: _Bench) -> None:
    output = open_user_output(bench.kind, bench.kind.__qualname__, bench.context())
    with bench.allowed("check raises, although the destination is there"):
        output.check()
    output.close()
    bench.require_rows([], "check leaves rows behind")


def _leaves_rows_unchanged(bench: _Bench) -> None:
    instance = bench.instance()
    given = copy.deepcopy(bench.rows[:2])
    if stores_cursor(bench.kind):
        instance.commit(given, instance.begin(), str(_CURSORS[0]))
    else:
        instance.send(given)
    method = "commit" if stores_cursor(bench.kind) else "send"
    if given != bench.rows[:2]:
        bench.broken(f"{method} changes the rows that it gets", bench.rows[:2], given)
    instance.close()


def _closes(bench: _Bench) -> None:
    output = bench.begun()
    bench.write(output, 0, 2, _CURSORS[0])
    before = bench.there()
    output.close()
    with bench.allowed("close raises when it is called once more"):
        instance = bench.instance()
        instance.close()
    after = bench.there()
    if any(row not in after for row in before):
        bench.broken("close loses rows that were written", before, after)
    if len(after) != len(before):
        bench.broken(
            "close writes rows: they were not there when the call returned that took them",
            before,
            after,
        )


def _refuses(bench: _Bench, refused: Row) -> None:
    output = bench.begun()
    method = "commit" if stores_cursor(bench.kind) else "send"
    try:
        given = [output.encode(row)[0] for row in (bench.rows[0], refused)]
    except Exception:  # noqa: BLE001 - user code refused it, which is as good
        return
    if not isinstance(_refusal(bench, output, given, method), RowsRefused):
        bench.broken(
            f"{method} swallows a refusal: it returned, and the destination had refused a row"
        )
    if stores_cursor(bench.kind):
        bench.require_rows([], "a commit that is refused leaves rows behind")
    if bench.kind.try_rows is not Output.try_rows:
        _tries(bench, refused)


def _refusal(
    bench: _Bench, output: UserOutput, given: Sequence[bytes], method: str
) -> BaseException | None:
    """What user code raises for these rows, if it is nothing that the runtime repeats."""
    try:
        output.add(given, _CURSORS[0])
        output.commit()
    except (RowsRefused, SettingsError) as raised:
        return raised.__cause__
    except SinkError as raised:
        bench.broken(
            f"{method} raises another error than RowsRefused for a row that is refused: the runtime"
            f" would repeat it for ever\n{raised}"
        )
    return None


def _tries(bench: _Bench, refused: Row) -> None:
    instance = bench.instance(2)
    if stores_cursor(bench.kind):
        instance.begin()
    before = bench.there()
    with bench.allowed("try_rows refuses rows that the destination takes"):
        instance.try_rows(copy.deepcopy(bench.rows[:2]))
    try:
        instance.try_rows([*copy.deepcopy(bench.rows[:1]), dict(refused)])
    except RowsRefused:
        pass
    else:
        bench.broken("try_rows swallows a refusal")
    bench.require_rows(before, "try_rows leaves rows behind")
    instance.close()


# Of an output that has each row at least once.


def _sends(bench: _Bench) -> None:
    output = bench.begun()
    bench.write(output, 0, 3, _CURSORS[0])
    bench.require_all(bench.rows[:3], "send returned, and not all of its rows are there")
    bench.write(output, 3, 6, _CURSORS[1])
    bench.require_all(bench.rows[:6], "send returned, and not all of its rows are there, in order")


def _sends_again_after_a_crash(bench: _Bench) -> None:
    def lived(place: int) -> _Interrupted:
        stop = bench.interrupted(place, Crash())
        output = bench.begun()
        given = bench.encoded(output, 0, 3)
        with stop, suppress(Crash):
            output.add(given, _CURSORS[0])
            output.commit()
        return stop

    for place in _spread(lived(0).steps):
        bench.empty()
        stop = lived(place)
        with bench.allowed(f"it cannot be used again after a crash at {stop.line}"):
            bench.write(bench.begun(2), 0, 3, _CURSORS[0])
        bench.require_all(bench.rows[:3], f"rows are lost after a crash at {stop.line}")


def _repeats_send_after_an_error(bench: _Bench) -> None:
    def lived(place: int) -> _Interrupted:
        stop = bench.interrupted(place, OSError("the connection is lost, says the contract"))
        output = bench.begun()
        given = bench.encoded(output, 0, 3)
        with stop:  # rows are sent as they are added; a failure is kept for `commit`
            output.add(given, _CURSORS[0])
        with bench.allowed(f"send cannot be repeated after an error at {stop.line}"):
            output.commit()
        bench.require_all(
            bench.rows[:3], f"send swallows an error: after one at {stop.line} rows are missing"
        )
        return stop

    for place in _spread(lived(0).steps):
        bench.empty()
        lived(place)


# Of an output that has each row exactly once.


def _begins_without_cursor(bench: _Bench) -> None:
    for _ in range(2):
        found = bench.instance().begin()
        if found is not None:
            bench.broken("begin returns a cursor where none is stored", None, found)


def _keeps_rows_and_cursor(bench: _Bench) -> None:
    output = bench.begun()
    done = 0
    for number, upto in enumerate(_CURSORS):
        bench.write(output, done, done + 2, upto)
        done += 2
        bench.require_rows(
            bench.rows[:done], "commit returned, and the destination does not have its rows"
        )
        found = bench.instance(number + 2).begin()
        if found is None:
            bench.broken("commit forgets the cursor: begin returns None after it")
        if found != str(upto):
            bench.broken("begin returns a cursor that is not of the last commit", upto, found)
        output = bench.begun(number + 3)


def _applies_a_repeated_commit_once(bench: _Bench) -> None:
    instance = bench.instance()
    after, upto = instance.begin(), str(_CURSORS[0])
    instance.commit(copy.deepcopy(bench.rows[:2]), after, upto)
    promise = "a commit that is repeated raises another error than Superseded"
    with bench.allowed(promise), suppress(Superseded):
        instance.commit(copy.deepcopy(bench.rows[:2]), after, upto)
    bench.require_rows(bench.rows[:2], "a commit that is repeated is applied twice")


def _refuses_a_late_commit(bench: _Bench) -> None:
    """The reply to a first request was lost; it arrives when its repetition and another commit are
    done."""
    instance = bench.instance()
    first, second = str(_CURSORS[0]), str(_CURSORS[1])
    after = instance.begin()
    instance.commit(copy.deepcopy(bench.rows[:2]), after, first)
    instance.commit(copy.deepcopy(bench.rows[2:4]), first, second)
    with suppress(Superseded):
        instance.commit(copy.deepcopy(bench.rows[:2]), after, first)
    bench.require_rows(
        bench.rows[:4],
        "a commit is applied although the stored cursor is not `after`: a request that arrives late"
        " would write its rows twice",
    )
    found = bench.instance(2).begin()
    if found != second:
        bench.broken("a commit that arrives late moves the cursor back", second, found)


def _keeps_owners_apart(bench: _Bench) -> None:
    former = bench.instance(1)
    former.begin()
    later = bench.instance(2)
    after = later.begin()
    is_refused = _is_superseded(former, bench.rows[:2], after, _CURSORS[0])
    if is_refused:
        bench.require_rows([], "a commit that is superseded leaves rows behind")
    elif not bench.there():
        bench.broken("commit returns where it should raise Superseded: its rows are not there")
    if not _is_superseded(later, bench.rows[:4], after, _CURSORS[1]):
        bench.require_rows(
            bench.rows[:4],
            "the write of an older owner is accepted after a newer one has begun, and both have"
            " rows of the same records",
        )
        return
    if is_refused:
        bench.broken("commit raises Superseded for both of two owners: neither can go on")
    bench.require_rows(bench.rows[:2], "a commit that is superseded leaves rows behind")


def _is_superseded(owner: Output, rows: Sequence[Row], after: str | None, upto: Cursor) -> bool:
    try:
        owner.commit(copy.deepcopy(rows), after, str(upto))
    except Superseded:
        return True
    return False


def _keeps_keys_apart(bench: _Bench) -> None:
    one, other = bench.begun(), bench.begun(5, "shardId-000000000008")
    bench.write(one, 0, 2, _CURSORS[1])
    with bench.allowed("a commit of one shard is refused because of another shard's"):
        bench.write(other, 2, 4, _CURSORS[0])
    there = bench.there()
    of_each = [[row for row in there if row in own] for own in (bench.rows[:2], bench.rows[2:4])]
    if [*of_each[0], *of_each[1]] != list(bench.rows[:4]) or len(there) != 4:
        bench.broken("rows of two shards are not kept apart", bench.rows[:4], there)
    found = bench.instance(6).begin(), bench.instance(6, "shardId-000000000008").begin()
    expected = (str(_CURSORS[1]), str(_CURSORS[0]))
    if found != expected:
        bench.broken("two shards share one cursor", expected, found)


def _is_whole_after_a_crash(bench: _Bench) -> None:
    def lived(place: int) -> _Interrupted:
        stop = bench.interrupted(place, Crash())
        output = bench.begun()
        bench.write(output, 0, 2, _CURSORS[0])
        output.add(bench.encoded(output, 2, 4), _CURSORS[1])
        with stop, suppress(Crash):
            output.commit()
        return stop

    for place in _spread(lived(0).steps):
        bench.empty()
        stop = lived(place)
        gc.collect()  # the connections of the process that ended
        _require_whole(bench, f"after a crash at {stop.line}")


def _require_whole(bench: _Bench, when: str) -> None:
    """Cursor and rows of the destination agree, and the next owner goes on there."""
    with bench.allowed(f"it cannot be opened again {when}"):
        stored = bench.instance(2).begin()
    if stored == str(_CURSORS[0]):
        bench.require_rows(
            bench.rows[:2], f"commit writes rows without their cursor: {when} rows are there twice"
        )
        done = 2
    elif stored == str(_CURSORS[1]):
        bench.require_rows(
            bench.rows[:4], f"commit stores a cursor without its rows: {when} rows are lost"
        )
        done = 4
    else:
        bench.broken(f"begin returns a cursor that no commit stored {when}", _CURSORS[0], stored)
    with bench.allowed(f"the next owner cannot go on {when}"):
        bench.write(bench.begun(3), done, 6, _CURSORS[2])
    bench.require_rows(bench.rows[:6], f"the next owner cannot go on {when}")


def _repeats_commit_after_an_error(bench: _Bench) -> None:
    def lived(place: int) -> _Interrupted:
        stop = bench.interrupted(place, OSError("the connection is lost, says the contract"))
        output = bench.begun()
        bench.write(output, 0, 2, _CURSORS[0])
        output.add(bench.encoded(output, 2, 4), _CURSORS[1])
        with stop:
            is_away = _fails(output)
        if is_away:
            with bench.allowed(f"commit cannot be repeated after an error at {stop.line}"):
                output.commit()
        bench.require_rows(
            bench.rows[:4],
            f"commit swallows an error: after one at {stop.line} the rows are not there once",
        )
        return stop

    for place in _spread(lived(0).steps):
        bench.empty()
        lived(place)


def _fails(output: UserOutput) -> bool:
    """Whether a commit has to be repeated. Raises: Superseded."""
    try:
        output.commit()
    except Superseded:
        raise
    except SinkError:
        return True
    return False


def _spread(count: int) -> list[int]:
    """At most so many of the steps as are tried, evenly."""
    return sorted({round(count * (n + 1) / _PLACES_MAX) for n in range(_PLACES_MAX)} - {0})


_SENDING: Final = (
    _check_leaves_nothing,
    _leaves_rows_unchanged,
    _closes,
    _sends,
    _sends_again_after_a_crash,
    _repeats_send_after_an_error,
)
_STORING: Final = (
    _check_leaves_nothing,
    _begins_without_cursor,
    _leaves_rows_unchanged,
    _closes,
    _keeps_rows_and_cursor,
    _applies_a_repeated_commit_once,
    _keeps_owners_apart,
    _refuses_a_late_commit,
    _keeps_keys_apart,
    _is_whole_after_a_crash,
    _repeats_commit_after_an_error,
)
