"""Plain values into typed settings, beside the types of `schema.py`; every problem is collected.

Walks the annotations of the settings and the values of the file together. A key that is not in the
types is unknown, with a "did you mean". A value that does not fit is reported with its path. The
JSON Schema for editors is made from the same annotations, so the two cannot differ. Must not know
files or the environment.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import yaml

from kclrun.config.schema import Settings
from kclrun.config.units import DURATION_PATTERN, SIZE_PATTERN, ByteSize, Duration, OutOfRange
from kclrun.config.yaml_reader import Expanded, Path, dotted
from kclrun.model.names import hint, nearest
from kclrun.model.text import without_secrets

_MISSING: Final = object()
# The result of a value that does not fit: its setting keeps its default, so that the rules for the
# other settings can be checked in the same pass.
_WRONG: Final = object()
_SHOWN_MAX: Final = 60
_SWITCHES: Final[Mapping[str, bool]] = {"on": True, "true": True, "off": False, "false": False}

S = TypeVar("S", bound=msgspec.Struct)


class Problem(msgspec.Struct, frozen=True):
    """One problem to correct: its place, and its description."""

    path: Path
    text: str


def settle(struct: type[S], value: Any, problems: list[Problem], stand_ins: Mapping[str, Any]) -> S:
    """Make a `struct` of `value`, noting every problem.

    Missing or wrong settings have their defaults; settings of the struct itself without a default
    have their stand-in. Such a result serves only to judge the other settings.
    """
    settled = _struct(struct, value, (), problems, stand_ins)
    result: S = struct(**stand_ins) if settled is _WRONG else settled
    return result


@functools.cache
def field_types(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The annotation of each setting, with its documentation."""
    hints = get_type_hints(struct, include_extras=True)
    return types.MappingProxyType({name: hints[name] for name in struct.__struct_fields__})


@functools.cache
def _required(struct: type[msgspec.Struct]) -> frozenset[str]:
    """The settings without a default."""
    return frozenset(field.name for field in msgspec.structs.fields(struct) if field.required)


def plain_type(annotation: Any) -> Any:
    """An annotation without its documentation."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union without None; or the one type."""
    bare = plain_type(annotation)
    if get_origin(bare) in {Union, types.UnionType}:
        return tuple(one for one in get_args(bare) if one is not type(None))
    return (bare,)


