"""The settings as JSON Schema, so that an editor completes, explains and checks `app.yaml`.

Made from the same annotations that `settle.py` walks, so the two cannot differ on what there is.
(msgspec's own export cannot show the defaults of durations and sizes.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from kclrun.config.schema import Settings
from kclrun.config.settle import field_types, members, plain_type
from kclrun.config.units import DURATION_PATTERN, SIZE_PATTERN, ByteSize, Duration

__all__ = ["json_schema"]

_KINDS: Final[Mapping[Any, Mapping[str, Any]]] = {
    Duration: {"type": "string", "pattern": DURATION_PATTERN, "examples": ["10s", "1m30s"]},
    ByteSize: {"type": ["string", "integer"], "pattern": SIZE_PATTERN, "examples": ["16MiB"]},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Any: {},
}


def json_schema() -> dict[str, Any]:
    """The schema of a configuration file (JSON Schema 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kclrun",
        **_struct(Settings),
        "oneOf": [{"required": ["stream"]}, {"required": ["streams"]}],
    }


def _struct(struct: type[msgspec.Struct]) -> dict[str, Any]:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    properties = {}
    for name, annotation in field_types(struct).items():
        properties[name] = _annotated(annotation) | _default(fields[name])
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }


def _annotated(annotation: Any) -> dict[str, Any]:
    shapes = [_shape(choice) for choice in members(annotation)]
    told: dict[str, Any] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    for meta in _metas(annotation):
        told |= _constraints(meta)
    return told


def _metas(annotation: Any) -> list[msgspec.Meta]:
    return [meta for meta in get_args(annotation)[1:] if isinstance(meta, msgspec.Meta)]


def _shape(choice: Any) -> dict[str, Any]:
    bare = plain_type(choice)
    told = _bare(bare)
    for meta in _metas(choice):
        told |= _constraints(meta)
    return told


def _bare(bare: Any) -> dict[str, Any]:
    origin = get_origin(bare)
    if origin is Literal:
        return {"enum": list(get_args(bare))}
    if origin is tuple:
        return {"type": "array", "items": _annotated(get_args(bare)[0])}
    if origin is dict:
        key_type, item_type = get_args(bare)
        names = {"propertyNames": _bare(key_type)} if get_origin(key_type) is Literal else {}
        return {"type": "object", "additionalProperties": _annotated(item_type) or True} | names
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return _struct(bare)
    return dict(_KINDS[bare])


def _constraints(meta: msgspec.Meta) -> dict[str, Any]:
    told = {
        "description": meta.description,
        "minimum": meta.ge,
        "maximum": meta.le,
        "minLength": meta.min_length,
        "pattern": meta.pattern,
    }
    return {name: value for name, value in told.items() if value is not None}


def _default(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT or default is None or isinstance(default, msgspec.Struct):
        return {}
    if isinstance(default, Duration | ByteSize):
        return {"default": default.text}
    return {"default": list(default) if isinstance(default, tuple) else default}
