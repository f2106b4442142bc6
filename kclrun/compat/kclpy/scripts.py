"""The processor that a script of `amazon_kclpy` makes in its own main block.

A script ends in `KCLProcess(Consumer(...)).run()`. It is run as the main program, with `sys.argv`
from `options.arguments`, up to that call, which hands the processor over. What surrounds the call
with `with` or `finally` is left there, and nothing behind it is run: the MultiLangDaemon would have
ended the process instead. May not know: how it was found, or who calls the processor.
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

__all__ = ["adapted_script", "import_script"]

_ARGUMENTS: Final = "arguments"


class _HandedOver(BaseException):
    """Ends a script where it would have begun to serve; no `except Exception` is to catch it."""


def adapted_script(script: Path) -> type[RecordProcessor]:
    """The `RecordProcessor` of what `script` gives to `KCLProcess`; run when a shard starts."""
    return adapted_maker(lambda options: _made_by(script, _arguments(options)), script.name)


def import_script(script: Path) -> None:
    """Run all of the script but its main block: imports, definitions. Raises: what it does."""
    stand_in()
    runpy.run_path(str(script), run_name="kclpy_script")


def _made_by(script: Path, arguments: Sequence[str]) -> Any:
    """Run the script up to `run()`. Raises: ProcessorLoadError if it does not come there; else what
    the script raises."""
    handed_over: list[Any] = []

    def hand_over(processor: Any) -> None:
        handed_over.append(processor)
        raise _HandedOver

    # Ours, in an installed amazon_kclpy, too: that one's would read the daemon's messages.
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
    return [str(each) for each in arguments]
