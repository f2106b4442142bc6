"""Dead letters: the records that were given up, with all that their repair needs."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber

# The version of the format; readers refuse a higher one.
LETTER_VERSION: Final = 1
# The message of an exception, and the last lines of a traceback, as in the log.
_ERROR_CHARACTERS_MAX: Final = 2 * 1024
_TRACEBACK_CHARACTERS_MAX: Final = 8 * 1024


class Letter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record that was given up. `data` is base64 in JSON; `arrived_at` and `given_up_at` are
    seconds since the epoch. `calls` counts the calls that raised with the record.

    `stream_created_at` and `generation` say of which stream of that name, and of which reset of the
    application, the lease was [K4]; both are 0 in letters that do not say it.

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
    data_at: str | None = None

    @classmethod
    def of(
        cls,
        record: Record,
        *,
        application: str,
        processor: str,
        stream: str,
        shard_id: str,
        error: str,
        raised_at: str,
        traceback: str,
        calls: int,
        given_up_at: float,
        stream_created_at: float = 0.0,
        generation: int = 0,
    ) -> Letter:
        """The letter of a record that was given up after `calls` calls had raised with it."""
        return cls(
            version=LETTER_VERSION,
            application=application,
            processor=processor,
            stream=stream,
            shard_id=shard_id,
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
            stream_created_at=stream_created_at,
            generation=generation,
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
        """A path that follows from the record: `<stream>/<shard>/<position>.json`. A record that is
        given up again after a crash, or by the next owner, has the same one."""
        number = f"{self.sequence_number}-{self.sub_sequence_number}"
        return f"{self.stream}/{self.shard_id}/{number}.json"

    @property
    def order(self) -> tuple[str, str, int, int]:
        """Sorts letters shard by shard, each in the order of its records."""
        return (self.stream, self.shard_id, int(self.sequence_number), self.sub_sequence_number)


class KeptLetter(msgspec.Struct, frozen=True):
    """A letter and its place: `where` for people, `handle` for the store that has it.

    `is_outside`: the letter was too large for its queue or stream, and is in the bucket beside it.
    """

    letter: Letter
    where: str
    handle: Any = None
    is_outside: bool = False


class LetterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where an application's dead letters are: a folder, `s3://bucket/prefix`, an SQS queue or a
    stream. `s3` beside a queue or a stream takes letters that are too large for it. The URLs are
    those of the services, if they are not AWS's own."""

    path: str | None = None
    s3: str | None = None
    sqs: str | None = None
    stream: str | None = None
    s3_url: str | None = None
    sqs_url: str | None = None


_DECODER: Final = msgspec.json.Decoder(Letter)


def decode_letter(content: bytes | str, where: str) -> Letter:
    """Raises: SettingsError, naming `where`, for other content, or a letter of a newer version."""
    try:
        letter = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise SettingsError(f"{where}: it is not a dead letter") from None
    if letter.version > LETTER_VERSION:
        raise SettingsError(f"{where}: it was written by a newer version of kclrun")
    return letter
