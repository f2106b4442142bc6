"""What `help()` and completion show of the public names: each has a docstring in plain words, and
nothing of the runtime stands beside it."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import kclrun
from kclrun.model.record import Record, RecordBatch
from kclrun.processor import Checkpointer, RecordCall
from kclrun.state.keyed import LiveEntries
from kclrun.state.timers import Timer
from kclrun.testing import run_processor
from kclrun.windows import Tumbling, Windows
from tests.public_names import MODULES, OF_THE_RUNTIME, public_names
from tests.support.contexts import made_context

# K19, [P6], V1 and the like: paragraphs of the design. KPL 2 or SHA1 is none.
ID = re.compile(r"\[[A-Z]\d{1,2}(?:, ?[A-Z]\d{1,2})*\]|(?<![\w-])[KPVIRLSG]\d{1,2}(?![\w-])")


def entries():
    """Each public class and function, and each method and property that a class itself has."""
    for module in MODULES:
        if module == "kclrun.spark" and not _has_spark():
            continue
        for name in public_names(module):
            entry = getattr(importlib.import_module(module), name)
            yield f"{module}.{name}", entry
            if inspect.isclass(entry):
                yield from _methods(f"{module}.{name}", entry)


def _has_spark():
    return importlib.util.find_spec("pyspark") is not None


def _methods(path, entry):
    for name, member in vars(entry).items():
        inner = member.fget if isinstance(member, property) else member
        is_public = name[0] != "_" and f"{path}.{name}" not in OF_THE_RUNTIME
        if is_public and inspect.isroutine(inner):
            yield f"{path}.{name}", inner


ENTRIES = dict(entries())


@pytest.mark.parametrize("path", list(ENTRIES))
def test_a_public_name_has_a_docstring_without_ids_of_the_design(path):
    text = ENTRIES[path].__doc__ or ""
    assert len(text.split()) >= 3, "it has no docstring"
    assert not ID.findall(text), "an id is not a word: say what it stands for"


# Fields whose names say all that there is to say of them.
PLAIN = {
    "kclrun.Delivered.sequence_number",
    "kclrun.Delivered.shard_id",
    "kclrun.OutputContext.application",
    "kclrun.OutputContext.shard_id",
    "kclrun.OutputContext.stream",
    "kclrun.ShardMetrics.batch_records",
    "kclrun.ShardMetrics.pause_max_s",
    "kclrun.ShardMetrics.refusals",
}


def fields():
    """Each field and attribute of a public class, as the snapshot has it."""
    snapshot = Path(__file__).with_name("public_names.txt").read_text()
    for path in re.findall(r"^([\w.]+): attribute: ", snapshot, re.MULTILINE):
        if path not in PLAIN:
            owner, _, name = path.rpartition(".")
            yield owner, name


@pytest.mark.parametrize(("owner", "name"), list(fields()))
def test_a_field_is_explained_where_its_class_is(owner, name):
    entry = ENTRIES.get(owner)
    if entry is None:
        pytest.skip("PySpark is not installed")
    texts = [cls.__doc__ or "" for cls in entry.__mro__ if cls.__module__.startswith("kclrun")]
    texts.append(entry.__init__.__doc__ or "")
    assert any(f"`{name}`" in text or f"`{name}=" in text for text in texts)


def shown(instance):
    """The public names that completion offers, without those of a mapping or a sequence."""
    general = {"count", "index", "get", "items", "keys", "values", "pop", "popitem", "clear"}
    general |= {"setdefault", "update"}
    return {name for name in dir(instance) if not name.startswith("_")} - general


def documented(cls):
    path = f"{cls.__module__}.{cls.__name__}"
    snapshot = Path(__file__).with_name("public_names.txt").read_text()
    exported = next(path for path, entry in ENTRIES.items() if entry is cls)
    names = set(re.findall(rf"^{re.escape(exported)}\.(\w+)(?:\(\))?: ", snapshot, re.MULTILINE))
    assert names, path
    return {name for name in names if not name.startswith("_")} - {"get"}


class Counting(kclrun.RecordProcessor):
    def process_records(self, batch, checkpointer):
        """Nothing."""


def instances():
    live = LiveEntries({}, lambda *_: None, None, 10**6)
    context = made_context(state=live)
    record = Record(b"data", "key", "1")
    yield kclrun.Context, context
    yield kclrun.RecordContext, RecordCall(context, record)
    yield kclrun.Record, record
    yield kclrun.RecordBatch, RecordBatch([record])
    yield kclrun.Checkpointer, Checkpointer(lambda at: None)
    yield kclrun.State, context.state
    yield kclrun.KeyState, context.state["key"]
    yield kclrun.Table, context.table("n", int)
    yield kclrun.Counter, context.counter("n")
    yield kclrun.Timer, Timer(1.0, "key")
    yield Windows, Windows(context, "n", Tumbling(60), int, lambda one, two: one + two)
    yield importlib.import_module("kclrun.testing").Run, run_processor(Counting, [])
    yield kclrun.RetryLater, kclrun.RetryLater(1.0)


@pytest.mark.parametrize(
    ("cls", "instance"), list(instances()), ids=lambda one: getattr(one, "__name__", "")
)
def test_completion_shows_what_is_public_and_nothing_else(cls, instance):
    of_exceptions = {"add_note", "args", "with_traceback"}
    assert shown(instance) - of_exceptions == documented(cls)
