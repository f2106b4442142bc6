"""Who answers to `import amazon_kclpy`: the package itself where it is installed, else we do.

Rule: only a lease process, `kclrun check` and a test that asks for it are changed, and only where
the name would not be found. Our modules are put under their names before anything looks for them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Final

__all__ = ["stand_in"]

_NAME: Final = "amazon_kclpy"
_OURS: Final = f"{__package__}.{_NAME}"
_MODULES: Final = ("", ".checkpoint_error", ".kcl", ".messages", ".v2", ".v2.processor")
_ALL: Final = (*_MODULES, ".v3", ".v3.processor")


def stand_in() -> bool:
    """Answer for `amazon_kclpy` if nobody else does; whether we do.

    Called before user code is imported, with `sys.path` as it will be. Harmless when repeated.
    """
    known = sys.modules.get(_NAME)
    if known is not None:
        return known.__name__ == _OURS
    found = importlib.util.find_spec(_NAME)
    # A folder of that name without an __init__.py, such as a checkout, is nobody's package.
    if found is not None and found.origin is not None:
        return False
    for module in _ALL:
        sys.modules[f"{_NAME}{module}"] = importlib.import_module(f"{_OURS}{module}")
    return True
