"""Plain values into typed settings, beside the types of `schema.py`; every problem is collected.

Walks the annotations of the settings and the values of the file together: what is not in the types
is unknown (with a "did you mean"), what does not fit is told with its path and what would.
May not know files or the environment.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from kclrun.config.expand import Expanded, dotted
from kclrun.config.suggesting import hint
from kclrun.config.units import ByteSize, Duration
from kclrun.config.yaml_reader import Path

__all__ = ["Problem", "describe", "field_types", "members", "plain_type", "settle", "summary"]

_MISSING: Final = object()
_SHOWN_MAX: Final = 60


class Problem(msgspec.Struct, frozen=True):
    """One thing to mend: where, and what."""

    path: Path
    text: str


def settle(struct: type[msgspec.Struct], value: Any, problems: list[Problem]) -> Any:
    """Make a `struct` of `value`, noting every problem; None if there were any."""
    before = len(problems)
    settled = _struct(struct, value, (), problems)
    return settled if len(problems) == before else None


def field_types(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The annotation of each setting, with its documentation."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def plain_type(annotation: Any) -> Any:
    """An annotation without its documentation."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, None left out; or the one type."""
    bare = plain_type(annotation)
    if get_origin(bare) in {Union, types.UnionType}:
        return tuple(one for one in get_args(bare) if one is not type(None))
    return (bare,)


def _struct(struct: type[msgspec.Struct], value: Any, path: Path, problems: list[Problem]) -> Any:
    if value is None:  # `leases:` with everything under it commented out
        value = {}
    if not isinstance(value, dict):
        problems.append(Problem(path, f"expected settings, got {_shown(value)}"))
        return None
    annotations = field_types(struct)
    _note_unknown(value, annotations, path, problems)
    required = {field.name for field in msgspec.structs.fields(struct) if field.required}
    settled = {}
    for name, annotation in annotations.items():
        given = value.get(name, _MISSING)
        if given is not _MISSING:
            settled[name] = _value(annotation, given, (*path, name), problems)
        elif name in required:
            problems.append(Problem((*path, name), f"is missing; {describe(annotation)}"))
    return struct(**settled) if required <= settled.keys() else None


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
        # Beside other choices, settings are meant where there are settings.
        if len(choices) == 1 or isinstance(value, dict):
            return _struct(plain_type(struct), value, path, problems)
    if get_origin(first) is tuple and isinstance(value, list):
        item_type = get_args(first)[0]
        return tuple(
            _value(item_type, item, (*path, index), problems) for index, item in enumerate(value)
        )
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
    return {key: _value(item_type, item, (*path, key), problems) for key, item in value.items()}


def _leaf(
    annotation: Any, choices: tuple[Any, ...], value: Any, path: Path, problems: list[Problem]
) -> Any:
    constraints = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    for choice in choices:
        # A number or a switch may come from the environment: then its text is read as YAML is.
        for candidate in (value, _as_scalar(value)):
            try:
                return _converted(choice, constraints, candidate)
            except (ValueError, msgspec.ValidationError):
                continue
    quotes = (
        "; put it in quotes" if isinstance(value, bool | int | float) and str in choices else ""
    )
    wanted = describe(annotation)
    problems.append(Problem(path, f"expected {wanted}, got {_shown(value)}{quotes}"))
    return None


def _converted(choice: Any, constraints: tuple[Any, ...], value: Any) -> Any:
    bare = plain_type(choice)
    if bare in {Duration, ByteSize}:
        return bare.parse(value)
    if bare is Any:
        return _without_marks(value)
    plain = str(value) if isinstance(value, str) else value
    typed = choice if not constraints or get_origin(bare) is Literal else _with(choice, constraints)
    return msgspec.convert(plain, typed)


def _with(choice: Any, constraints: tuple[Any, ...]) -> Any:
    typed = choice
    for constraint in constraints:
        typed = Annotated[typed, constraint]
    return typed


def _as_scalar(value: Any) -> Any:
    if not isinstance(value, Expanded) or len(value) > _SHOWN_MAX:
        return value
    try:
        scalar = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return scalar if isinstance(scalar, bool | int | float) else value


def _without_marks(value: Any) -> Any:
    """Plain text instead of `Expanded`, all the way down: `options` go to user code."""
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return str(value) if isinstance(value, str) else value


def describe(annotation: Any) -> str:
    """What a setting takes, in words: `a whole number from 1 to 1024`."""
    metas = [meta for meta in get_args(annotation)[1:] if isinstance(meta, msgspec.Meta)]
    choices = members(annotation)
    for choice in choices:
        metas += [meta for meta in get_args(choice)[1:] if isinstance(meta, msgspec.Meta)]
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
        if meta.ge is not None and meta.le is not None:
            words.append(f" from {meta.ge} to {meta.le}")
        elif meta.ge is not None:
            words.append(f" of at least {meta.ge}")
        if meta.min_length is not None:
            words.append(" that is not empty")
        if meta.pattern is not None:
            words.append((meta.extra or {}).get("words", f" that matches {meta.pattern}"))
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
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def summary(problems: list[Problem], lines: Mapping[Path, int], name: str) -> str:
    """The message for all problems together, each with its line where it has one."""
    told = []
    for problem in problems:
        line = lines.get(problem.path)
        where = f" ({name} line {line})" if line is not None else ""
        first, *more = problem.text.split("\n")
        told += [f"{dotted(problem.path)}: {first}{where}", *more]
    return "\n".join(told)
