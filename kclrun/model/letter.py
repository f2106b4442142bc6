"""Dead letters: the records that were given up, with all that their repair needs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import msgspec

from kclrun.errors import LimitExceeded, SettingsError
from kclrun.model.output import Cursor
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber

# The ending of the names of takeovers.
TAKEN_OVER: Final = ".taken-over"
# The version of the format; readers refuse a higher one.
LETTER_VERSION: Final = 1
# The most letters that a reader takes at once: each may carry a payload, and they are sorted in
# memory. Further letters are taken once these are removed.
LETTERS_MAX: Final = 10_000
# No letter is larger: a record has at most 16 MiB, a third more as base64, and the words about it.
LETTER_BYTES_MAX: Final = 32 * 2**20
# The message of an exception, and the last lines of a traceback, as in the log.
_ERROR_CHARACTERS_MAX: Final = 2 * 1024
_TRACEBACK_CHARACTERS_MAX: Final = 8 * 1024


class Letter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record that was given up. `data` is base64 in JSON; `arrived_at` and `given_up_at` are
    seconds since the epoch. `calls` counts the calls that raised with the record.

    `stream_created_at` and `generation` say of which stream of that name, and of which reset of the
    application, the lease was [K4]; both are 0 in letters that do not say it. `token` is the
    fencing token of the owner that gave the record up, and `owner_since` when it began; both are 0
    where no lease is behind it, and in letters of earlier versions [K20].

    `data_at` is the URL of the whole letter, where this one lacks its payload: a queue or a stream
    takes no message of that size.
    """

    version: int
    application: str
    processor: str
    stream: str
    shard_id: str
    sequence_number: str
    sub_sequence_number: int
    partition_key: str
    explicit_hash_key: str | None
    arrived_at: float
    data: bytes
    error: str
    raised_at: str
    traceback: str
    calls: int
    given_up_at: float
    stream_created_at: float = 0.0
    generation: int = 0
    token: int = 0
    owner_since: float = 0.0
    data_at: str | None = None

    @classmethod
    def of(
        cls,
        record: Record,
        source: LetterSource,
        *,
        error: str,
        raised_at: str,
        traceback: str,
        calls: int,
        given_up_at: float,
        owner: LetterOwner | None = None,
    ) -> Letter:
        """The letter of a record that was given up after `calls` calls had raised with it. `owner`
        is None where no lease is behind it."""
        by = LetterOwner() if owner is None else owner
        return cls(
            version=LETTER_VERSION,
            application=source.application,
            processor=source.processor,
            stream=source.stream,
            shard_id=source.shard_id,
            sequence_number=record.sequence_number,
            sub_sequence_number=record.sub_sequence_number,
            partition_key=record.partition_key,
            explicit_hash_key=record.explicit_hash_key,
            arrived_at=record.approximate_arrival_timestamp,
            data=record.data,
            error=error[:_ERROR_CHARACTERS_MAX],
            raised_at=raised_at,
            traceback=traceback[-_TRACEBACK_CHARACTERS_MAX:],
            calls=calls,
            given_up_at=given_up_at,
            stream_created_at=by.stream_created_at,
            generation=by.generation,
            token=by.token,
            owner_since=by.since,
        )

    @property
    def record(self) -> Record:
        """The record again, as it was read."""
        return Record(
            data=self.data,
            partition_key=self.partition_key,
            sequence_number=self.sequence_number,
            approximate_arrival_timestamp=self.arrived_at,
            sub_sequence_number=self.sub_sequence_number,
            explicit_hash_key=self.explicit_hash_key,
        )

    @property
    def position(self) -> str:
        """As logs and `kclrun dead-letters` write it."""
        return str(ExtendedSequenceNumber(self.sequence_number, self.sub_sequence_number))

    @property
    def name(self) -> str:
        """A path that follows from the record and the owner that gave it up:
        `<stream>/<shard>/<position>.<generation>.<token>.json`. The next owner's letter has another
        one: a request of a former owner that arrives late replaces nothing [K20]."""
        number = f"{self.sequence_number}-{self.sub_sequence_number}"
        by = f".{self.generation}.{self.token}" if self.token else ""
        return f"{self.stream}/{self.shard_id}/{number}{by}.json"

    @property
    def order(self) -> tuple[str, str, int, int]:
        """Sorts letters shard by shard, each in the order of its records."""
        return (self.stream, self.shard_id, int(self.sequence_number), self.sub_sequence_number)


