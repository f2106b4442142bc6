"""`kclrun.run`: an application from a Python program, as `kclrun --config app.yaml` runs it.

The settings come as keywords, and everything else is that of the verb (`cli/run/application.py`).
`import kclrun` does not load this module; the first use of the name does.
"""

from __future__ import annotations

import os
import site
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import DEFAULT_CONFIG, Configuration
from kclrun.cli.run.application import OnSample, run_application
from kclrun.config.load import settings_from
from kclrun.errors import NotFound, ProcessorError, ProcessorLoadError, SettingsError, TableRefused
from kclrun.manager.launcher import orphans_left_alone
from kclrun.model.stream import display_name
from kclrun.model.time import WallTime
from kclrun.observe.sample import ManagerSample, RunReport
from kclrun.processor import RecordProcessor

if TYPE_CHECKING:
    from kclrun.config.schema import Settings

_MAIN: Final = "__main__"
# The environment that a run on Spark changes for the workers of its session.
_OF_SPARK: Final = ("PYTHONPATH", "AWS_PROFILE")


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, if it ended in good order or was cut short.

    `reason` is in words, as in the report of the verb: `drained`, `caught up`, `stopped before it
    was drained`. `exit_code` is that of the verb: 0, or 75 for a run that was cut short: the rest
    is read again. `records` were processed by this machine; None where the engine cannot count
    them. `halted` has the shards on which user code had given up, and why.
    """

    reason: str
    exit_code: int
    records: int | None
    halted: Mapping[str, str]


def run(processor: type[RecordProcessor] | str | None = None, /, **settings: Any) -> RunResult:
    """Run an application until SIGTERM or Ctrl-C, or until it has caught up.

    >>> if __name__ == "__main__":
    ...     kclrun.run(Orders, application="orders", stream="orders", until="caught-up",
    ...                output={"path": "out"}, leases={"max": 8})

    The same as `kclrun --config app.yaml`, with the settings of the file as keywords; a section of
    the file is a mapping. They are checked by the same rules, and the messages are the same. The
    processor is a class or `module:Class`. Lease processes import it by its name: so its module is
    a file, and a script calls `run` under `if __name__ == "__main__"`. User code is searched in the
    folder of the processor's module and the one above, or in `path`. Relative paths begin at the
    current folder.

    In the main thread only. SIGTERM and Ctrl-C drain; the handlers of before are then restored.
    It shows log lines on standard error, and no live table.

    Raises: SettingsError and ProcessorLoadError for what the verb refuses with exit code 78;
    AccessDenied (77), NotFound (66: no stream, or the lease table was deleted), Unavailable (69)
    as the verb; TableRefused (78: the rows of the lease table are of another stream);
    ProcessorError (65) if user code gave up on a shard and the others are caught up. All of them
    can be caught as KclrunError.
    """
    _refuse_place()
    given = dict(settings)
    user_code = _user_code(processor, has_path=given.get("path") is not None)
    if user_code is not None:
        if given.get("processor") is not None:
            raise SettingsError("processor: is given twice, as an argument and as a keyword")
        given["processor"] = user_code.reference
    folder = Path.cwd() if user_code is None else user_code.folder
    loaded = settings_from(
        _plain(given), environment=os.environ, now=WallTime(time.time()), name="kclrun.run"
    )
    if loaded.engine == "spark":
        _refuse_session()
    # Commands in messages need a file; that is where its settings would be.
    configuration = Configuration(loaded, folder, DEFAULT_CONFIG)
    seen = _Seen()
    with (
        tempfile.TemporaryDirectory(prefix="kclrun-run-") as temporary,
        orphans_left_alone(),
        _environment_kept(),
    ):
        report = Path(temporary) / "report.json"
        code = run_application(configuration, report, seen.display)
        done = msgspec.json.decode(report.read_bytes(), type=RunReport)
    return _judged(code, done, seen.halted)


class _Seen:
    """What the samples of a run show that its report does not."""

    def __init__(self) -> None:
        self.halted: dict[str, str] = {}

    @contextmanager
    def display(
        self, settings: Settings, _: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[Settings, OnSample | None]]:
        yield settings, self._take

    def _take(self, sample: ManagerSample) -> None:
        # After a drain began, the leases are given away one by one.
        if not sample.is_draining:
            self.halted = {
                display_name(lease.shard): lease.note
                for lease in sample.leases
                if lease.state == "halted"
            }


def _judged(code: int, done: RunReport, halted: Mapping[str, str]) -> RunResult:
    """The result, or the error that the exit code stands for."""
    match code:
        case exit_codes.HALTED:
            lines = [f"{shard}: {why}" for shard, why in halted.items()]
            raise ProcessorError(
                "\n".join(["user code gave up, and all other shards are read", *lines])
            )
        case exit_codes.NO_STREAM:
            raise NotFound(f"the run has ended: {done.exit_reason}")
        case exit_codes.CONFIGURATION:
            raise TableRefused(f"the run has ended: {done.exit_reason}")
    return RunResult(
        reason=done.exit_reason,
        exit_code=code,
        records=done.totals.records,
        halted=dict(halted),
    )


def _refuse_place() -> None:
    """Raises: SettingsError outside the main thread, and while one of our processes imports user
    code: without it, a script would start itself again and again."""
    spec = getattr(sys.modules.get(_MAIN), "__spec__", None)
    ours = spec.name if spec is not None else ""
    if ours.startswith("kclrun.") and ours != "kclrun.__main__":
        raise SettingsError(
            "kclrun.run: was called while its module was imported by a process of kclrun\n"
            'Put the call under  if __name__ == "__main__":'
        )
    if threading.current_thread() is not threading.main_thread():
        raise SettingsError(
            "kclrun.run: runs in the main thread, where signals arrive that end it in good order\n"
            "Call it there, or run `kclrun --config app.yaml` as a process of its own"
        )


# The processor.


class _UserCode(NamedTuple):
    """A name that other processes can import, and the folder to search first."""

    reference: str
    folder: Path


def _user_code(
    processor: type[RecordProcessor] | str | None, *, has_path: bool
) -> _UserCode | None:
    """Raises: ProcessorLoadError for a class that no other process can import."""
    if processor is None:
        return None
    here = Path.cwd()
    if isinstance(processor, str):
        module = processor.partition(":")[0]
        return _UserCode(processor, here if has_path else _root(module) or here)
    if not isinstance(processor, type):
        raise ProcessorLoadError(
            f"processor: expected a class or module:Class, got {type(processor).__name__}"
        )
    module, root = _importable(processor)
    return _UserCode(f"{module}:{processor.__name__}", here if has_path else root or here)


def _importable(processor: type) -> tuple[str, Path | None]:
    """The module of a class, as other processes import it, and its folder."""
    name = processor.__name__
    if processor.__qualname__ != name:
        raise ProcessorLoadError(
            f"processor: {processor.__qualname__} is defined inside of something, and lease"
            " processes import it by its name\nDefine it at the top of a module"
        )
    module = sys.modules.get(processor.__module__)
    if getattr(module, name, None) is not processor:
        raise ProcessorLoadError(
            f"processor: {processor.__module__} has another {name}, or none, and lease processes"
            " import it by its name\nImport it again, or give it as module:Class"
        )
    assert module is not None, "it has the class"
    if processor.__module__ != _MAIN:
        return processor.__module__, _root(processor.__module__)
    return _of_script(module, name)


def _of_script(main: ModuleType, name: str) -> tuple[str, Path | None]:
    """The program's own module: by its name for `python -m`, else by the name of its file."""
    spec, file = main.__spec__, getattr(main, "__file__", None)
    if spec is not None and spec.name != _MAIN:
        return spec.name, _root(spec.name)
    path = None if file is None else Path(file).resolve()
    if path is None or path.suffix != ".py" or not path.stem.isidentifier():
        raise ProcessorLoadError(
            f"processor: {name} is defined in {'a session' if path is None else path.name}, and"
            " lease processes import it by its name\n"
            f"Write it into a file such as orders.py, then  from orders import {name}"
        )
    return path.stem, path.parent


