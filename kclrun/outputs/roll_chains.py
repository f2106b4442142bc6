"""The faults of the rolls of a shard that lie in folders: twice, missing, unfinished [K9, R7].

Pure: from the names of files and the contents of their records. A roll is called `twice` only if
visible rolls that are not called so have each of its rows, because an operator removes it then;
`docs/explanation/commits.md` has the traces.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from kclrun.model.output import Cursor, RollRecord

# A file of a running owner may have this age, if its roll grows slowly (`roll.every`).
UNFINISHED_S: Final = 24 * 3600.0
# Rows get their name milliseconds after their record; a listing may show one without the other.
_PUBLISHED_S: Final = 60.0


class Part(StrEnum):
    """The kind of a file of a roll. `rows` and `record` have the names that readers use, the others
    the names of one attempt."""

    ROWS = "rows"
    RECORD = "record"
    OWN_ROWS = "own rows"
    OWN_RECORD = "own record"


class RollFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the roll that begins at `begin`, in one of the folders of its shard.

    `commit` is in the name of a file of one attempt. `record` is the content of a record; None for
    rows, and if it cannot be read. By `inode` one file with two paths is not taken for a copy.
    """

    folder: str
    name: str
    part: Part
    begin: Cursor
    age_s: float
    inode: int = 0
    commit: str = ""
    record: RollRecord | None = None

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"


class Wrong(StrEnum):
    """The kinds of findings."""

    TWICE = "twice"
    COPY = "copy"
    OVERLAP = "overlap"
    MISSING = "missing"
    NO_RECORD = "no record"
    NOT_VISIBLE = "not visible"
    UNFINISHED = "unfinished"