class LetterSource(NamedTuple):
    """The processor that gave a record up, and the shard that it read."""

    application: str
    processor: str
    stream: str
    shard_id: str


class LetterOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The lease of a record that was given up, and the owner that gave it up, as in `Letter`."""

    stream_created_at: float = 0.0
    generation: int = 0
    token: int = 0
    since: float = 0.0


class Takeover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kept among the letters by an owner that began at `taken_over_at`, a Cursor, while a former
    owner might have letters above it: those do not count, for this one judges their records [K20].
    """

    taken_over_at: str
    stream: str
    shard_id: str
    by: LetterOwner

    @property
    def name(self) -> str:
        """A path beside the letters of the shard. Not of `.json`: those are letters."""
        by = self.by
        created = round(by.stream_created_at * 1000)
        return f"{self.stream}/{self.shard_id}/{created}.{by.generation}.{by.token}{TAKEN_OVER}"

    def is_over(self, letter: Letter) -> bool:
        """Whether the letter is of an owner before this one, and of a record that it judged again.

        A row that was deleted by hand and made again counts from 0. Its owners have lower tokens
        and began later: their letters count.
        """
        by = self.by
        is_of_lease = (self.stream, self.shard_id, by.stream_created_at, by.generation) == (
            letter.stream,
            letter.shard_id,
            letter.stream_created_at,
            letter.generation,
        )
        is_before = 0 < letter.token < by.token and letter.owner_since < by.since
        at = Cursor.parse(self.taken_over_at).position
        return is_of_lease and is_before and letter.record.position > at


class KeptLetter(msgspec.Struct, frozen=True):
    """A letter and its place: `where` for people, `handles` for the store that has it, one for each
    time that it has the letter of this record.

    `outside`: the letters of these that were too large for their queue or stream, and are in the
    bucket beside it. `is_uncommitted`: the work of its owner was never committed, and another one
    processed the record, or has a letter of it.
    """

    letter: Letter
    where: str
    handles: tuple[Any, ...] = ()
    outside: tuple[Letter, ...] = ()
    is_uncommitted: bool = False


def classified(found: Iterable[KeptLetter], takeovers: Iterable[Takeover]) -> list[KeptLetter]:
    """The letters in the order of their records: each record of a generation once, and once more
    with the letters of it that are of uncommitted work."""
    known: defaultdict[tuple[str, str], list[Takeover]] = defaultdict(list)
    for takeover in takeovers:
        known[takeover.stream, takeover.shard_id].append(takeover)
    together: dict[tuple[object, ...], KeptLetter] = {}
    for kept in found:
        letter = kept.letter
        is_void = any(takeover.is_over(letter) for takeover in known[letter.order[:2]])
        key = (*letter.order, letter.generation, is_void)
        other = together.get(key, kept)
        last = max(other, kept, key=lambda kept: (kept.letter.token, kept.letter.given_up_at))
        handles = tuple(dict.fromkeys((*other.handles, *kept.handles)))
        outside = tuple(dict.fromkeys((*other.outside, *kept.outside)))
        together[key] = KeptLetter(last.letter, last.where, handles, outside, is_void)
    return [kept for _, kept in sorted(together.items(), key=lambda item: item[0])]


# Gets the sentence about an entry among the letters that cannot be used; reading goes on behind it.
Unusable = Callable[[str], object]


def refuse_entry(why: str) -> NoReturn:
    """For readers that need all letters. Raises: SettingsError."""
    raise SettingsError(why)


