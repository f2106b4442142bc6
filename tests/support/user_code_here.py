"""The trial import of user code in this process: it has the answers of the one in a process of its
own (tests/unit/cli/test_cli_trial_import.py), without the quarter of a second of an interpreter."""

import io
import os
import sys
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from unittest.mock import patch

import msgspec

from kclrun.cli.trial_import import Loaded, Trial, _loaded


def try_import_here(command, named, paths, environment, *, options, within_s):
    """As `try_import`, for user code that leaves nothing behind but its modules."""
    said = io.StringIO()
    with (
        patch.dict(os.environ, environment, clear=True),
        _own_modules(paths),
        redirect_stderr(said),
    ):
        answer = msgspec.json.encode(_loaded(list(named.items()), paths, options))
    return Trial(msgspec.json.decode(answer, type=Loaded), None, said.getvalue())


@contextmanager
def _own_modules(folders):
    """Modules that are imported from these folders are imported anew the next time."""
    before, path = set(sys.modules), sys.path[:]
    with patch.object(sys, "dont_write_bytecode", new=True):
        try:
            yield
        finally:
            sys.path[:] = path
            for name in sys.modules.keys() - before:
                if _is_of(sys.modules[name], folders) or name.startswith("amazon_kclpy"):
                    del sys.modules[name]


def _is_of(module, folders):
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", ()))
    return any(Path(place).is_relative_to(folder) for place in places for folder in folders)
