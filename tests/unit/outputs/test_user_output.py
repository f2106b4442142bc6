"""An output of user code, as the runtime calls it."""

import datetime

import pytest

from kclrun import HaltShard, Output, OutputContext
from kclrun.errors import (
    LimitExceeded,
    ProcessorLoadError,
    RowsRefused,
    SettingsError,
    SinkError,
    Superseded,
)
from kclrun.loading import load_output
from kclrun.model.output import Cursor, RowsOf
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.outputs.user_output import key_of, open_user_output, stores_cursor
from tests.support.tables import over_rows

START = Cursor(TRIM_HORIZON)
CONTEXT = OutputContext(
    name="late",
    options={"a": 1},
    application="app",
    stream="s",
    shard_id="shardId-7",
    key="k",
    fencing_token=4,
)


def at(number):
    return Cursor(ExtendedSequenceNumber(str(number)))


class Sending(Output):
    """Notes each call; `raises` are the errors of the next calls, by method."""

    rows_max = 2

    def __init__(self):
        self.calls.append("new")

    def meet(self, method, *arguments):
        self.calls.append((method, *arguments) if arguments else method)
        raises = self.raises.get(method)
        if raises:
            raise raises.pop(0)

    def open(self, context):
        assert context is CONTEXT
        self.meet("open")

    def send(self, rows):
        self.meet("send", rows)

    def check(self):
        self.meet("check")
        return "a queue"

    def close(self):
        self.meet("close")


class Storing(Output):
    __init__, meet, open = Sending.__init__, Sending.meet, Sending.open
    check, close = Sending.check, Sending.close

    def begin(self):
        self.meet("begin")
        return self.stored.pop(0) if len(self.stored) > 1 else self.stored[0]

    def commit(self, rows, after, upto):
        self.meet("commit", rows, after, upto)


def made(kind, stored=(None,), **raises):
    """The output, and what is called."""
    calls = []
    own = type(kind.__name__, (kind,), {"calls": calls, "raises": raises, "stored": list(stored)})
    return open_user_output(own, "my.module:Mine", CONTEXT), calls


def add(output, upto, *rows):
    output.add([output.encode(row)[0] for row in rows], upto)


def test_nothing_of_user_code_runs_before_it_is_needed():
    output, calls = made(Sending)
    assert calls == []
    assert output.begin(at(3)) == at(3)
    assert output.commit() == at(3)
    assert calls == ["new", "open"]
    output.close()
    output.close()
    assert calls == ["new", "open", "close"]


def test_rows_are_sent_as_they_are_added_and_in_calls_of_rows_max():
    output, calls = made(Sending)
    output.begin(START)
    add(output, at(5), {"n": 1}, {"n": 2}, {"n": 3})
    assert calls[2:] == [("send", [{"n": 1}, {"n": 2}]), ("send", [{"n": 3}])]
    assert output.unsent_bytes == 0
    assert output.commit() == at(5)
    assert len(calls) == 4


def test_after_an_error_another_instance_gets_the_same_rows_and_nothing_more_is_sent_before():
    output, calls = made(Sending, send=[OSError("away"), OSError("still away")])
    output.begin(START)
    add(output, at(5), {"n": 1}, {"n": 2})
    add(output, at(6), {"n": 3})
    assert calls[2:] == [("send", [{"n": 1}, {"n": 2}]), "close"]
    assert output.unsent_bytes > 0
    with pytest.raises(SinkError) as raised:
        output.commit()
    words = str(raised.value)
    assert words.startswith("my.module:Mine.send raised OSError: still away (")
    assert "test_user_output.py" in words.partition("\n")[0]
    assert "raise raises.pop(0)\nOSError: still away" in words, "the traceback of user code"
    del calls[:]
    assert output.commit() == at(6)
    again = [("send", [{"n": 1}, {"n": 2}]), ("send", [{"n": 3}])]
    assert calls == ["new", "open", *again]


