"""Imports user code once in a process of its own, for `kclrun check` and each start.

Both sides of that process. Its answer is complete when one line of JSON has come on a pipe of its
own, and not at the end of a pipe: user code may start processes while it is imported, and they
inherit the standard streams. Such processes are ended with it.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from kclrun.cli.child_lines import open_pidfd
from kclrun.codec.values import Decode
from kclrun.destinations import open_user_output_at
from kclrun.emit_calls import EmitCall, emit_calls, state_uses
from kclrun.errors import HostRefused, ProcessorLoadError, SettingsError, SinkError
from kclrun.loading import (
    decoded_options,
    kind_of,
    load_decoder,
    load_decoding,
    load_function,
    load_output,
    load_pipeline,
    load_processor,
    try_script,
)
from kclrun.manager.launcher import adopt_orphans
from kclrun.model.output import NO_ROWS, OutputDestination, naming_output, setting_of

# After its answer the process ends by itself, unless user code has left a thread running.
_END_MAX_MS: Final = 1000
# Of the standard error only the end is shown.
_SAID_BYTES_MAX: Final = 64 * 1024


class Loaded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer: why the import failed; or the kind of each processor, by its setting, and the
    calls of `emit` and the uses of the state in their sources. Of an output that was checked:
    the `words` of its class, or why it is `away`."""

    error: str | None = None
    words: str = ""
    away: str | None = None
    kinds: dict[str, str] = {}
    emits: list[EmitCall] = []
    state_uses: list[str] = []


class Trial(msgspec.Struct, frozen=True):
    """What came of it. `loaded` None: there was no answer. `exit_code` None: it still ran when the
    time was over. `said`: the end of its standard error."""

    loaded: Loaded | None
    exit_code: int | None
    said: str


def try_import(
    command: Sequence[str],
    named: Mapping[str, str],
    paths: Sequence[Path],
    environment: Mapping[str, str],
    *,
    options: Mapping[str, Sequence[Mapping[str, Any]]] = types.MappingProxyType({}),
    within_s: float,
) -> Trial:
    """Import the references `named` (by setting) from `paths`, in a process that `command` starts.
    `options` are those that a processor gets, of each of its streams.

    Neither the process nor those that it started are left behind. Raises: OSError, HostRefused.
    """
    answer_fd, child_fd = os.pipe()
    arguments = [f"{setting}={reference}" for setting, reference in named.items()]
    options_fd = _written(msgspec.msgpack.encode(dict(options)))
    try:
        process = subprocess.Popen(
            [*command, str(child_fd), *arguments, "--", *map(str, paths)],
            env=environment,
            stdin=options_fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[child_fd],
            # Ctrl-C in a terminal must reach only this process, which ends the other itself.
            process_group=0,
        )
    finally:
        os.close(child_fd)
        os.close(options_fd)
    try:
        pidfd = open_pidfd(process)
    except HostRefused:
        os.close(answer_fd)
        _end(process)
        raise
    try:
        output = _read(process, answer_fd, pidfd, time.monotonic() + within_s)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        has_ended = bool(ended.poll(_END_MAX_MS if output.answer else 0))
    finally:
        os.close(answer_fd)
        os.close(pidfd)
        _end(process)
    said = output.said.decode(errors="replace")
    if output.answer:
        return Trial(msgspec.json.decode(output.answer, type=Loaded), None, said)
    return Trial(None, process.returncode if has_ended else None, said)


def _written(data: bytes) -> int:
    """A file in memory, to be read from its start. Options may be secret: arguments of a process
    can be read by every user of the machine."""
    fd = os.memfd_create("kclrun-options")
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _ChildOutput(msgspec.Struct):
    """`answer` is empty until it is complete."""

    answer: bytes = b""
    said: bytes = b""