class LetterFiles(Protocol):
    """The files of the letters of one shard, in a folder or in a bucket, by their names."""

    def read(self, name: str) -> bytes | None:
        """The content; None if it was removed since. Raises: SettingsError, if this file cannot be
        read; a ServiceError leaf."""
        ...

    def located(self, name: str) -> tuple[str, Any]:
        """Its place for people, and the handle by which it is removed."""
        ...


def letters_of_files(
    files: LetterFiles, names: Iterable[str], unusable: Unusable
) -> Iterator[KeptLetter]:
    """The letters of a shard whose files have these names, as `classified`. In memory are those of
    one record at a time: a shard may have more of them than a process can hold.

    A takeover that cannot be read may say that letters do not count: the shard is left out then.
    """
    letters, takeovers = [], []
    for name in names:
        if name.endswith(TAKEN_OVER):
            takeovers.append(name)
        else:
            letters.append(name)
    known: list[Takeover] = []
    for name in takeovers:
        try:
            if (content := files.read(name)) is None:
                continue
        except SettingsError as error:
            unusable(f"{error}; the dead letters beside it are left out")
            return
        takeover = decode_takeover(content)
        if takeover is None:
            unusable(
                f"{files.located(name)[0]}: it is not a takeover that a lease owner left there; the"
                " dead letters beside it are left out, for it may say that some do not count"
            )
            return
        known.append(takeover)
    for of_record in _by_record(letters):
        yield from classified(_decoded(files, of_record, unusable), known)


def _decoded(files: LetterFiles, names: Iterable[str], unusable: Unusable) -> Iterator[KeptLetter]:
    for name in names:
        where, handle = files.located(name)
        try:
            if (content := files.read(name)) is not None:
                yield KeptLetter(decode_letter(content, where), where, (handle,))
        except SettingsError as error:
            unusable(str(error))


def _by_record(names: Iterable[str]) -> Iterator[list[str]]:
    """The names of the letters of a shard, those of a record together, in the order of the records.
    Other names than those of `Letter.name` come last."""
    of_record: defaultdict[tuple[float, int], list[str]] = defaultdict(list)
    for name in names:
        match = _RECORD_IN_NAME.match(name)
        key = (int(match[1]), int(match[2])) if match is not None else (math.inf, 0)
        of_record[key].append(name)
    for key in sorted(of_record):
        yield sorted(of_record.pop(key))


class LetterDestination(msgspec.Struct, frozen=True, kw_only=True):
    """Where an application's dead letters are: a folder, `s3://bucket/prefix`, an SQS queue or a
    stream. `s3` beside a queue or a stream takes letters that are too large for it. The URLs are
    those of the services, if they are not AWS's own."""

    path: str | None = None
    s3: str | None = None
    sqs: str | None = None
    stream: str | None = None
    s3_url: str | None = None
    sqs_url: str | None = None


# A sequence number has 56 digits.
_RECORD_IN_NAME: Final = re.compile(r"([0-9]{1,64})-([0-9]{1,20})\.")
# The end of the year 9999, in seconds: no clock of a host shows a later time.
_TIME_MAX: Final = 253_402_300_800.0
_DECODER: Final = msgspec.json.Decoder(Letter)
_TAKEOVERS: Final = msgspec.json.Decoder(Takeover)


def decode_letter(content: bytes | str, where: str) -> Letter:
    """Raises: SettingsError, naming `where`, for other content, or a letter of a newer version."""
    try:
        letter = _DECODER.decode(content)
        is_of_record = not letter.record.position.is_sentinel and all(
            0 <= time < _TIME_MAX for time in (letter.arrived_at, letter.given_up_at)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, LimitExceeded):
        is_of_record = False
    if not is_of_record:
        raise SettingsError(f"{where}: it is not a dead letter")
    if letter.version > LETTER_VERSION:
        raise SettingsError(f"{where}: it was written by a newer version of kclrun")
    return letter


def decode_takeover(content: bytes | str) -> Takeover | None:
    """None if it is anything else: a letter, or what another program left."""
    try:
        takeover = _TAKEOVERS.decode(content)
        Cursor.parse(takeover.taken_over_at)
    except (msgspec.DecodeError, UnicodeDecodeError, LimitExceeded):
        return None
    return takeover
