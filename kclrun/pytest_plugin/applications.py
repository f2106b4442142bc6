"""Real runs of an application from a test: `kclrun run` as a process, over the embedded AWS.

Streams, lease table and services are those of the test; rows, dead letters, state and lock files
are in a folder of the test, whatever the settings name. So a second run goes on where the first
one ended, and nothing outside is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import psutil

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.local.in_process import InProcessAws
from kclrun.model.letter import Letter
from kclrun.model.output import MAIN_OUTPUT
from kclrun.model.stream import LOOPBACK_REGION
from kclrun.outputs.dead_letters import LetterFolder
from kclrun.processor import RecordProcessor
from kclrun.pytest_plugin.streams import TestStream

# A run that only starts, reads and ends takes two seconds; a machine busy with tests, thirty times.
_RUN_MAX_S: Final = 120.0
_POLL_S: Final = 0.02
_SHOWN_LINES: Final = 20

Config = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run, and those before it in this test, have left.

    `rows` are those of `output`, `outputs` those of each output by its name; `letters` the dead
    letters; `log` the log lines of this run, as mappings; `report` what `--report` writes.
    """

    exit_code: int
    rows: list[dict[str, Any]]
    outputs: dict[str, list[dict[str, Any]]]
    letters: list[Letter]
    log: list[dict[str, Any]]
    report: dict[str, Any]

    @property
    def halted(self) -> list[str]:
        """The shards that were halted, or still are."""
        halts = {"lease_halted", "lease_still_halted"}
        return sorted({line["shard"] for line in self.log if line.get("event") in halts})


