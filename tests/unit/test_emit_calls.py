"""The outputs that a processor's source names: what is found, and what is left."""

import importlib.util
import sys

import pytest

from kclrun.emit_calls import (
    _sources,
    emit_calls,
    refuse_state_uses,
    refuse_unknown_outputs,
    state_uses,
)
from kclrun.errors import SettingsError

HEAD = """
from types import SimpleNamespace
from kclrun import RecordProcessor, Context
helpers = SimpleNamespace(NAME="late")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The class `Mine` of a module with this source, and the file of the module."""

    def of(source):
        file = tmp_path / "user_code_of_a_test.py"
        file.write_text(HEAD + source)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module.Mine, file

    return of


def batch(call, initialize="self.context = context"):
    return f"""
class Mine(RecordProcessor):
    def initialize(self, context):
        {initialize}
    def process_records(self, batch, checkpointer):
        {call}
"""


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (batch("self.context.emit({})"), ["output"]),
        (batch("self.context.emit({}, 'late')"), ["late"]),
        (batch("self.context.emit({}, to='late')"), ["late"]),
        (batch("self.ctx.emit({}, to='late')", "self.ctx = context"), ["late"]),
        (batch("self.c.emit({}, to='late')", "self.c = context"), ["late"]),
        (batch("self.emit({}, to='late')", "self.emit = context.emit"), ["late"]),
        (batch("self.send({}, 'late')", "self.x, self.send = 1, context.emit"), ["late"]),
        (batch("[self.context.emit({}, to='late') for _ in batch]"), ["late"]),
        # Names that only a run would say.
        (batch("self.context.emit({}, to=helpers.NAME)"), [None]),
        (batch("self.context.emit({}, to='a' if batch else 'b')"), [None]),
        (batch("self.context.emit(*batch)"), [None]),
        (batch("self.context.emit({}, **{'to': 'late'})"), [None]),
        # `emit` of something else.
        (batch("self.socket.emit({}, 'room')"), []),
        (batch("self.emit({}, to='late')", "self.emit = helpers.emit"), []),
        (batch("self.emit({}, to='late')", "pass"), []),
        # Where a call may be.
        (
            """
class Mine(RecordProcessor):
    async def process_record(self, record, c):
        c.emit({}, to="late")
""",
            ["late"],
        ),
        (
            """
def send(where: Context, row):
    where.emit(row, to="late")
class Base(RecordProcessor):
    def initialize(self, context):
        self.context = context
        context.emit({}, to="early")
class Mine(Base):
    def process_records(self, batch, checkpointer):
        send(self.context, {})
""",
            ["late", "early"],
        ),
        # Another processor of the module may be for other settings.
        (
            batch("self.context.emit({})")
            + """
class Another(RecordProcessor):
    def process_record(self, record, context):
        context.emit({}, to="theirs")
def unused(context):
    context.emit({}, to="nowhere")
""",
            ["output"],
        ),
    ],
)
def test_calls_of_a_context_are_found_and_nothing_else(mine, source, names):
    processor, file = mine(source)

    calls = emit_calls(processor)

    assert [call.to for call in calls] == names
    lines = file.read_text().splitlines()
    assert all(call.file == str(file) and "(" in lines[call.line - 1] for call in calls)


def test_modules_of_kclrun_and_of_python_are_not_read(mine):
    processor, file = mine(batch("self.context.emit({})"))

    assert [source.file for source in _sources(processor)] == [str(file)]


def test_a_class_without_a_source_has_no_calls_and_is_not_refused():
    space: dict[str, object] = {}
    exec(HEAD + batch("self.context.emit({}, 'x')"), space)

    assert emit_calls(space["Mine"]) == []


@pytest.mark.parametrize(
    ("call", "known", "words"),
    [
        ("self.context.emit({}, to='lat')", ["output", "late"], ["outputs.lat", "mean 'late'?"]),
        ("self.context.emit({}, to='x')", ["output", "late"], ["outputs are: late, output"]),
        ("self.context.emit({})", ["late"], ["without `to` is for `output`", "are: late"]),
        ("self.context.emit({})", [], ["set output.path"]),
        ("self.context.emit({}, to='late')", [], ["outputs.late", "They have no output"]),
        ("self.context.emit({}, to=helpers.NAME)", [], []),
        ("self.context.emit({}, to=helpers.NAME)", ["late"], []),
        ("self.context.emit({}, to='late')", ["late"], []),
        ("pass", [], []),
    ],
)
def test_an_unknown_output_is_refused_with_its_line_and_the_known_ones(mine, call, known, words):
    processor, file = mine(batch(call))
    calls = emit_calls(processor)
    if not words:
        refuse_unknown_outputs(calls, known)
        return
    with pytest.raises(SettingsError) as refused:
        refuse_unknown_outputs(calls, known)
    line = file.read_text().splitlines().index(f"        {call}") + 1
    for each in (f"{file}:{line}: ", *words):
        assert each in str(refused.value)


STATEFUL = """
from kclrun import RecordProcessor

class P(RecordProcessor):
    def initialize(self, context):
        self.context = context
        self.mine = context
        {initialize}

    def process_records(self, batch, checkpointer):
        for record in batch:
            {body}
"""


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("self.context.state[record]['n'] = 1", True),
        ("self.mine.state[record]['n'] = 1", True),
        ("self.context.counter('n')", True),
        ("self.context.table('n', int)", True),
        ("self.context.set_timer(record, 5.0)", True),
        # A program that never gets there is not refused.
        ("if record.data: self.context.state", False),
        ("if not self.options: continue\n            self.context.state", False),
        ("self.mine and self.context.state", False),
        ("later = lambda: self.context.state", False),
        ("if self.context.options.get('counts'): self.context.state", False),
        ("if hasattr(self, 'x'): self.context.state", False),
        ("try: self.context.state\n            except Exception: pass", False),
        ("self.machine.state", False),
        ("self.ssl_context.state", False),
        ("self.context.emit({'state': 1})", False),
    ],
)
def test_a_use_of_the_state_is_found_by_its_line(tmp_path, monkeypatch, body, is_found):
    name = f"stateful_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(STATEFUL.format(initialize="pass", body=body))
    monkeypatch.syspath_prepend(tmp_path)

    places = state_uses(importlib.import_module(name).P)

    assert [place.rpartition(":")[2] for place in places] == (["12"] if is_found else [])
    if is_found:
        with pytest.raises(SettingsError, match=r"\.py:12: context\.state needs a place"):
            refuse_state_uses(places)