def _read(
    process: subprocess.Popen[bytes], answer_fd: int, pidfd: int, deadline: float
) -> _ChildOutput:
    """What the process writes until its answer is complete, it ends, or the time is over."""
    assert process.stderr is not None
    output, begun = _ChildOutput(), b""
    with selectors.DefaultSelector() as selector:
        for fd in (answer_fd, process.stderr.fileno(), pidfd):
            selector.register(fd, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(left_s)}
            if ready == {pidfd}:
                break  # it has ended, and nothing is left to be read
            for fd in ready - {pidfd}:
                piece = os.read(fd, _SAID_BYTES_MAX)
                if not piece:
                    selector.unregister(fd)
                elif fd == answer_fd:
                    begun += piece
                else:
                    output.said = (output.said + piece)[-_SAID_BYTES_MAX:]
            if begun.endswith(b"\n"):
                output.answer = begun
                break
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and those that it started, as far as they are known, and wait for it."""
    assert process.stderr is not None
    # Also those of other process groups; none once it has ended.
    with suppress(psutil.Error):
        _kill(psutil.Process(process.pid).children(recursive=True))
    # Until it is waited for, no other group has its number.
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


# The process of the import.

# The options of each stream of a processor, by the setting that names it.
_Options = dict[str, list[dict[str, Any]]]


def _unopened() -> Decode:
    """Stands for the schema registry, which a check does not ask."""
    return bytes


def _loaded(named: Sequence[tuple[str, str]], folders: Sequence[Path], options: _Options) -> Loaded:
    """Load each reference, by its setting."""
    kinds: dict[str, str] = {}
    emits: list[EmitCall] = []
    uses: list[str] = []
    try:
        for setting, reference in named:
            match setting.rpartition(".")[2]:
                case "decode":
                    load_decoder(reference, folders, _unopened, setting)
                case "processor":
                    processor = load_processor(reference, folders, setting)
                    load_decoding(None, processor, folders, _unopened)
                    for given in options.get(setting, ()):
                        decoded_options(processor, given)
                    kinds[setting] = kind_of(processor)
                    emits += emit_calls(processor)
                    uses += state_uses(processor)
                    try_script(setting, reference, folders)
                case "use":
                    output = load_output(reference, folders, setting)
                    with naming_output(_output_of(setting)):
                        for given in options.get(setting, ()):
                            decoded_options(output, given)
                case "check":
                    return _checked(_output_of(setting), reference, folders, options[setting][0])
                case "pipeline":
                    load_pipeline(reference, folders)
                case _:
                    load_function(setting, reference, folders)
    except (ProcessorLoadError, SettingsError) as error:
        return Loaded(error=str(error))
    return Loaded(kinds=kinds, emits=emits, state_uses=uses)


def _output_of(setting: str) -> str:
    """The name of the output in `output.use` and `outputs.late.use`."""
    return setting.split(".")[-2]


def _checked(name: str, reference: str, folders: Sequence[Path], options: dict[str, Any]) -> Loaded:
    """Open an output of user code, and let it look at its destination."""
    load_output(reference, folders, setting_of(name))
    place = OutputDestination(name=name, use=reference, options=options)
    try:
        with closing(open_user_output_at(place, NO_ROWS)) as output, naming_output(name):
            return Loaded(words=output.check())
    except SinkError as error:
        return Loaded(away=str(error))


def _main(arguments: Sequence[str]) -> int:
    """`FD SETTING=REFERENCE… -- PATH…`: load each; write the answer to this descriptor."""
    answer_fd = int(arguments[0])
    options = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Options)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    # No process that user code starts has it: a program (exec), a fork.
    os.set_inheritable(answer_fd, False)
    os.register_at_fork(after_in_child=lambda: os.close(answer_fd))
    # Whatever it starts stays below this process, where it is found at the end.
    adopt_orphans()
    end = arguments.index("--")
    folders = [Path(path) for path in arguments[end + 1 :]]
    pairs = [argument.partition("=") for argument in arguments[1:end]]
    named = [(setting, reference) for setting, _, reference in pairs]
    answer = msgspec.json.encode(_loaded(named, folders, options)) + b"\n"
    while answer:
        answer = answer[os.write(answer_fd, answer) :]
    _kill(psutil.Process().children(recursive=True))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