ADVICE: Final[Mapping[Wrong, str]] = {
    Wrong.TWICE: "other files have each of its rows. Remove it once the checkpoint of its lease has"
    " passed it for an hour and it is still listed here; leave the hidden files beside it",
    Wrong.COPY: "the same file by two paths: read one of the folders only. It may be one file, so"
    " remove neither before you know",
    Wrong.OVERLAP: "remove none of them: it is not known yet which one the lease goes on from, or"
    " each may have rows that the others do not have. Look again after the next file of the shard",
    Wrong.MISSING: "name the folders of all machines in one command. Otherwise a reader removed or"
    " moved the file, or the checkpoint of the lease was moved by hand",
    Wrong.NO_RECORD: "restore the hidden file .….end beside it, which says where its rows end; copy"
    " hidden files along with the others",
    Wrong.NOT_VISIBLE: "do not remove it: it has rows of a finished file. The next owner of the"
    " lease makes them visible when it begins there",
    Wrong.UNFINISHED: "its owner was killed. Remove it, a file .….end before the .….rows beside it",
}


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with the file at `path`, in words without a capital letter."""

    kind: Wrong
    path: str
    words: str


class _Roll(msgspec.Struct, frozen=True):
    begin: Cursor
    end: Cursor
    token: int
    commit: str
    path: str
    inode: int
    # Whether its rows are in this folder; readers remove them and leave the record.
    has_rows: bool


def findings_of(files: Sequence[RollFile]) -> list[Finding]:
    """The faults of the rolls of one shard and generation, in all folders that are known."""
    rolls, unrecorded = _rolls(files)
    found = [*_about_files(files), *_twice(rolls), *_missing(rolls, unrecorded)]
    return sorted(found, key=lambda each: (each.kind, each.path))


def count_rolls(files: Iterable[RollFile]) -> int:
    """The rolls whose rows are visible."""
    return sum(file.part is Part.ROWS for file in files)


def _rolls(files: Sequence[RollFile]) -> tuple[list[_Roll], list[Cursor]]:
    """The rolls, and the begins of the rolls whose end is not known."""
    rows = {(file.folder, file.begin): file for file in files if file.part is Part.ROWS}
    rolls, recorded = [], set()
    for file in files:
        if file.part is not Part.RECORD or file.record is None:
            continue
        recorded.add(file.begin)
        shown = rows.get((file.folder, file.begin))
        rolls.append(
            _Roll(
                begin=file.begin,
                end=Cursor.parse(file.record.end),
                token=file.record.token,
                commit=file.record.commit,
                path=(shown or file).path,
                inode=(shown or file).inode,
                has_rows=shown is not None,
            )
        )
    return rolls, [begin for _, begin in rows if begin not in recorded]


def _about_files(files: Sequence[RollFile]) -> Iterator[Finding]:
    names = {(file.folder, file.begin, file.part): file for file in files}
    for file in files:
        record = names.get((file.folder, file.begin, Part.RECORD))
        rows = names.get((file.folder, file.begin, Part.ROWS))
        if file.part is Part.ROWS and record is None and file.age_s > _PUBLISHED_S:
            yield Finding(Wrong.NO_RECORD, file.path, "its record is missing")
        elif file.part is Part.RECORD and file.record is None:
            yield Finding(Wrong.NO_RECORD, file.path, "it cannot be read")
        elif file.part is Part.OWN_ROWS and _names(record, file) and rows is None:
            if file.age_s > _PUBLISHED_S:
                yield Finding(Wrong.NOT_VISIBLE, file.path, "its record is there, its rows wait")
        elif file.part in {Part.OWN_ROWS, Part.OWN_RECORD} and file.age_s > UNFINISHED_S:
            yield Finding(Wrong.UNFINISHED, file.path, f"it is {file.age_s / 3600:.0f} h old")


def _names(record: RollFile | None, rows: RollFile) -> bool:
    """Whether these rows may be those of the roll: an unreadable record may name any."""
    return record is not None and (record.record is None or record.record.commit == rows.commit)


def _twice(rolls: Sequence[_Roll]) -> Iterator[Finding]:
    """The rolls beside the chain that the newest owner's last roll ends.

    Each roll of it begins where the one before it ends, so together they have every row once.
    """
    alone: dict[tuple[Cursor, str], _Roll] = {}
    for roll in sorted(rolls, key=lambda each: (not each.has_rows, each.path)):
        first = alone.setdefault((roll.begin, roll.commit), roll)
        if roll.has_rows and roll.inode != first.inode:
            yield Finding(Wrong.COPY, roll.path, f"it is {first.path} by another path")
    if not alone:
        return
    chain = _chain(list(alone.values()))
    kept = {id(roll) for roll in chain}
    begins = [_key(roll.begin) for roll in chain]
    for roll in alone.values():
        if id(roll) not in kept and roll.has_rows:
            at = bisect.bisect_right(begins, _key(roll.begin)) - 1
            yield _beside(roll, chain, max(at, 0))


def _chain(rolls: list[_Roll]) -> list[_Roll]:
    """The rolls from the last one of the greatest token backwards: each is the roll that ends where
    the next one begins; if it is missing, the nearest before that. In the order of their rows."""
    last = max(rolls, key=lambda each: (each.token, _key(each.begin)))
    found = [last]
    for roll in sorted(rolls, key=lambda each: (_key(each.end), each.token), reverse=True):
        if roll.end <= found[-1].begin:
            found.append(roll)
    return found[::-1]


def _beside(roll: _Roll, chain: list[_Roll], at: int) -> Finding:
    """The finding about a roll that is not of the chain. Of the chain, roll number `at` is the last
    that begins before it."""
    other = chain[at]
    tokens = f"(tokens {roll.token} and {other.token})"
    if _has_rows_of(chain[at:], roll):
        return Finding(Wrong.TWICE, roll.path, f"its rows begin in {other.path} {tokens}")
    if roll.end > chain[-1].end:
        return Finding(
            Wrong.OVERLAP, roll.path, f"it reaches further than the newest owner's {tokens}"
        )
    return Finding(Wrong.OVERLAP, roll.path, f"it shares rows with {other.path} {tokens}")


def _has_rows_of(chain: Iterable[_Roll], roll: _Roll) -> bool:
    """Whether these rolls, each of which begins behind the one before it, have each row of `roll`.

    A roll that begins at a sentinel does not count, because the record that the sentinel stood for
    is not known: the oldest record of another day is another one. Nor does a roll whose rows were
    removed.
    """
    covered = roll.begin
    for other in chain:
        if covered >= roll.end:
            break
        is_known = other.has_rows and not other.begin.position.is_sentinel
        if not (is_known and other.begin <= covered < other.end):
            return False
        covered = other.end
    return covered >= roll.end


def _missing(rolls: Sequence[_Roll], unrecorded: Sequence[Cursor]) -> Iterator[Finding]:
    reached: Cursor | None = None
    for roll in sorted(rolls, key=lambda each: _key(each.begin)):
        if reached is None or roll.end <= reached:
            reached = reached or roll.end
            continue
        is_gap = roll.begin > reached
        if is_gap and not any(reached <= begin < roll.begin for begin in unrecorded):
            yield Finding(Wrong.MISSING, roll.path, f"the file before it ends at {reached}")
        reached = roll.end


def _key(cursor: Cursor) -> tuple[Any, int]:
    return cursor.position.sort_key, cursor.tick
