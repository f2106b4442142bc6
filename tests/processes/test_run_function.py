"""`kclrun.run`: a program runs an application, with real lease processes on an embedded AWS."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kclrun.local.server import start_embedded
from tests.patience import HUNG_S
from tests.support.programs import run_to_end

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
MODULE = """
import kclrun

class Orders(kclrun.RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, records, checkpointer):
        for record in records:
            self.context.emit({"n": int(record.data)})

class Failing(kclrun.RecordProcessor):
    def process_records(self, records, checkpointer):
        raise ValueError("no such customer")

def records():
    for number in range(600):
        yield f"key{number % 7}", b"%d" % number
"""
DEMO = """
demo = dict(
    application="orders", stream="orders", aws={"endpoint": "embedded"}, until="caught-up",
    embedded={"shards": 2, "fill": {"source": "shop:records"}}, output={"path": "out"},
)
"""


@pytest.fixture
def program(tmp_path):
    """Runs a program in a folder of its own, beside `shop.py`; its result."""
    (tmp_path / "shop.py").write_text(MODULE)

    def start(text, name="program.py", **more):
        (tmp_path / name).write_text(text)
        return subprocess.Popen(
            [sys.executable, name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    return start


def said(process):
    """The last line of output as JSON, and all of standard error."""
    out, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


MAIN = "import json, os, signal, threading, gc\nimport kclrun\n"


def test_a_processor_runs_until_it_has_caught_up_and_leaves_the_program_as_it_was(
    program, tmp_path
):
    text = f"""{MAIN}from shop import Orders
{DEMO}
def state():
    gc.collect()
    handlers = [str(signal.getsignal(n)) for n in (2, 15, 17, 1)]
    return [handlers, [t.name for t in threading.enumerate()], len(os.listdir("/proc/self/fd"))]

if __name__ == "__main__":
    kclrun.run(Orders, **demo)  # what the first use of a library opens stays open
    before = state()
    result = kclrun.run("shop:Orders", **{{**demo, "output": {{"path": "again"}}}})
    print(json.dumps([result.reason, result.exit_code, result.records, dict(result.halted),
                      state() == before]))
"""
    answer, err = said(program(text))
    assert answer == ["caught up", 0, 600, {}, True]
    rows = [
        json.loads(line)["n"]
        for file in (tmp_path / "again").rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert sorted(rows) == list(range(600))
    assert "Rows are in again" in err
    assert '"event":"caught_up"' in err


def test_user_code_that_gives_up_is_an_error_with_shard_and_cause(program):
    text = f"""{MAIN}from shop import Failing
{DEMO}
if __name__ == "__main__":
    try:
        kclrun.run(Failing, on_error={{"retries": 0}}, **demo)
    except kclrun.errors.ProcessorError as error:
        print(json.dumps(str(error)))
"""
    answer, _ = said(program(text))
    first, *shards = answer.splitlines()
    assert first == "user code gave up, and all other shards are read"
    assert len(shards) == 2
    assert all("process_records failed once: ValueError: no such customer" in s for s in shards)
    assert shards[0].startswith("shardId-00000000000")


def test_a_class_of_the_program_itself_runs_and_an_unguarded_program_is_refused(program):
    body = MODULE + DEMO.replace("shop:", "own:")
    guarded = body + 'if __name__ == "__main__":\n    print(kclrun.run(Orders, **demo).records)\n'
    assert said(program(guarded, "own.py"))[0] == 600

    process = program(body + "kclrun.run(Orders, **demo)\n", "own.py")
    _, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 1
    assert err.endswith('Put the call under  if __name__ == "__main__":\n')
    assert err.count("importing own failed") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_the_program_goes_on(program, tmp_path, number):
    with start_embedded() as embedded:
        text = f"""{MAIN}from shop import Orders
if __name__ == "__main__":
    from kclrun.local.filling import make_stream
    from kclrun.model.wire import WireEndpoint
    make_stream(WireEndpoint("{embedded.kinesis_endpoint}", "us-east-1", "us-east-1"), "orders", 1)
    with kclrun.Producer("orders", endpoint_url="{embedded.kinesis_endpoint}") as producer:
        for n in range(50):
            producer.put("k", str(n))
    result = kclrun.run(Orders, application="orders", stream="orders", output={{"path": "out"}},
                        aws={{"endpoint": "{embedded.endpoint}"}})
    print(json.dumps([result.reason, result.exit_code, result.records]))
"""
        process = program(text, start_new_session=True)
        for line in process.stderr:
            if '"event":"lease_claimed"' in line:
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 0, err
    reason, code, records = json.loads(out.splitlines()[-1])
    assert (reason, code) == ("drained", 0)
    assert records in range(51)


def test_what_the_verb_refuses_is_refused_with_the_same_words(program):
    text = f"""{MAIN}from shop import Orders
{DEMO}
import threading
def refused(*processor, **more):
    try:
        kclrun.run(*processor, **more)
    except kclrun.errors.KclrunError as error:
        return [type(error).__name__, str(error)]

if __name__ == "__main__":
    def local():
        class Inner(Orders):
            pass
        return Inner

    in_main = type("Nameless", (Orders,), {{}})
    answers = [
        refused(Orders, stram="orders", application="orders"),
        refused(Orders, **demo, leases={{"maxx": 3}}),
        refused(Orders, **{{**demo, "start": "yesterday"}}),
        refused(Orders, processor="shop:Orders", **demo),
        refused(local(), **demo),
        refused(in_main, **demo),
        refused(Orders(), **demo),
        refused("shop:Nope", **demo),
        refused(**demo),
        refused(Orders, application="orders", stream="none", output={{"path": "out"}}, aws={{
            "endpoint": "http://127.0.0.1:9"}}),
    ]
    thread = threading.Thread(target=lambda: answers.append(refused(Orders, **demo)))
    thread.start()
    thread.join()
    print(json.dumps(answers))
"""
    answers, _ = said(program(text))
    expected = [
        ("SettingsError", "stram: no such setting; did you mean stream?"),
        ("SettingsError", "leases.maxx: no such setting; did you mean max?"),
        ("SettingsError", "start: expected TRIM_HORIZON, LATEST or an instant"),
        ("SettingsError", "processor: is given twice"),
        ("ProcessorLoadError", "local.<locals>.Inner is defined inside of something"),
        ("ProcessorLoadError", "has another Nameless, or none"),
        ("ProcessorLoadError", "expected a class or module:Class, got Orders"),
        ("ProcessorLoadError", "defines no Nope"),
        ("SettingsError", "processor: is missing"),
        ("NothingListens", "nothing listens at 127.0.0.1:9"),
        ("SettingsError", "kclrun.run: runs in the main thread"),
    ]
    assert [kind for kind, _ in answers] == [kind for kind, _ in expected]
    for (_, text), (_, part) in zip(answers, expected, strict=True):
        assert part in text


def test_a_class_of_a_session_without_a_file_is_refused_with_what_to_do(tmp_path):
    code = MODULE + DEMO + "kclrun.run(Orders, **demo)\n"
    done = run_to_end(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 1
    assert "Orders is defined in a session" in done.stderr
    assert "from orders import Orders" in done.stderr