def test_a_commit_has_the_cursors_before_and_after_its_rows_and_is_repeated_with_the_same():
    output, calls = made(Storing, stored=["7"], commit=[OSError("away")])
    assert output.begin(START) == at(7)
    add(output, at(8), {"n": 1})
    assert output.unsent_bytes > 0
    with pytest.raises(SinkError, match=r"my.module:Mine\.commit raised OSError: away"):
        output.commit()
    add(output, at(9), {"n": 2})
    del calls[:]
    assert output.commit() == at(9)
    assert calls == [
        *("new", "open", "begin"),
        ("commit", [{"n": 1}], "7", "8"),
        ("commit", [{"n": 2}], "8", "9"),
    ]
    assert output.unsent_bytes == 0


def test_a_commit_without_rows_writes_nothing():
    output, calls = made(Storing)
    output.begin(at(3))
    output.add([], at(9))
    assert output.commit() == at(9)
    assert calls == ["new", "open", "begin"]


def test_a_cursor_that_another_owner_moved_meanwhile_ends_the_process():
    output, _ = made(Storing, stored=[None, "99"], commit=[OSError("away")])
    output.begin(START)
    add(output, at(8), {"n": 1})
    with pytest.raises(SinkError):
        output.commit()
    with pytest.raises(Superseded, match="another owner moved the cursor"):
        output.commit()


@over_rows(
    ("raised", "kind", "words"),
    [
        (HaltShard("no table"), SettingsError, r"Mine\.commit \(.*\): no table"),
        (SettingsError("no table"), SettingsError, "no table"),
        (RowsRefused("n"), SettingsError, "refuses rows .*: n\nWith `try_rows`"),
        (Superseded("moved"), Superseded, "commit: moved"),
        (SystemExit(3), SinkError, "raised SystemExit: 3"),
        (SinkError("x"), SinkError, "raised SinkError: x"),
        (ValueError("x"), SinkError, "raised ValueError: x"),
    ],
)
def test_what_user_code_raises_decides_what_happens(raised, kind, words):
    output, _ = made(Storing, commit=[raised])
    output.begin(START)
    add(output, at(8), {"n": 1})
    with pytest.raises(kind, match=words) as found:
        output.commit()
    assert type(found.value) is kind
    assert found.value.__cause__ is raised


@pytest.mark.parametrize("method", ["open", "begin"])
def test_a_start_is_repeated_with_another_instance(method):
    output, calls = made(Storing, **{method: [OSError("away")]})
    with pytest.raises(SinkError, match=rf"Mine\.{method} raised OSError: away"):
        output.begin(START)
    assert calls[-1] == "close"
    assert output.begin(START) == START


def test_a_later_owner_at_the_start_is_said_with_what_to_do():
    output, _ = made(Storing, begin=[Superseded("a later owner has the token 9")])
    with pytest.raises(SettingsError, match=r"token 9\nEither (.|\n)*stored there for k"):
        output.begin(START)


@pytest.mark.parametrize("stored", ["nonsense", "", 7, b"7"])
def test_a_cursor_that_is_none_of_ours_is_refused(stored):
    output, _ = made(Storing, stored=[stored])
    with pytest.raises(SettingsError, match="begin returned a cursor that no commit stored"):
        output.begin(START)


def test_work_that_has_not_begun_is_refused():
    async def later():
        pass

    class Deferred(Sending):
        def send(self, rows):
            return later()

    output, _ = made(Deferred)
    output.begin(START)
    add(output, at(1), {"n": 1})
    with pytest.raises(SettingsError, match="send returned a coroutine, and nothing of it has run"):
        output.commit()


def test_rows_are_those_of_the_moment_of_emit_and_keep_their_types():
    output, calls = made(Sending)
    output.begin(START)
    row = {"at": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "tags": ["a"], "b": b"x"}
    encoded, size = output.encode(row)
    row["tags"].append("b")
    assert size == len(encoded)
    output.add([encoded], at(1))
    assert calls[-1] == ("send", [row | {"tags": ["a"]}])


def test_a_row_that_cannot_be_kept_names_its_column_and_no_value():
    output, _ = made(Sending)
    output.begin(START)
    with pytest.raises(TypeError, match="'n'") as refused:
        output.encode({"n": object()})
    assert "object at" not in str(refused.value)
    with pytest.raises(LimitExceeded):
        output.encode({"n": "x" * (16 * 2**20)})