class Application:
    """An application that runs. Made by `run_application.start`."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        with place.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kclrun", *place.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=place.environment,
            )

    def rows(self, output: str = MAIN_OUTPUT) -> list[dict[str, Any]]:
        """The rows written so far, those that no checkpoint covers yet among them."""
        return self._place.rows(output)

    def wait_until(self, condition: Callable[[], object], timeout_s: float = _RUN_MAX_S) -> None:
        """Return once the condition holds. Raises: AssertionError if the application ends before,
        or after `timeout_s`, with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if (code := self._process.poll()) is not None:
                raise AssertionError(f"it ended with {code} before\n{self._place.log_end()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:.0f} s\n{self._place.log_end()}")
            time.sleep(_POLL_S)

    def crash_lease_processes(self) -> int:
        """Kill the lease processes that run, as a lack of memory would; the application starts
        them again. Returns: how many there were."""
        found = list(self._place.processes("kclrun-lease"))
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(found)

    def crash(self) -> None:
        """Kill every process of it at once, as a machine that is lost. Start it again, or run it,
        to see what comes twice."""
        everyone = list(self._place.processes())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self._process.wait()

    def stop(self) -> Run:
        """Drain it, as a deploy does, and wait until it has ended."""
        self._process.terminate()
        return self.wait()

    def wait(self, timeout_s: float = _RUN_MAX_S) -> Run:
        """Wait until it has ended. Raises: AssertionError after `timeout_s`, or if it exits with
        another code than 0 and 65 (caught up but for halted shards), with the end of its log."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"it still runs after {timeout_s:.0f} s\n{self._place.log_end()}"
            ) from None
        if code not in (exit_codes.DRAINED, os.EX_DATAERR):
            raise AssertionError(f"kclrun ended with {code}\n{self._place.log_end()}")
        return self._place.run(code)

    def close(self) -> None:
        if self._process.poll() is None:
            self.crash()


class Applications:
    """The fixture `run_application`: call it to run an application until it has caught up."""

    def __init__(self, aws: InProcessAws, stream: str, folder: Path) -> None:
        self._aws = aws
        self._stream = stream
        self._folder = folder
        self._started: list[Application] = []

    def __call__(
        self, config: Config, *overrides: str, exit_code: int = 0, timeout_s: float = _RUN_MAX_S
    ) -> Run:
        """Run an application until every record in its streams is processed; what it has left.

        `config` is the file, or a mapping of settings, in which `processor` may be the class
        itself; `overrides` are as of `--set`, such as `"leases.max=1"`. In place of `stream` it
        reads `kclrun_stream`; of several streams each keeps its name, and is made if it is missing.

        Raises: SettingsError; AssertionError for another exit code than `exit_code` (65: a shard
        was halted), with the end of the log.
        """
        run = self.start(config, *overrides, "until=caught-up").wait(timeout_s)
        assert run.exit_code == exit_code, (
            f"kclrun ended with {run.exit_code}, not {exit_code}; halted: {run.halted}\n"
            + "\n".join(json.dumps(line) for line in run.log[-_SHOWN_LINES:])
        )
        return run

    def start(self, config: Config, *overrides: str) -> Application:
        """Start it, and do not wait; it runs until it is stopped, at most until the test ends."""
        file = self._file(config) if isinstance(config, Mapping) else Path(config)
        settings = ConfigChoice(file, overrides).load().settings
        if settings.engine != "fleet":
            raise SettingsError("run_application is for engine: fleet")
        for source in settings.streams:
            TestStream(self._aws, source.name)
        changed = _redirected(settings, self._folder)
        changed["aws"] = {"region": LOOPBACK_REGION, "endpoint": self._aws.endpoint}
        if not settings.streams:
            changed["stream"] = self._stream
        given = [f"{name}={json.dumps(value)}" for name, value in changed.items()]
        place = _Place(self._folder, file, (*overrides, *given), settings)
        application = Application(place)
        self._started.append(application)
        return application

    def _file(self, settings: Mapping[str, Any]) -> Path:
        """A mapping as a file."""
        own = {} if "streams" in settings else {"stream": self._stream}
        settings = {"application": "test", **own, **settings}
        if isinstance(processor := settings.get("processor"), type):
            settings |= _named(processor)
        file = self._folder / "app.yaml"
        file.write_text(json.dumps(settings))
        file.chmod(0o600)
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for application in self._started:
            application.close()


class _Place:
    """The folder of a test's runs: how a run is started, and what it leaves."""

    def __init__(
        self, folder: Path, file: Path, overrides: tuple[str, ...], settings: Settings
    ) -> None:
        self._folder = folder
        self.log = folder / "log"
        self._report = folder / "report.json"
        self._report.unlink(missing_ok=True)
        self._names = [*([MAIN_OUTPUT] if settings.output else []), *settings.outputs]
        sets = [word for override in overrides for word in ("--set", override)]
        self.arguments = ["--config", str(file), *sets, "--report", str(self._report)]
        self._state_dir = str(folder / "locks")
        self.environment = os.environ | {
            "KCLRUN_STATE_DIR": self._state_dir,
            # What the test can import its processor can.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }

    def run(self, exit_code: int) -> Run:
        outputs = {name: self.rows(name) for name in self._names}
        letters = LetterFolder(self._folder / "letters").kept()
        return Run(
            exit_code=exit_code,
            rows=outputs.get(MAIN_OUTPUT, []),
            outputs=outputs,
            letters=[letter.letter for letter in letters],
            log=list(self._log_lines()),
            report=msgspec.json.decode(self._report.read_bytes()) if self._report.exists() else {},
        )

    def rows(self, output: str) -> list[dict[str, Any]]:
        files = sorted((self._folder / "rows" / output).rglob("*.jsonl"))
        return [
            msgspec.json.decode(line)
            for file in files
            # Without the last line while it is being written.
            for line in file.read_bytes().rpartition(b"\n")[0].splitlines()
        ]

    def processes(self, name: str | None = None) -> Iterator[psutil.Process]:
        """Every process of the runs of this test, or those of this name."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it may end between two looks
                is_ours = process.environ().get("KCLRUN_STATE_DIR") == self._state_dir
                if is_ours and name in {None, process.name()}:
                    yield process

    def log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])

    def _log_lines(self) -> Iterator[dict[str, Any]]:
        for line in self.log.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):  # what user code printed
                found = msgspec.json.decode(line)
                if isinstance(found, dict):
                    yield found


def _redirected(settings: Settings, folder: Path) -> dict[str, Any]:
    """The settings that leave the test alone with its folder, by their names."""
    changed: dict[str, Any] = {"log.format": "json", "instance.watch": False, "leases.tags": {}}
    if settings.output is not None:
        changed["output"] = _rows_in(folder, MAIN_OUTPUT, settings.output.schema)
    for name, output in settings.outputs.items():
        changed[f"outputs.{name}"] = _rows_in(folder, name, output.schema) | {"roll": {}}
    if settings.on_error.then == "dead-letter":
        changed["on_error.dead_letter"] = {"path": str(folder / "letters")}
    if settings.state is not None:
        changed["state.store"] = str(folder / "state")
    if settings.observe.listen is not None:
        changed["observe.listen"] = 0
    return changed


def _rows_in(folder: Path, name: str, schema: str | None) -> dict[str, Any]:
    place = {"path": str(folder / "rows" / name)}
    return place if schema is None else place | {"schema": schema}


def _named(processor: type[RecordProcessor]) -> dict[str, str]:
    """A class as `processor`, with the `path` that its module is imported from."""
    module, name = processor.__module__, processor.__qualname__
    file = getattr(sys.modules[module], "__file__", None)
    if "." in name or file is None:
        raise SettingsError(f"processor: {name} must be a class at the top of a module in a file")
    path = Path(file)
    # A package is its folder.
    depth = module.count(".") + (path.name == "__init__.py")
    return {"processor": f"{module}:{name}", "path": str(path.parents[depth])}