def _struct(
    struct: type[msgspec.Struct],
    value: Any,
    path: Path,
    problems: list[Problem],
    stand_ins: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    if value is None:  # `leases:` with everything under it commented out
        value = {}
    if not isinstance(value, dict):
        problems.append(Problem(path, f"expected settings, got {_shown(value)}"))
        return _WRONG
    annotations = field_types(struct)
    _note_unknown(value, annotations, path, problems)
    required = _required(struct)
    settled = dict(stand_ins)
    for name, annotation in annotations.items():
        given = value.get(name, _MISSING)
        if given is not _MISSING:
            one = _value(annotation, given, (*path, name), problems)
            if one is not _WRONG:
                settled[name] = one
        elif name in required:
            problems.append(Problem((*path, name), f"is missing; {accepted_values(annotation)}"))
    return struct(**settled) if required <= settled.keys() else _WRONG


def _note_unknown(
    value: Mapping[str, Any], known: Mapping[str, Any], path: Path, problems: list[Problem]
) -> None:
    problems.extend(
        Problem((*path, key), f"no such setting{hint(key, known)}")
        for key in value
        if key not in known
    )


def _value(annotation: Any, value: Any, path: Path, problems: list[Problem]) -> Any:
    choices = members(annotation)
    optional = type(None) in get_args(plain_type(annotation))
    first = plain_type(choices[0])
    if value is None and optional:
        return None
    for struct in (choice for choice in choices if _is_struct(choice)):
        # Among several choices, a mapping means a settings struct.
        if len(choices) == 1 or isinstance(value, dict):
            return _struct(plain_type(struct), value, path, problems)
    if get_origin(first) is tuple and isinstance(value, list):
        item_type = get_args(first)[0]
        items = tuple(
            _value(item_type, item, (*path, index), problems) for index, item in enumerate(value)
        )
        return _WRONG if _WRONG in items else items
    if get_origin(first) is dict and isinstance(value, dict):
        return _dict(first, value, path, problems)
    return _leaf(annotation, choices, value, path, problems)


def _is_struct(choice: Any) -> bool:
    bare = plain_type(choice)
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def _dict(annotation: Any, value: dict[str, Any], path: Path, problems: list[Problem]) -> Any:
    key_type, item_type = get_args(annotation)
    if get_origin(key_type) is Literal:
        _note_unknown(value, dict.fromkeys(get_args(key_type)), path, problems)
    items = {key: _value(item_type, item, (*path, key), problems) for key, item in value.items()}
    return {key: item for key, item in items.items() if item is not _WRONG}


def _leaf(
    annotation: Any, choices: tuple[Any, ...], value: Any, path: Path, problems: list[Problem]
) -> Any:
    constraints = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    for choice in choices:
        # A number or a switch may come from the environment: then its text is read like YAML.
        for candidate in (value, _as_scalar(value), _as_switch(value)):
            try:
                return _converted(choice, constraints, candidate)
            except OutOfRange as error:
                problems.append(Problem(path, str(error)))
                return _WRONG
            except (ValueError, msgspec.ValidationError):
                continue
    quotes = (
        "; put it in quotes" if isinstance(value, bool | int | float) and str in choices else ""
    )
    wanted = accepted_values(annotation)
    meant = _nearest_word(choices, value) or _instead(annotation, choices, value)
    problems.append(Problem(path, f"expected {wanted}, got {_shown(value)}{quotes}{meant}"))
    return _WRONG


def _nearest_word(choices: tuple[Any, ...], value: Any) -> str:
    """`; did you mean warning?`, from the words that the setting takes."""
    words = [
        str(word)
        for choice in choices
        if get_origin(plain_type(choice)) is Literal
        for word in get_args(plain_type(choice))
    ]
    # Never show a value from the environment: it may hold secrets.
    if not isinstance(value, str) or isinstance(value, Expanded):
        return ""
    near = nearest(value, words)
    return f"; did you mean {near}?" if near is not None else ""


def _converted(choice: Any, constraints: tuple[Any, ...], value: Any) -> Any:
    bare = plain_type(choice)
    if bare in {Duration, ByteSize}:
        return value if isinstance(value, bare) else bare.parse(value)
    if bare is Any:
        return _without_marks(value)
    plain = str(value) if isinstance(value, str) else value
    # For Python, unlike JSON Schema, `$` matches before a last line feed, too: that of a block
    # scalar (`|`) would become a part of a name.
    patterns = [meta.pattern for meta in (*constraints, *_metas(choice)) if meta.pattern]
    if patterns and isinstance(plain, str) and plain.endswith("\n"):
        raise ValueError("a line feed at the end")
    if constraints:
        choice = Annotated[choice, *constraints]
    return msgspec.convert(plain, choice)


def _as_scalar(value: Any) -> Any:
    if not isinstance(value, Expanded) or len(value) > _SHOWN_MAX:
        return value
    try:
        scalar = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return scalar if isinstance(scalar, bool | int | float) else value


def _as_switch(value: Any) -> Any:
    """`"off"` in quotes means the same switch as without quotes."""
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _without_marks(value: Any) -> Any:
    """Plain text instead of `Expanded`, all the way down: `options` go to user code."""
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _instead(annotation: Any, choices: Sequence[Any], value: Any) -> str:
    """`; what to write in place of this text`, where the setting knows."""
    metas = [meta for one in (annotation, *choices) for meta in _metas(one)]
    known = [(meta.extra or {}).get("instead", {}) for meta in metas]
    words = [
        words
        for instead in known
        for pattern, words in instead.items()
        if isinstance(value, str) and re.fullmatch(pattern, value)
    ]
    return f"; {words[0]}" if words else ""


def accepted_values(annotation: Any) -> str:
    """The accepted values of a setting, in words: `a whole number from 1 to 1024`."""
    choices = members(annotation)
    metas = [meta for one in (annotation, *choices) for meta in _metas(one)]
    kinds = [_kind(plain_type(choice)) for choice in choices]
    return ", or ".join(kinds) + _bounds(metas)


def _kind(bare: Any) -> str:
    if get_origin(bare) is Literal:
        *words, last = (str(word) for word in get_args(bare))
        return f"{', '.join(words)} or {last}" if words else last
    names: dict[Any, str] = {
        Duration: "a duration such as 10s, 250ms or 1m30s",
        ByteSize: "a size such as 16MiB or 512KiB",
        bool: "on or off",
        int: "a whole number",
        float: "a number",
        str: "a text",
    }
    if get_origin(bare) is tuple:
        return "a list"
    return names.get(bare, "settings, one a line")


def _bounds(metas: list[msgspec.Meta]) -> str:
    words = []
    for meta in metas:
        if meta.le is not None:  # such a setting has a least value, too
            words.append(f" from {meta.ge} to {meta.le}")
        elif meta.ge is not None:
            words.append(f" of at least {meta.ge}")
        if meta.extra is not None:
            words.append(meta.extra["words"])
    return "".join(words)


def _shown(value: Any) -> str:
    if isinstance(value, Expanded):
        return f"what {value.source[:_SHOWN_MAX]} stands for"  # the environment may hold secrets
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "a switch (on or off)"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a mapping"
    # A literal credential is refused, and so it is not repeated.
    text = repr(without_secrets(value) if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def summary(problems: list[Problem], lines: Mapping[Path, int], name: str) -> str:
    """The message for all problems together, each with its line if it has one."""
    texts = []
    for problem in problems:
        line = lines.get(problem.path)
        where = f" ({name} line {line})" if line is not None else ""
        first, *more = problem.text.split("\n")
        texts += [f"{dotted(problem.path)}: {first}{where}", *more]
    return "\n".join(texts)


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
        **_struct_schema(Settings),
        "oneOf": [{"required": ["stream"]}, {"required": ["streams"]}],
    }


def _struct_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
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
    schema: dict[str, Any] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    for meta in _metas(annotation):
        schema |= _constraints(meta)
    return schema


def _metas(annotation: Any) -> list[msgspec.Meta]:
    return [meta for meta in get_args(annotation)[1:] if isinstance(meta, msgspec.Meta)]


def _shape(choice: Any) -> dict[str, Any]:
    bare = plain_type(choice)
    schema = _bare(bare)
    for meta in _metas(choice):
        schema |= _constraints(meta)
    return schema


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
    if _is_struct(bare):
        return _struct_schema(bare)
    return dict(_KINDS[bare])


def _constraints(meta: msgspec.Meta) -> dict[str, Any]:
    schema = {
        "description": meta.description,
        "minimum": meta.ge,
        "maximum": meta.le,
        "minLength": meta.min_length,
        "pattern": meta.pattern,
    }
    return {name: value for name, value in schema.items() if value is not None}


def _default(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT or default is None or isinstance(default, msgspec.Struct):
        return {}
    if isinstance(default, Duration | ByteSize):
        return {"default": default.text}
    return {"default": list(default) if isinstance(default, tuple) else default}