def test_user_code_may_refuse_a_row_at_emit_also_while_it_is_away():
    class Picky(Sending):
        def check_row(self, row):
            if "n" not in row:
                raise ValueError("n is missing")

    output, _ = made(Picky, send=[OSError("away")])
    output.begin(START)
    add(output, at(1), {"n": 1})
    with pytest.raises(TypeError, match=r"my\.module:Mine refuses the row: n is missing"):
        output.encode({"m": 1})


def test_a_destination_that_tries_rows_says_whose_they_are():
    class Trying(Storing):
        def commit(self, rows, after, upto):
            self.try_rows(rows)

        def try_rows(self, rows):
            if any(row["n"] is None for row in rows):
                raise RowsRefused("n is null")

    output, _ = made(Trying)
    output.begin(START)
    good, bad = (output.encode({"n": n})[0] for n in (1, None))
    assert not output.is_tried_with(output)
    output.try_rows([good], [(output, [good])])
    with pytest.raises(TypeError, match="n is null"):
        output.try_rows([bad], [(output, [good])])
    with pytest.raises(RowsRefused, match="n is null"):
        output.try_rows([good], [(output, [bad])])
    output.add([bad], at(1))
    with pytest.raises(RowsRefused, match="n is null"):
        output.commit()
    assert not hasattr(made(Storing)[0], "try_rows"), "others are not tried"


def test_a_check_opens_and_says_where_it_is():
    output, calls = made(Storing)
    assert output.check() == "my.module:Mine: a queue"
    assert calls == ["new", "open", "check"]
    output, _ = made(Storing, check=[HaltShard("no such queue")])
    with pytest.raises(SettingsError, match="no such queue"):
        output.check()


def test_an_error_of_close_is_of_no_consequence():
    output, _ = made(Sending, close=[OSError("gone")])
    output.begin(START)
    output.close()


def test_the_key_names_the_rows_of_a_shard_for_all_of_its_owners():
    of = RowsOf(
        application="app",
        stream="s",
        stream_created_at=WallTime(1.5),
        shard_id="shardId-7",
        generation=2,
        token=4,
    )
    assert key_of(of, "late") == "app/s/1500/shardId-7/2/late"
    others = [
        RowsOf(**({name: getattr(of, name) for name in of.__struct_fields__} | changed))
        for changed in (
            {"stream_created_at": WallTime(2.0)},
            {"generation": 3},
            {"shard_id": "shardId-8"},
            {"letter": ExtendedSequenceNumber("12", 3)},
        )
    ]
    assert len({key_of(other, "late") for other in [of, *others]}) == 5


SOURCE = """
from kclrun import Output

class Good(Output):
    def send(self, rows): ...

class Storing(Output):
    def begin(self): ...
    def commit(self, rows, after, upto): ...

class Nothing(Output): ...

class Half(Output):
    def begin(self): ...

class Both(Good, Storing): ...

class Asynchronous(Output):
    async def send(self, rows): ...

class Few(Output):
    def send(self): ...

class Plain: ...
"""


@over_rows(
    ("name", "words"),
    [
        ("Nothing", "defines none of them\nWrite send"),
        ("Half", "defines begin\nWrite send"),
        ("Both", "defines begin and commit and send"),
        ("Asynchronous", "send is `async def`"),
        ("Few", r"send takes \(self, rows\)"),
        ("Plain", "the class Plain, not a subclass of Output"),
        ("Missing", "defines no Missing"),
    ],
)
def test_a_class_that_is_not_an_output_is_refused_by_name(name, words, tmp_path, monkeypatch):
    (tmp_path / "own_outputs.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert not stores_cursor(load_output("own_outputs:Good", [], "output.use"))
    assert stores_cursor(load_output("own_outputs:Storing", [], "output.use"))
    with pytest.raises(ProcessorLoadError, match=f"^output.use: .*{words}"):
        load_output(f"own_outputs:{name}", [], "output.use")
