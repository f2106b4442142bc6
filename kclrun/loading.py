"""User code by name: `module:Class` and `module:function`, and what is said when it will not load.

`kclpy:module:Class` and `kclpy:script.py` name a processor written for `amazon_kclpy`.
Imported from the given folders first, then from the environment; never from the folder a shell
happens to stand in [S4]. Used by lease processes and by `kclrun check`, which runs this module in
a process of its own, so that a manager never holds user code: `python -m kclrun.loading`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kclrun.errors import ProcessorLoadError
from kclrun.processor import RecordProcessor

__all__ = ["MARK", "import_paths", "load_function", "load_pipeline", "load_processor"]

_REFERENCE: Final = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):(\w+)\Z")
# A name, not a path: a script is looked for where modules are.
_SCRIPT: Final = re.compile(r"[\w-][\w.-]*\.py\Z")
# What user code said at import, as much of it as fits a screen.
_TEXT_MAX: Final = 2_000
_EX_CONFIG: Final = 78
_KCLPY: Final = "kclpy:"
# How the runtime calls each method of a processor.
_ARGUMENTS: Final = {
    "initialize": ("context",),
    "process_records": ("batch", "checkpointer"),
    "shard_ended": ("checkpointer",),
    "lease_lost": (),
    "shutdown_requested": ("checkpointer",),
}
# Between what user code wrote to standard error and our message.
MARK: Final = "\x1e"


def import_paths(path: str | None, config_folder: Path) -> tuple[Path, ...]:
    """Where user code is looked for: `path` (relative to the file), else its folder and parent."""
    folder = config_folder.resolve()
    return ((folder / path).resolve(),) if path is not None else (folder, folder.parent)


def load_processor(
    reference: str, paths: Sequence[Path], setting: str = "processor"
) -> type[RecordProcessor]:
    """The RecordProcessor subclass that `module:Class` names; `setting` is what messages call it.

    For `kclpy:module:Class` and `kclpy:script.py`, the one around the processor of `amazon_kclpy`.
    `paths` stay at the head of `sys.path`: what the processor imports later comes from there too.
    Raises: ProcessorLoadError saying what was searched, what the import said, what to do.
    """
    if reference.startswith(_KCLPY):
        return _load_kclpy(setting, reference.removeprefix(_KCLPY), paths)
    found = _load(setting, reference, paths)
    if not isinstance(found, type) or not issubclass(found, RecordProcessor):
        raise ProcessorLoadError(
            f"{setting}: {reference} is {_kind(found)}, not a subclass of RecordProcessor\n"
            "Write `class YourName(RecordProcessor)`, with `from kclrun import RecordProcessor`"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ProcessorLoadError(f"{setting}: {reference} does not define {', '.join(missing)}")
    _check_signatures(setting, reference, found)
    return found


def _check_signatures(setting: str, reference: str, processor: type[RecordProcessor]) -> None:
    """A method that cannot take its arguments would halt every shard at its first call."""
    for name, arguments in _ARGUMENTS.items():
        try:
            inspect.signature(getattr(processor, name)).bind("self", *arguments)
        except TypeError as error:
            raise ProcessorLoadError(
                f"{setting}: {reference} cannot be called: {name} takes"
                f" ({', '.join(('self', *arguments))}); {error}"
            ) from None


def _load_kclpy(setting: str, reference: str, paths: Sequence[Path]) -> type[RecordProcessor]:
    # Not above: lease processes of other processors do without it.
    from kclrun.compat.kclpy import adapted, stand_in
    from kclrun.compat.kclpy.scripts import adapted_script

    _put_first(paths)
    stand_in()
    if _SCRIPT.match(reference):
        return adapted_script(_find_script(setting, reference, paths))
    found = _load(setting, reference, paths)
    if not callable(found):
        raise ProcessorLoadError(f"{setting}: {reference} is {_kind(found)}, not a class")
    try:
        return adapted(found)
    except ProcessorLoadError as error:
        raise ProcessorLoadError(f"{setting}: {error}") from None


def _find_script(setting: str, name: str, paths: Sequence[Path]) -> Path:
    for path in paths:
        if (path / name).is_file():
            return path / name
    raise ProcessorLoadError(
        f"{setting}: there is no script {name}\n"
        f"Searched: {', '.join(str(path) for path in paths)}\n"
        "Set `path:` to the folder that holds it"
    )


def _try_script(setting: str, name: str, paths: Sequence[Path]) -> None:
    """Import what a script imports; its main block waits for a shard."""
    from kclrun.compat.kclpy.scripts import import_script

    script = _find_script(setting, name, paths)
    try:
        import_script(script)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        raise ProcessorLoadError(_failed(setting, name, error)) from None


def load_function(setting: str, reference: str, paths: Sequence[Path]) -> Callable[..., Any]:
    """The function that `module:function` names; `setting` is what messages call it.

    Raises: ProcessorLoadError.
    """
    found = _load(setting, reference, paths)
    if not callable(found):
        raise ProcessorLoadError(f"{setting}: {reference} is {_kind(found)}, not a function")
    result: Callable[..., Any] = found
    return result


def load_pipeline(reference: str, paths: Sequence[Path]) -> Callable[..., Any]:
    """The function `(records)` or `(records, options)` that `pipeline:` names.

    Raises: ProcessorLoadError.
    """
    pipeline = load_function("pipeline", reference, paths)
    signature = inspect.signature(pipeline)
    for given in (("records",), ("records", "options")):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return pipeline
    raise ProcessorLoadError(
        f"pipeline: {reference} cannot be called with (records) or (records, options):"
        f" it takes {signature}"
    )


def _load(setting: str, reference: str, paths: Sequence[Path]) -> object:
    match = _REFERENCE.match(reference)
    if match is None:
        raise ProcessorLoadError(f"{setting}: expected module:name, got {reference[:60]!r}")
    module_name, name = match[1], match[2]
    _put_first(paths)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ProcessorLoadError(_not_found(setting, module_name, paths)) from None
        raise ProcessorLoadError(_failed(setting, module_name, error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        raise ProcessorLoadError(_failed(setting, module_name, error)) from None
    try:
        return getattr(module, name)
    except AttributeError:
        raise ProcessorLoadError(
            f"{setting}: {module.__file__ or module_name} defines no {name}\n"
            f"It defines: {_defined(module)}"
        ) from None


def _put_first(paths: Sequence[Path]) -> None:
    """Search `paths` first; and not the current folder, unless it is one of them."""
    wanted = [str(path) for path in paths]
    kept = [entry for entry in sys.path if entry not in {"", ".", *wanted}]
    sys.path[:] = wanted + kept
    # A folder may have been written to since Python looked into it.
    importlib.invalidate_caches()


def _not_found(setting: str, module_name: str, paths: Sequence[Path]) -> str:
    searched = ", ".join(str(path) for path in paths)
    lines = [
        f"{setting}: there is no module {module_name}",
        f"Searched: {searched}, then the environment of {sys.executable}",
    ]
    top, *below = module_name.split(".")
    file = next(
        (path for path in paths if path.joinpath(top, *below).with_suffix(".py").is_file()), None
    )
    if below and file is not None:
        lines.append(
            f"{file / top} has no __init__.py, and another package named {top} is installed:"
            f" create {file / top / '__init__.py'}"
        )
    else:
        lines.append("Set `path:` to the folder that holds it, or install it there")
    return "\n".join(lines)


def _failed(setting: str, module_name: str, error: BaseException) -> str:
    """What the import raised, and where in user code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    where = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    said = "".join(traceback.format_exception_only(error)).strip()[:_TEXT_MAX]
    return f"{setting}: importing {module_name} failed{where}\n{said}"


def _kind(found: object) -> str:
    return (
        f"the class {found.__name__}"
        if isinstance(found, type)
        else f"of type {type(found).__name__}"
    )


def _defined(module: object) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == getattr(module, "__name__", "")
    ]
    return ", ".join(sorted(names)[:20]) or "nothing"


def _main(arguments: Sequence[str]) -> int:
    """`SETTING=REFERENCE… -- PATH…`: load each; say on standard error what is wrong, exit 78."""
    end = arguments.index("--")
    folders = [Path(path) for path in arguments[end + 1 :]]
    for argument in arguments[:end]:
        setting, _, reference = argument.partition("=")
        try:
            if setting.rpartition(".")[2] == "processor":
                load_processor(reference, folders, setting)
                if _SCRIPT.match(reference.removeprefix(_KCLPY)):
                    _try_script(setting, reference.removeprefix(_KCLPY), folders)
            elif setting == "pipeline":
                load_pipeline(reference, folders)
            else:
                load_function(setting, reference, folders)
        except ProcessorLoadError as error:
            # Below whatever the user's code printed, and nothing but this is shown.
            sys.stderr.write(f"{MARK}{error}\n")
            return _EX_CONFIG
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
