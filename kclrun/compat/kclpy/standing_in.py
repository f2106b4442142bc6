"""Answers `import amazon_kclpy` with our modules where the package is not installed.

Only a lease process, `kclrun check` and a test that asks for it are changed, and only where the
name would not be found. Our modules are put under their names before user code imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Final

_NAME: Final = "amazon_kclpy"
_OURS: Final = f"{__package__}.{_NAME}"
_MODULES: Final = ("", ".checkpoint_error", ".kcl", ".messages", ".v2", ".v2.processor")
_ALL: Final = (*_MODULES, ".v3", ".v3.processor")


def stand_in() -> bool:
    """Answer for `amazon_kclpy` if the package is not installed; returns whether we do.

    Call it before user code is imported, with the final `sys.path`. Harmless when repeated.
    """
    known = sys.modules.get(_NAME)
    if known is not None:
        return known.__name__ == _OURS
    found = importlib.util.find_spec(_NAME)
    # A folder of that name without an __init__.py, such as a checkout, does not count as a package.
    if found is not None and found.origin is not None:
        return False
    for module in _ALL:
        sys.modules[f"{_NAME}{module}"] = importlib.import_module(f"{_OURS}{module}")
    return True
