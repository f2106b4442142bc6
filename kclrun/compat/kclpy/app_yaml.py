"""An `app.yaml` from the properties of the MultiLangDaemon, with comments for differences.

Pure: the caller has found the script. The application that it describes reads the same stream from
the same checkpoints; properties that mean another stream or other checkpoints are refused.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun.compat.kclpy.conversions import convert
from kclrun.compat.kclpy.property_table import BY_NAME
from kclrun.config.load import settings_of
from kclrun.config.yaml_reader import read_yaml
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

# The width of the project's other files.
_WIDTH: Final = 100
# The KCL does not limit the number of records without a checkpoint, and its sample application
# checkpoints once a minute: at the rates of one lease, some 100,000 small records a second at
# the most, that is 6 million.
_UNCHECKPOINTED_MAX: Final = 10_000_000
# Texts that YAML reads as themselves, except for numbers, switches and the like.
_PLAIN: Final = re.compile(r"[A-Za-z0-9/_][A-Za-z0-9_./:+@-]*")
_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]")
# The order in which people read such a file.
_ORDER: Final = (
    *("application", "stream", "processor", "path", "options", "start", "aws", "leases", "fetch"),
    *("checkpoint", "on_error", "stall", "shutdown", "observe"),
)


class Script(msgspec.Struct, frozen=True):
    """The script that `executableName` runs: its name, the folder for `path:` if the script is not
    beside the file, its arguments. Without a name, `remark` says why it cannot be run."""

    name: str | None
    folder: str | None = None
    arguments: tuple[str, ...] = ()
    remark: str = ""


class Entry(msgspec.Struct, frozen=True):
    """One setting as it will be in the file, with the comment above it."""

    setting: str
    value: Any
    comment: str = ""


def app_yaml(properties: Mapping[str, str], script: Script, source: str, now: WallTime) -> str:
    """The file's text. `source` is the name of the properties file; `now` validates its instant.

    Guaranteed: its settings are accepted. Raises: SettingsError where a property is missing or
    invalid, or where the application would read another stream or other checkpoints.
    """
    known = {name.lower(): value.strip() for name, value in properties.items() if value.strip()}
    entries = [*_processor(script), *_checkpoint()]
    try:
        entries += [Entry(*each) for each in convert(known)]
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from None
    lines = [
        f"# From {source}, by kclrun migrate kclpy. Check it:  kclrun check --config app.yaml",
        "# Moving the fleet, and what is different:  docs/how-to/from-amazon-kclpy.md",
        "",
    ]
    lines += _sections(entries, script)
    lines += _remarks(properties)
    text = "\n".join(lines) + "\n"
    try:
        settings_of(text, environment={}, now=now, name="app.yaml")
    except SettingsError as error:
        raise SettingsError(
            f"{source} makes no app.yaml that would be accepted:\n{error}"
        ) from None
    return text


def _processor(script: Script) -> Iterator[Entry]:
    if script.name is None:
        return
    comment = "what the script gives to KCLProcess; its class can be named: kclpy:module:Class"
    if script.remark:
        comment = f"{script.remark} {comment}"
    yield Entry("processor", f"kclpy:{script.name}", comment)
    if script.folder is not None:
        yield Entry("path", script.folder, "the folder that holds the script")
    if script.arguments:
        yield Entry(
            "options.arguments", list(script.arguments), "what the script finds in sys.argv"
        )


def _checkpoint() -> Iterator[Entry]:
    yield Entry("checkpoint.every", "manual", "the processor checkpoints by itself, as before")
    yield Entry(
        "checkpoint.uncheckpointed_max",
        _UNCHECKPOINTED_MAX,
        "the KCL has no such bound; a processor that never checkpoints is halted here",
    )


def _sections(entries: Sequence[Entry], script: Script) -> Iterator[str]:
    tree: dict[str, Any] = {}
    for entry in entries:
        *above, last = entry.setting.split(".")
        level = tree
        for step in above:
            level = level.setdefault(step, {})
        level[last] = entry
    for section in _ORDER:
        if section == "processor" and script.name is None:
            yield from _comment(f"{script.remark} Name the script, or the class in it:", "")
            yield "# processor: kclpy:script.py"
        elif section in tree:
            yield from _told(section, tree[section], "")


def _told(name: str, entry: Any, indent: str) -> Iterator[str]:
    if isinstance(entry, Entry):
        yield from _comment(entry.comment, indent)
        yield f"{indent}{name}: {_value(entry.value)}"
        return
    yield f"{indent}{name}:"
    for below, each in entry.items():
        yield from _told(below, each, f"{indent}  ")


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(
        _shown(text), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )


def _shown(text: str) -> str:
    """The characters that YAML allows in a comment, on one line."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _value(value: Any) -> str:
    """The value in YAML: a text without quotes if YAML would read it as that text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return f"[{', '.join(_quoted(each) for each in value)}]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and read_yaml(f"x: {value}").value == {"x": value}
        return value if is_plain else _quoted(value)
    return str(value)


def _quoted(text: str) -> str:
    """In ASCII, and with `${` as literal text."""
    quoted = json.dumps(text.replace("${", "$${"), ensure_ascii=False)
    return _NOT_ASCII.sub(lambda match: f"\\U{ord(match[0]):08x}", quoted)


def _remarks(properties: Mapping[str, str]) -> Iterator[str]:
    """The properties without a counterpart. Their values are left out: one may be a secret."""
    without = [
        f"{name}: {BY_NAME[name.lower()].note}"
        for name in properties
        if name.lower() in BY_NAME and not BY_NAME[name.lower()].setting
    ]
    unknown = [name for name in properties if name.lower() not in BY_NAME]
    if without:
        yield ""
        yield "# These properties have no counterpart:"
        for remark in without:
            yield from textwrap.wrap(
                remark, _WIDTH, initial_indent="#   ", subsequent_indent="#     "
            )
    if unknown:
        yield ""
        yield "# These are unknown, to the KCL as well as here, and were left out:"
        for name in unknown:
            yield f"#   {_shown(name)[:_WIDTH] or '(a nameless one)'}"