def _root(module: str) -> Path | None:
    """The folder from which Python imports a module; None for an installed or an unknown one."""
    try:
        spec = find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations))).parent
    elif spec.origin is not None and spec.has_location:
        root = Path(spec.origin).parent
    else:
        return None
    installed = {*site.getsitepackages(), site.getusersitepackages(), str(Path(os.__file__).parent)}
    return None if str(root) in installed else root.resolve()


# The settings.


def _plain(value: Any) -> Any:
    """The values that YAML has, for the same rules."""
    match value:
        case Mapping():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Path():
            return str(value)
        case datetime():
            return value.isoformat()
        case timedelta():
            return f"{value.total_seconds():.3f}s"
        case _:
            return value


@contextmanager
def _environment_kept() -> Iterator[None]:
    """A run on Spark sets variables for its workers; the program gets its own back."""
    former = {name: os.environ.get(name) for name in _OF_SPARK}
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _refuse_session() -> None:
    """Raises: SettingsError beside a Spark session of the program, which the run would end."""
    if "pyspark" not in sys.modules:
        return
    from kclrun.spark.engine.session import has_context

    if has_context():
        raise SettingsError(
            "engine: spark opens a session and ends it with the run; this program has one already\n"
            "Stop it first, or use the source in it: spark.readStream.format('kclrun')"
        )
