"""The processor that a script of `amazon_kclpy` makes in its own main block.

It does not know how the script was found, or which code calls the processor.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kclrun.compat.kclpy.adapter import adapted_maker
from kclrun.compat.kclpy.amazon_kclpy.kcl import KCLProcess
from kclrun.compat.kclpy.standing_in import stand_in
from kclrun.errors import ProcessorLoadError
from kclrun.processor import RecordProcessor

_ARGUMENTS: Final = "arguments"


class _HandedOver(BaseException):
    """Ends a script at the point where it would begin to serve; `except Exception` must not catch
    it."""


def adapted_script(script: Path) -> type[RecordProcessor]:
    """The `RecordProcessor` around the processor that `script` gives to `KCLProcess`.

    A script ends in `KCLProcess(Consumer(...)).run()`. When a shard starts, the script is run as
    the main program, with `sys.argv` from `options.arguments`, up to that call, which passes the
    processor on. A `with` or `finally` around the call is left there, and no code after it is run:
    the MultiLangDaemon would have ended the process instead.
    """
    return adapted_maker(lambda options: _made_by(script, _arguments(options)), script.name)


def import_script(script: Path) -> None:
    """Run all of the script except its main block: imports, definitions. Raises: its errors."""
    stand_in()
    runpy.run_path(str(script), run_name="kclpy_script")


def _made_by(script: Path, arguments: Sequence[str]) -> Any:
    """Run the script up to `run()`. Raises: ProcessorLoadError if it does not reach that call; else
    the errors of the script."""
    handed_over: list[Any] = []

    def hand_over(processor: Any) -> None:
        handed_over.append(processor)
        raise _HandedOver

    # Ours also replaces the class of an installed amazon_kclpy: that one would read the daemon's
    # messages.
    kcl: Any = importlib.import_module("amazon_kclpy.kcl")
    kcl.KCLProcess = KCLProcess
    KCLProcess.hand_over = hand_over
    sys.argv = [str(script), *arguments]
    ended = "it came to its end"
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _HandedOver:
        pass
    except SystemExit as error:
        ended = f"it ended with {error.code!r}"
    finally:
        KCLProcess.hand_over = None
    if not handed_over:
        raise ProcessorLoadError(
            f"{script} gave no processor to KCLProcess(...).run(): {ended}\n"
            "Its arguments come from options: {arguments: [...]}; or name the processor's class,"
            " as kclpy:module:Class"
        )
    return handed_over[-1]


def _arguments(options: Mapping[str, Any]) -> list[str]:
    arguments = options.get(_ARGUMENTS, [])
    if not isinstance(arguments, list | tuple):
        raise ProcessorLoadError(
            f"options.{_ARGUMENTS}: expected a list, such as [--table, orders]; it is what the"
            " script finds in sys.argv"
        )
    return [str(argument) for argument in arguments]
