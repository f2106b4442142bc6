"""Options of a Spark reader or writer, each declared once: in the field of a dataclass.

From such a declaration come the parsing, its messages, the texts for Spark and the page of the
documentation. Pure. Must not know: any option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kclrun.config.units import ByteSize, Duration
from kclrun.errors import SettingsError
from kclrun.model.names import hint
from kclrun.spark.other_connectors import without_prefix

T = TypeVar("T")

# A value as a user gives it: a text, or a scalar of a YAML file.
Given = Mapping[str, object]

_SHOWN_MAX: Final = 60
# Parts of the names that other connectors give to credentials (awsAccessKeyId, sessionToken, …).
_CREDENTIALS: Final = ("accesskey", "secret", "sessiontoken", "password", "credential")
# The key of a field's options in its metadata.
_OPTIONS: Final = "kclrun.options"


def text_of(value: object) -> str:
    """A value in the form that Spark takes: switches are `true` and `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """The values of an option. `read` takes a text or a scalar, and raises ValueError; `text` is
    the way back."""

    read: Callable[[object], T]
    text: Callable[[T], str] = text_of


def choice(words: Mapping[str, T], foreign: Mapping[str, str] | None = None) -> Kind[T]:
    """One of some words, in any case; `foreign` has ours for words of other connectors."""
    *others, last = words
    expected = f"{', '.join(others)} or {last}" if others else last
    by_word = {word.lower(): value for word, value in words.items()}

    def read(given: object) -> T:
        word = text_of(given).lower()
        if foreign is not None and word in foreign:
            raise ValueError(f"expected {expected}, got {word!r}, which is {foreign[word]} here")
        if word not in by_word:
            raise ValueError(f"expected {expected}")
        return by_word[word]

    return Kind(
        read, lambda value: next(word for word, meaning in words.items() if meaning == value)
    )


SWITCH: Final = choice({"true": True, "false": False})


def duration(least: str, most: str) -> Kind[float]:
    """A duration between two others, all in the usual notation: `250ms`, `1m30s`."""

    def read(given: object) -> float:
        value = given if isinstance(given, Duration) else Duration.parse(text_of(given).strip())
        if not Duration.parse(least) <= value <= Duration.parse(most):
            raise ValueError(f"expected {least} to {most}")
        return float(value)

    return Kind(read, lambda value: Duration(value).text)


def size(least: int, most: int) -> Kind[int]:
    """A size such as `64MiB`, between two others in bytes."""

    def read(given: object) -> int:
        value = ByteSize.parse(text_of(given).strip())
        if not least <= value <= most:
            raise ValueError(f"expected {ByteSize(least).text} to {ByteSize(most).text}")
        return int(value)

    return Kind(read, lambda value: ByteSize(value).text)


def whole(least: int, most: int) -> Kind[int]:
    """A whole number between two others."""

    def read(given: object) -> int:
        text = text_of(given).strip()
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return int(text)

    return Kind(read)


def number(least: float, most: float) -> Kind[float]:
    """A number between two others."""
    expected = f"expected a number from {least:g} to {most:g}"

    def read(given: object) -> float:
        try:
            value = float(text_of(given))
        except ValueError:
            raise ValueError(expected) from None
        if not least <= value <= most:  # also refuses nan
            raise ValueError(expected)
        return value

    return Kind(read)


@dataclass(frozen=True)
class Option:
    """One option: its name, meaning and values; `shown` is the default as documented, where that is
    not the field's default. Without a `kind`, own code reads the option, together with others."""

    name: str
    doc: str
    kind: Kind[Any] | None = None
    shown: str = ""


def by_hand(*options: Option) -> dict[str, tuple[Option, ...]]:
    """The metadata of a dataclass's field that own code makes from several options."""
    return {_OPTIONS: options}


def option(name: str, kind: Kind[Any], doc: str, *, default: object, shown: str = "") -> Any:
    """The field of a dataclass that is one option."""
    return field(default=default, metadata=by_hand(Option(name, doc, kind, shown)))


def options_of(settings: Any) -> tuple[Option, ...]:
    """The options of a dataclass's fields, in order."""
    return tuple(
        option for setting in fields(settings) for option in setting.metadata.get(_OPTIONS, ())
    )


class _FieldKind(NamedTuple):
    """An option that has a kind, and the field that it sets."""

    field: str
    option: str
    kind: Kind[Any]
    default: Any


def _kinds_of(settings: Any) -> Iterator[_FieldKind]:
    for setting in fields(settings):
        for option in setting.metadata.get(_OPTIONS, ()):
            if option.kind is not None:
                yield _FieldKind(setting.name, option.name, option.kind, setting.default)


def default_texts(settings: Any) -> Mapping[str, str]:
    """The default of each option as a text that the option takes; None has none."""
    return {
        it.option: it.kind.text(it.default) for it in _kinds_of(settings) if it.default is not None
    }


def texts_of(settings: Any) -> dict[str, str]:
    """The options, as texts, of the fields that differ from their defaults."""
    return {
        it.option: it.kind.text(value)
        for it in _kinds_of(settings)
        if (value := getattr(settings, it.field)) != it.default
    }


class OptionReader:
    """The options of a Spark reader or writer; read each one, then call `settle`.

    Options are texts by name, or values of an `app.yaml`; all problems are reported together. Spark
    passes option names lower-cased; the reader restores their own spelling. The value of an
    option that is unknown, or that looks like a credential, is never repeated.

    `what` names the reader or writer, such as "the kclrun source". `known` are the option names in
    the order of the documentation, `aliases` other spellings, `absent` the advice for options of
    other connectors, with what to use here. A method that reads a wrong option notes the
    problem, under the name that the user gave, and returns the default.
    """

    def __init__(
        self,
        what: str,
        options: Given,
        known: Sequence[str],
        aliases: Mapping[str, str] | None = None,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        self._what = what
        self._problems: list[str] = []
        names = {name.lower(): name for name in known}
        names |= {alias.lower(): name for alias, name in (aliases or {}).items()}
        self._names = names
        spellings = {name.lower(): name for name in (*known, *(aliases or {}))}
        self._absent = {name.lower(): (name, why) for name, why in (absent or {}).items()}
        self._called: dict[str, str] = {}
        self._given: dict[str, object] = {}
        for key in sorted(options):
            name = names.get(key.lower())
            if name is None:
                self._note_unknown(key, known)
            elif name in self._given:
                self.refuse(name, f"is given twice: {key} says the same")
            else:
                self._given[name] = options[key]
                self._called[name] = spellings[key.lower()]
                if text_of(options[key]).strip() == "":
                    # As of a variable that is not set.
                    self.refuse(name, "is empty: leave it out, or give it a value")
                    del self._given[name]

    def text(self, name: str) -> str | None:
        """The option's text; None if the option was not given."""
        given = self._given.get(name)
        return None if given is None else text_of(given)

    def refuse(self, name: str, why: str) -> None:
        """Note a problem of an option."""
        self._problems.append(f"{self._called.get(name, name)}: {why}")

    def values(self, settings: Any) -> dict[str, Any]:
        """The values of a dataclass's options, by field; defaults where they were not given."""
        return {
            it.field: self.read(it.option, it.kind.read, it.default) for it in _kinds_of(settings)
        }

    def read(self, name: str, reading: Callable[[Any], T], default: T) -> T:
        """The option through `reading`; its ValueError or SettingsError becomes a problem."""
        given = self._given.get(name)
        if given is None:
            return default
        try:
            return reading(given)
        except (ValueError, SettingsError) as error:
            message = str(error)
            text = given.text if isinstance(given, Duration) else text_of(given)
            got = "" if "got " in message else f", got {_shown(text)}"
            self.refuse(name, f"{message}{got}")
            return default

    def settle(self) -> None:
        """Raises: SettingsError with all problems, one a line."""
        if len(self._problems) == 1:
            raise SettingsError(f"{self._what} cannot be used: {self._problems[0]}")
        if self._problems:
            message = "\n  ".join(self._problems)
            raise SettingsError(f"{self._what} cannot be used:\n  {message}")

    def _note_unknown(self, key: str, known: Sequence[str]) -> None:
        flat = key.lower().replace("_", "").replace("-", "").replace(".", "")
        if any(word in flat for word in _CREDENTIALS):
            self.refuse(
                key,
                "credentials are not options: they would stand in query plans; leave it out and"
                " give them to the processes (environment, profile, instance or pod role), or"
                " name a role in roleArn",
            )
        elif (bare := without_prefix(key.lower())) in self._absent:
            name, why = self._absent[bare]
            self.refuse(name if bare == key.lower() else key, why)
        elif (ours := self._names.get(bare)) is not None:
            self.refuse(key, f"no such option; did you mean {ours}?")
        elif key.lower() == "path":
            self.refuse(key, "a stream has none: name the stream in streamName, and load nothing")
        else:
            self.refuse(key, f"no such option{hint(bare, known)}")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]!r}…"
