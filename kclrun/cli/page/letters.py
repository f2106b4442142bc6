"""The dead letters of the page: which there are, and their redrive, by the code of `kclrun
dead-letters`.

Those of a queue are only counted: to list them is to receive them, which hides them from others,
and looking at a page must not do that.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Final

from kclrun.aws.dead_letters import LetterQueue
from kclrun.cli.config_options import Configuration
from kclrun.cli.dead_letters.command import letter_store, payload_text
from kclrun.cli.dead_letters.redrive import Redrive, carry_out, leases_now, redrives_of
from kclrun.errors import KclrunError
from kclrun.model.letter import KeptLetter
from kclrun.model.stream import shard_id_of, stream_name_of, stream_of
from kclrun.model.time import WallTime
from kclrun.page.acting import PlanText
from kclrun.page.detail_view import LetterLine
from kclrun.ports import LetterStore

# A list for a person. The plan of a redrive takes more of them in, 1 GB at 100 KB each; the verb
# has no limit.
_LISTED_MAX: Final = 200
_REDRIVEN_MAX: Final = 10_000
_PAYLOAD_CHARACTERS_MAX: Final = 400
# A stream is read from its beginning, each 10 s while someone looks: 0.4 MB/s, of the 2 MB/s that a
# shard gives all of its readers.
_STREAM_BYTES_MAX: Final = 4_000_000


class PageLetters:
    """The letters of the application with this configuration. Used by several threads."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._redriving = threading.Lock()

    @property
    def are_here(self) -> bool:
        """Whether looking at them changes nothing."""
        settings = self._configuration.settings
        place = settings.on_error.dead_letter
        return settings.on_error.then == "dead-letter" and not place.sqs

    def waiting(self) -> str:
        """How many are in the queue, in words; empty without one. Raises: KclrunError."""
        with closing(self._store()) as store:
            if not isinstance(store, LetterQueue):
                return ""
            shown, hidden = store.waiting()
        received = f", and about {hidden:,} more that a reader has received" if hidden else ""
        return f"About {shown:,} are in the queue{received}."

    def _store(self) -> LetterStore:
        return letter_store(self._configuration.settings, read_max=_STREAM_BYTES_MAX)

    def listed(self) -> tuple[tuple[LetterLine, ...], bool]:
        """The first of them, without partition keys and payloads unless `observe.payloads` is on;
        and whether there are more. Entries that are not letters are left out: the verb names them.
        Raises: KclrunError."""
        with closing(self._store()) as store:
            found = list(islice(_committed(store.kept(_left_out)), _LISTED_MAX + 1))
        lines = tuple(map(self._line, found[:_LISTED_MAX]))
        return lines, len(found) > _LISTED_MAX

    def _line(self, kept: KeptLetter) -> LetterLine:
        letter = kept.letter
        is_open = self._configuration.settings.observe.payloads
        return LetterLine(
            given_up_at=WallTime(letter.given_up_at),
            stream=letter.stream,
            shard_id=letter.shard_id,
            position=letter.position,
            error=letter.error,
            calls=letter.calls,
            raised_at=letter.raised_at,
            stack=letter.traceback,
            partition_key=letter.partition_key if is_open else None,
            payload=payload_text(letter.data)[:_PAYLOAD_CHARACTERS_MAX] if is_open else None,
        )

    def plan(self, key: str, to: str) -> PlanText:
        """What a redrive of the letters of this lease would do; of all, without a key."""
        words: list[str] = []
        try:
            with closing(self._store()) as store:
                found = self._of(store.kept(words.append), key)
            redrives = redrives_of(self._configuration, found, to, words.append)
        except KclrunError as error:
            return PlanText((f"They cannot be read: {error}",))
        if not redrives:
            of = "this shard" if key else "the application"
            return PlanText((f"{of.capitalize()} has no dead letters.", *words))
        lines = (redrive.words for redrive in redrives)
        return PlanText((*lines, *words), _basis(redrives), is_possible=True)

    def redrive(self, key: str, to: str, basis: str) -> tuple[str, ...] | None:
        """Redrive if the plan is still the one with this basis: what was done, in words. None if
        the plan is another one now."""
        if not self._redriving.acquire(blocking=False):
            return ("Another redrive is under way. Nothing was changed by you.",)
        try:
            # Before the letters, for the reason in `leases_now`.
            leases = leases_now(self._configuration.settings)
            with closing(self._store()) as store:
                words: list[str] = []
                found = self._of(store.kept(words.append), key)
                redrives = redrives_of(self._configuration, found, to, words.append)
                if _basis(redrives) != basis:
                    return None
                for redrive in redrives:
                    done = carry_out(self._configuration, store, redrive, leases, words.append)
                    words.append(done.words)
                return tuple(words)
        except KclrunError as error:
            return (f"It ended before all was done: {error}",)
        finally:
            self._redriving.release()

    def _of(self, letters: Iterable[KeptLetter], key: str) -> list[KeptLetter]:
        letters = _committed(letters)
        if not key:
            return list(islice(letters, _REDRIVEN_MAX))
        shard, stream = shard_id_of(key), stream_name_of(stream_of(key))
        of_shard = (
            letter
            for letter in letters
            if letter.letter.shard_id == shard and stream in {"", letter.letter.stream}
        )
        return list(islice(of_shard, _REDRIVEN_MAX))


def _committed(letters: Iterable[KeptLetter]) -> Iterator[KeptLetter]:
    """Without those that do not count: their record was judged again by the next owner."""
    return (letter for letter in letters if not letter.is_uncommitted)


def _left_out(_: str) -> None:
    """For a list that is looked at each few seconds."""


def _basis(redrives: Sequence[Redrive]) -> str:
    text = "\n".join(
        f"{redrive.to} {kept.letter.stream} {kept.letter.shard_id} {kept.letter.position}"
        for redrive in redrives
        for kept in redrive.letters
    )
    return hashlib.sha256(text.encode()).hexdigest()
