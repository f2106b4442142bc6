"""Tables that are data: YAML and JSON files of the package, read where they are used.

A file that does not fit its type is a defect of kclrun, and tests read each of them.
"""

from __future__ import annotations

import importlib.resources
from typing import TypeVar

import msgspec
import msgspec.yaml

T = TypeVar("T")


def package_data(package: str, name: str, kind: type[T]) -> T:
    """The content of the file `name` of a package. Raises: msgspec.ValidationError."""
    content = importlib.resources.files(package).joinpath(name).read_bytes()
    if name.endswith(".json"):
        return msgspec.json.decode(content, type=kind)
    return msgspec.yaml.decode(content, type=kind)
