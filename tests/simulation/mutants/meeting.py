"""Which tests call which functions of the product, so that those that meet a bug are tried first.

As a plugin of pytest (`-p tests.simulation.mutants.meeting`) it records, or it orders. What a test
does in processes of its own is not recorded, but that it starts some is.
"""

import cProfile
import inspect
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import pytest

# Names of files: where to write what the tests met, and in which order to try them.
RECORD: Final = "KCLRUN_TESTS_RECORD"
ORDER: Final = "KCLRUN_TESTS_ORDER"
# The exit code of a run that ended at a test that hangs.
HUNG: Final = 124

T = TypeVar("T")

_STARTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"})

# (file from the root, first line) of a function, as its code object has them.
Function = tuple[str, int]
# Ends the name of what is called while a test file is imported: its name, and no test of it.
IMPORT: Final = "::"


class Meeting(msgspec.Struct, frozen=True):
    """One test of the run without a bug: how long it took, and the functions that it called.

    Or the import of one test file: what makes its constants, or those of the product.
    """

    test: str
    took_s: float
    met: frozenset[Function]
    starts_processes: bool = False


class Order(msgspec.Struct, frozen=True):
    """Tests to try first, in their order, and after how many seconds each test hangs."""

    first: tuple[str, ...]
    hung_after_s: Mapping[str, float]


class _Recorder:
    def __init__(self, into: Path) -> None:
        self._into = into
        self._product = f"{Path.cwd() / 'kclrun'}/"
        self._root = len(f"{Path.cwd()}/")
        # One for each thread. In C: a call of Python for each call makes a test take ten times as
        # long.
        self._profilers: list[cProfile.Profile] = []
        self._starts_processes = False
        self._meetings: list[Meeting] = []
        sys.addaudithook(self._happened)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        return (yield from self._recorded(f"{collector.nodeid}{IMPORT}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._recorded(item.nodeid))

    def _recorded(self, name: str) -> Generator[None, T, T]:
        self._profilers = []
        self._starts_processes = False
        began = time.monotonic()
        threading.setprofile(lambda *_: self._profile())
        self._profile()
        try:
            return (yield)
        finally:
            threading.setprofile(None)
            for profiler in self._profilers:
                profiler.disable()
            took_s = time.monotonic() - began
            met = frozenset(self._of_the_product())
            self._meetings.append(Meeting(name, took_s, met, self._starts_processes))

    def _profile(self) -> None:
        """Profile this thread, in which a function of Python noticed its first call."""
        profiler = cProfile.Profile(builtins=False)
        try:
            profiler.enable()
        except ValueError:  # from Python 3.12 on, the first profiler notices all threads
            return
        self._profilers.append(profiler)

    def pytest_sessionfinish(self) -> None:
        self._into.write_bytes(msgspec.json.encode(self._meetings))

    def _of_the_product(self) -> Iterator[Function]:
        for profiler in self._profilers:
            for entry in profiler.getstats():
                code = entry.code
                # Bodies of modules and classes are not functions: their locals are not optimized.
                is_function = not isinstance(code, str) and code.co_flags & inspect.CO_OPTIMIZED
                if is_function and code.co_filename.startswith(self._product):
                    yield code.co_filename[self._root :], code.co_firstlineno

    def _happened(self, event: str, _: object) -> None:
        if event in _STARTS:
            self._starts_processes = True


class _Orderer:
    def __init__(self, order: Order) -> None:
        self._rank = {test: rank for rank, test in enumerate(order.first)}
        self._hung_after_s = order.hung_after_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._rank.get(item.nodeid, len(self._rank)))
        for item in items:
            if (limit := self._hung_after_s.get(item.nodeid)) is not None:
                item.add_marker(pytest.mark.timeout(limit), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "from pytest-timeout" in report.longreprtext:
            pytest.exit("a test hangs", returncode=HUNG)


def pytest_configure(config: pytest.Config) -> None:
    if into := os.environ.get(RECORD):
        config.pluginmanager.register(_Recorder(Path(into)))
    if order := os.environ.get(ORDER):
        read = msgspec.json.decode(Path(order).read_bytes(), type=Order)
        config.pluginmanager.register(_Orderer(read))
