"""Options of a Spark reader or writer: texts by name, read into types, every problem told at once.

Spark hands options over lower-cased; here they are known by their own names again. Pure. Rule: the
value of an option that is unknown, or that looks like a credential, is never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from kclrun.config.suggesting import hint
from kclrun.config.units import ByteSize, Duration
from kclrun.errors import SettingsError

__all__ = ["OptionReader"]

T = TypeVar("T")
N = TypeVar("N", int, int | None)

_SHOWN_MAX: Final = 60
_SWITCHES: Final = {"true": True, "false": False}
# What other connectors call credentials (awsAccessKeyId, awsSecretKey, sessionToken, …).
_CREDENTIALS: Final = ("accesskey", "secret", "sessiontoken", "password", "credential")
_PREFIX: Final = "kinesis."


class OptionReader:
    """The options given to `what`, such as "the kclrun source"; ask for each, then `settle`.

    `known` are their names in the order of the documentation, `aliases` other spellings. A reading
    of an option that is wrong notes the problem and answers the default.
    """

    def __init__(
        self,
        what: str,
        options: Mapping[str, str],
        known: Sequence[str],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._what = what
        self._problems: list[str] = []
        names = {name.lower(): name for name in known}
        names |= {alias.lower(): name for alias, name in (aliases or {}).items()}
        self._given: dict[str, str] = {}
        for key in sorted(options):
            name = names.get(key.lower())
            if name is None:
                self._note_unknown(key, known)
            elif name in self._given:
                self.refuse(name, f"is given twice: {key} says the same")
            else:
                self._given[name] = options[key]

    def text(self, name: str) -> str | None:
        """The option as it was given, None if it was not."""
        return self._given.get(name)

    def refuse(self, name: str, why: str) -> None:
        """Note a problem of an option."""
        self._problems.append(f"{name}: {why}")

    def choice(self, name: str, words: Mapping[str, T], default: T) -> T:
        """One of some words, in any case."""
        *others, last = words
        expected = f"{', '.join(others)} or {last}" if others else last
        by_word = {word.lower(): value for word, value in words.items()}

        def read(text: str) -> T:
            if text.lower() not in by_word:
                raise ValueError(f"expected {expected}")
            return by_word[text.lower()]

        return self.read(name, read, default)

    def switch(self, name: str, *, default: bool) -> bool:
        """true or false."""
        return self.choice(name, _SWITCHES, default)

    def duration_s(self, name: str, default: float, least: str, most: str) -> float:
        """A duration between two others, all as people write them: `250ms`, `1m30s`."""

        def read(text: str) -> float:
            value = Duration.parse(text.strip())
            if not Duration.parse(least) <= value <= Duration.parse(most):
                raise ValueError(f"expected {least} to {most}")
            return float(value)

        return self.read(name, read, default)

    def size_bytes(self, name: str, default: N, least: int, most: int) -> N:
        """A size such as `64MiB`, between two others in bytes."""

        def read(text: str) -> int:
            value = ByteSize.parse(text.strip())
            if not least <= value <= most:
                raise ValueError(f"expected {ByteSize(least).text} to {ByteSize(most).text}")
            return int(value)

        return self.read(name, read, default)

    def whole(self, name: str, default: N, least: int, most: int) -> N:
        """A whole number between two others."""

        def read(text: str) -> int:
            if not text.strip().isdecimal() or not least <= int(text) <= most:
                raise ValueError(f"expected a whole number from {least} to {most}")
            return int(text)

        return self.read(name, read, default)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number between two others."""
        expected = f"expected a number from {least:g} to {most:g}"

        def read(text: str) -> float:
            try:
                value = float(text)
            except ValueError:
                raise ValueError(expected) from None
            if not least <= value <= most:  # nan, too
                raise ValueError(expected)
            return value

        return self.read(name, read, default)

    def read(self, name: str, reading: Callable[[str], T], default: T) -> T:
        """The option through `reading`, whose ValueError or SettingsError becomes a problem."""
        text = self._given.get(name)
        if text is None:
            return default
        try:
            return reading(text)
        except (ValueError, SettingsError) as error:
            told = str(error)
            got = "" if "got " in told else f", got {_shown(text)}"
            self.refuse(name, f"{told}{got}")
            return default

    def settle(self) -> None:
        """Raises: SettingsError with all problems, one a line."""
        if len(self._problems) == 1:
            raise SettingsError(f"{self._what} cannot be used: {self._problems[0]}")
        if self._problems:
            told = "\n  ".join(self._problems)
            raise SettingsError(f"{self._what} cannot be used:\n  {told}")

    def _note_unknown(self, key: str, known: Sequence[str]) -> None:
        flat = key.lower().replace("_", "").replace("-", "").replace(".", "")
        if any(word in flat for word in _CREDENTIALS):
            self.refuse(
                key,
                "credentials are no options, they would stand in query plans; leave it out and"
                " give them to the processes (environment, profile, instance or pod role), or"
                " name a role in roleArn",
            )
        elif key.lower() == "path":
            self.refuse(key, "a stream has none: name the stream in streamName, and load nothing")
        else:
            self.refuse(key, f"no such option{hint(key.lower().removeprefix(_PREFIX), known)}")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]!r}…"
