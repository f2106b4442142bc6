"""Dead letters in S3, in SQS and in a Kinesis stream. Each class implements `ports.LetterStore`.

These calls are few, so S3 and SQS are used through botocore's own clients. A process without such
a place does not import this module, because it loads botocore.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws.control import Client, ControlPlane, RenewedClient, doing, keeping
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.operations import (
    CHANGE_MESSAGE_VISIBILITY_BATCH,
    DELETE_MESSAGE_BATCH,
    GET_QUEUE_ATTRIBUTES,
    GET_QUEUE_URL,
    GET_RECORDS,
    LIST_OBJECTS_V2,
    LIST_SHARDS,
    PUT_OBJECT,
    PUT_RECORDS,
    RECEIVE_MESSAGE,
    SEND_MESSAGE,
    Operation,
)
from kclrun.aws.outputs.messages import QueueSender
from kclrun.aws.outputs.s3 import ABSENT, Bucket
from kclrun.aws.outputs.write_probes import probe_stream
from kclrun.aws.put_records import batches, put_records, send_all
from kclrun.aws.wire import WireClient
from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    LetterTooLarge,
    NotFound,
    ServiceError,
    SettingsError,
    Unavailable,
)
from kclrun.model.letter import (
    LETTER_BYTES_MAX,
    LETTERS_MAX,
    TAKEN_OVER,
    KeptLetter,
    Letter,
    LetterDestination,
    Takeover,
    Unusable,
    classified,
    decode_letter,
    decode_takeover,
    letters_of_files,
    refuse_entry,
)
from kclrun.model.quotas import GROUP_CHARACTERS_MAX, MESSAGES_MAX, RECORD_BYTES_LARGEST
from kclrun.model.reading import PageCursor
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import LetterStore, next_page, record_limit

# While letters are listed or put back, no other reader receives them: 10,000 take a minute.
_HIDDEN_S: Final = 600
# The answer to a call that waits is empty only if no part of the queue has a message (SQS's guide
# on long polling).
WAIT_S: Final = 1
# Errors about one object that others need not share: it is gone, archived, or encrypted with a key
# that may not be used.
_OF_ONE_OBJECT: Final = (NotFound, InvalidRequest, AccessDenied)
# It ends the reading of a shard whose tip is never reached.
_PAGES_A_SHARD_MAX: Final = 100_000


def open_aws_letters(
    place: LetterDestination,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
    *,
    read_max: int | None = None,
) -> LetterStore:
    """The letters of a bucket, a queue or a stream; sends nothing. `kinesis` is the application's
    endpoint: the other services are used in its region. `read_max`: see `LetterStream`."""
    bucket = None
    if place.s3 is not None:
        s3 = EndpointSettings(region=kinesis.region, endpoint_url=place.s3_url)
        bucket = LetterBucket(RenewedClient(s3, credentials, ControlPlane.s3), place.s3)
    if place.sqs is not None:
        sqs = EndpointSettings(region=kinesis.region, endpoint_url=place.sqs_url)
        return LetterQueue(RenewedClient(sqs, credentials, ControlPlane.sqs), place.sqs, bucket)
    if place.stream is not None:
        client = WireClient(kinesis, credentials, service="kinesis")
        return LetterStream(client, place.stream, bucket, read_max=read_max)
    assert bucket is not None, "the settings name a place, and it is not a folder"
    return bucket


class LetterBucket(Bucket):
    """Letters as objects under a prefix: `s3://bucket/prefix/<stream>/<shard>/<position>.json`."""

    def keep(self, letter: Letter) -> None:
        """As `LetterStore.keep`. The same letter may be kept twice, and is then there once."""
        self._put(letter)

    def take_over(self, takeover: Takeover) -> None:
        self._put(takeover)

    def _put(self, content: Letter | Takeover) -> None:
        key, body = self.prefix + content.name, msgspec.json.encode(content) + b"\n"
        with keeping(), doing(PUT_OBJECT, f"keep the dead letter {self.url_of(content)}"):
            self.request("put_object", Key=key, Body=body)

    def url_of(self, content: Letter | Takeover) -> str:
        """The URL at which `keep` or `take_over` puts it."""
        return self.url(self.prefix + content.name)

    def get(self, letter: Letter) -> Letter:
        """The whole letter of one without its payload. Raises: SettingsError, a ServiceError."""
        key = self.prefix + letter.name
        try:
            return decode_letter(self.read(key), self.url(key))
        except _OF_ONE_OBJECT as error:
            raise SettingsError(str(error)) from None

    def kept(self, unusable: Unusable = refuse_entry) -> Iterator[KeptLetter]:
        # Keys are listed in the order of their bytes, so the keys of a shard follow each other.
        for _, found in itertools.groupby(
            self._found(), lambda listed: listed[0].rpartition("/")[0]
        ):
            sizes = dict(found)
            yield from letters_of_files(_ShardObjects(self, sizes), sizes, unusable)

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        self._remove([key for kept_letter in kept for key in kept_letter.handles])

    def remove_letters(self, letters: Sequence[Letter]) -> None:
        """Remove letters at `url_of`. Raises: a ServiceError leaf."""
        self._remove([self.prefix + letter.name for letter in letters])

    def _remove(self, keys: Sequence[str]) -> None:
        self.delete(keys, f"dead letters of s3://{self.bucket}")

    def check(self) -> str:
        with doing(LIST_OBJECTS_V2, f"look into the bucket {self.bucket}"):
            self.client().list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
        self.probe()
        return self.url(self.prefix)

    def _found(self) -> Iterator[tuple[str, int]]:
        """The keys of letters and takeovers, each with the size of its object."""
        for page in self.pages(self.prefix):
            for found in page.get("Contents", ()):
                if found["Key"].endswith((".json", TAKEN_OVER)):
                    yield found["Key"], found.get("Size", 0)


class _ShardObjects:
    """The objects of the letters of one shard. Implements `model.letter.LetterFiles`; the names are
    keys."""

    def __init__(self, bucket: LetterBucket, sizes: Mapping[str, int]) -> None:
        self._bucket = bucket
        self._sizes = sizes

    def read(self, name: str) -> bytes | None:
        url = self._bucket.url(name)
        if self._sizes[name] > LETTER_BYTES_MAX:
            raise SettingsError(f"{url}: it is not a dead letter: it has {self._sizes[name]} bytes")
        try:
            return self._bucket.read(name)
        except _OF_ONE_OBJECT as error:
            if error.code in ABSENT:
                return None  # another reader removed it
            raise SettingsError(str(error)) from None

    def located(self, name: str) -> tuple[str, str]:
        return self._bucket.url(name), name


class LetterQueue:
    """Letters as messages of an SQS queue, given by its name or its URL.

    A record that is given up again after a crash may be in the queue twice. It is shown once, and
    removed with all its messages. In a FIFO queue each letter is a group of its own, so that no
    letter waits for another. `large` takes letters that the queue refuses.
    """

    def __init__(
        self, client: Callable[[], Client], queue: str, large: LetterBucket | None = None
    ) -> None:
        self._client = client
        self._queue = queue
        self._sender = QueueSender(client, queue)
        self._bytes_max: int | None = None
        self._large = large
        self._hidden: set[str] = set()

    def keep(self, letter: Letter) -> None:
        with keeping(), doing(SEND_MESSAGE, f"keep a dead letter in the queue {self._queue}"):
            if self._bytes_max is None:
                self._sender.look()
                self._bytes_max = self._sender.limits.message_bytes_max
            body = _fitting(letter, _ascii(letter), self._bytes_max, self._large, self._queue)
            self._send(letter, body)

    def take_over(self, takeover: Takeover) -> None:
        with keeping(), doing(SEND_MESSAGE, f"take over the dead letters in {self._queue}"):
            self._send(takeover, _ascii(takeover))

    def _send(self, content: Letter | Takeover, body: str) -> None:
        url = self._sender.url()
        fifo = {
            "MessageGroupId": content.name[-GROUP_CHARACTERS_MAX:],
            "MessageDeduplicationId": _digest(body),
        }
        more = fifo if url.endswith(".fifo") else {}
        self._client().send_message(QueueUrl=url, MessageBody=body, **more)

    def kept(self, unusable: Unusable = refuse_entry) -> Iterator[KeptLetter]:
        """As `LetterStore.kept`: at most 10,000. No other reader receives them for ten minutes,
        or until `close`."""
        letters, takeovers = [], []
        for message in self._messages():
            body, handle = message["Body"], message["ReceiptHandle"]
            self._hidden.add(handle)
            if (takeover := decode_takeover(body)) is not None:
                takeovers.append(takeover)
                continue
            where = f"{self._queue}, message {message['MessageId']}"
            try:
                letters.append(_kept(body, where, self._queue, self._large, handle))
            except SettingsError as error:
                unusable(str(error))
        yield from classified(letters, takeovers)

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        handles = [handle for kept_letter in kept for handle in kept_letter.handles]
        what = f"remove dead letters of the queue {self._queue}"
        self._change(DELETE_MESSAGE_BATCH, "delete_message_batch", what, handles)
        _remove_large(self._large, kept)

    def _change(
        self, operation: Operation, call: str, what: str, handles: Sequence[str], **more: Any
    ) -> None:
        """Change messages that are hidden, ten a call. Raises: a ServiceError leaf; then the
        messages of later calls are unchanged."""
        for part in _parts(handles, MESSAGES_MAX):
            entries = [{"Id": str(n), "ReceiptHandle": one, **more} for n, one in enumerate(part)]
            with doing(operation, what):
                url = self._sender.url()
                answer = getattr(self._client(), call)(QueueUrl=url, Entries=entries)
                if failed := [refusal["Code"] for refusal in answer.get("Failed", ())]:
                    text = f"{len(failed)} messages were refused, the first with {failed[0]}"
                    raise Unavailable(text, operation=operation.name)
            self._hidden.difference_update(part)

    def check(self) -> str:
        sender = self._sender
        with doing(GET_QUEUE_URL, f"find the queue {self._queue}"):
            sender.look()
        with doing(SEND_MESSAGE, f"keep dead letters in the queue {self._queue}"):
            proof = sender.prove()
        above = _above(sender.limits.message_bytes_max, self._large)
        return f"the queue {self._queue}; {proof}{above}"

    def waiting(self) -> tuple[int, int]:
        """About how many messages a reader would receive, and how many are hidden because other
        readers have received them. It receives none. Raises: a ServiceError leaf."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        with doing(GET_QUEUE_ATTRIBUTES, f"look at the queue {self._queue}"):
            url = self._sender.url()
            known = self._client().get_queue_attributes(QueueUrl=url, AttributeNames=names)
            shown, hidden = (int(known["Attributes"][name]) for name in names)
        return shown, hidden

    def close(self) -> None:
        """As `LetterStore.close`. Messages that this does not show again reappear after ten
        minutes."""
        call, what = "change_message_visibility_batch", "show messages again"
        for part in _parts(sorted(self._hidden), MESSAGES_MAX):
            with contextlib.suppress(ServiceError):
                self._change(CHANGE_MESSAGE_VISIBILITY_BATCH, call, what, part, VisibilityTimeout=0)
        self._hidden.clear()

    def _messages(self) -> Iterator[dict[str, Any]]:
        count = 0
        while count < LETTERS_MAX:
            with doing(RECEIVE_MESSAGE, f"read the queue {self._queue}"):
                answer = self._client().receive_message(
                    QueueUrl=self._sender.url(),
                    MaxNumberOfMessages=MESSAGES_MAX,
                    VisibilityTimeout=_HIDDEN_S,
                    WaitTimeSeconds=WAIT_S,
                )
            if not (messages := answer.get("Messages", ())):
                return
            count += len(messages)
            yield from messages


class _Removal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of a stream of letters: the letter of this name and time is removed, and earlier
    ones of the name; later ones are not."""

    removed: str
    given_up_at: float


_REMOVAL_ENCODE: Final = msgspec.json.Encoder().encode
_REMOVAL_DECODER: Final = msgspec.json.Decoder(_Removal)


def _removal(data: bytes) -> _Removal | None:
    try:
        return _REMOVAL_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class LetterStream:
    """Letters as records of a Kinesis stream, under the keys of the records themselves.

    Nothing is deleted from a stream: `remove` puts a record that names the letter, and readers
    leave out letters that are named so. `large` takes letters that the stream refuses. A stream
    with more than `read_max` bytes is not read: `kept` raises a SettingsError.
    """

    def __init__(
        self,
        client: WireClient,
        stream: str,
        large: LetterBucket | None = None,
        *,
        read_max: int | None = None,
    ) -> None:
        self._client = client
        self._stream = stream
        self._large = large
        self._read_max = read_max
        self._limit = record_limit(WireStreamAdmin(client, stream))

    def keep(self, letter: Letter) -> None:
        body, key_bytes = _ascii(letter), len(letter.partition_key.encode())
        bytes_max = self._limit.covering(len(body) + key_bytes) - key_bytes
        try:
            body = _fitting(letter, body, bytes_max, self._large, self._stream)
        except LetterTooLarge as error:
            if unknown := self._limit.unknown:
                raise LetterTooLarge(f"{error}{unknown}") from None
            raise
        with keeping(), doing(PUT_RECORDS, f"keep a dead letter in the stream {self._stream}"):
            self._put(_entry(letter, body.encode()))

    def take_over(self, takeover: Takeover) -> None:
        with keeping(), doing(PUT_RECORDS, f"take over the dead letters in {self._stream}"):
            self._put(PutEntry(_ascii(takeover).encode(), takeover.shard_id, None))

    def _put(self, entry: PutEntry) -> None:
        (result,) = put_records(self._client, self._stream, [entry])
        if result.error_code is not None:
            code = result.error_code[:100]
            raise Unavailable(f"refused with {code}", operation=PUT_RECORDS.name, code=code)

    def kept(self, unusable: Unusable = refuse_entry) -> Iterator[KeptLetter]:
        """As `LetterStore.kept`: at most 10,000, the oldest."""
        letters: dict[str, Letter] = {}
        takeovers: list[Takeover] = []
        removed: defaultdict[str, float] = defaultdict(lambda: -1.0)
        for data, where in self._records():
            if (takeover := decode_takeover(data)) is not None:
                takeovers.append(takeover)
            elif (removal := _removal(data)) is not None:
                removed[removal.removed] = max(removal.given_up_at, removed[removal.removed])
            else:
                try:
                    letter = decode_letter(data, where)
                except SettingsError as error:
                    unusable(str(error))
                else:
                    letters[letter.name] = letter
        left = [letter for letter in letters.values() if letter.given_up_at > removed[letter.name]]
        found: list[KeptLetter] = []
        for letter in left[:LETTERS_MAX]:
            try:
                found.append(_whole(letter, self._stream, self._large, letter))
            except SettingsError as error:
                unusable(str(error))
        yield from classified(found, takeovers)

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        letters = [letter for kept_letter in kept for letter in kept_letter.handles]
        removals = (
            _entry(letter, _REMOVAL_ENCODE(_Removal(letter.name, letter.given_up_at)))
            for letter in letters
        )
        with doing(PUT_RECORDS, f"remove dead letters of the stream {self._stream}"):
            for batch in batches(removals):
                send_all(self._client, self._stream, batch)
        _remove_large(self._large, kept)

    def check(self) -> str:
        with doing(LIST_SHARDS, f"look at the stream {self._stream}"):
            # Every policy of ours that allows putting into a stream allows this too.
            WireStreamAdmin(self._client, self._stream).list_shards()
        with doing(PUT_RECORDS, f"keep dead letters in the stream {self._stream}"):
            proof = probe_stream(self._client, self._stream)
        above = _above(self._limit.covering(RECORD_BYTES_LARGEST), self._large)
        return f"the stream {self._stream}; {proof}{above}"

    def close(self) -> None:
        """Nothing is held."""

    def _records(self) -> Iterator[tuple[bytes, str]]:
        reader, size = PollingReader(self._client, self._stream), 0
        start = StartPoint(IteratorType.TRIM_HORIZON)
        with doing(GET_RECORDS, f"read the stream {self._stream}"):
            for shard in WireStreamAdmin(self._client, self._stream).list_shards():
                cursor = PageCursor(start)
                for _ in range(_PAGES_A_SHARD_MAX):
                    page = next_page(reader, shard.shard_id, cursor)
                    size += sum(len(record.data) for record in page.records)
                    if self._read_max is not None and size > self._read_max:
                        raise SettingsError(
                            f"the stream {self._stream} holds more than {self._read_max:,} bytes"
                        )
                    for record in page.records:
                        number = record.sequence_number
                        yield record.data, f"{self._stream}, {shard.shard_id}, {number}"
                    if page.next_iterator is None or page.millis_behind_latest == 0:
                        break


def _parts(every: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """The parts of `every`, one for each call."""
    return (every[at : at + size] for at in range(0, len(every), size))


def _entry(letter: Letter, body: bytes) -> PutEntry:
    return PutEntry(body, letter.partition_key, letter.explicit_hash_key)


def _above(bytes_max: int, large: LetterBucket | None) -> str:
    """The place of letters that are larger, in words. Raises: a ServiceError leaf."""
    place = large.check() if large is not None else "none, its shard halts"
    return f"; for dead letters above {bytes_max:,} bytes: {place}"


def _ascii(content: Letter | Takeover) -> str:
    """As JSON in ASCII: SQS refuses some characters of Unicode."""
    return json.dumps(msgspec.to_builtins(content), separators=(",", ":"))


def _digest(body: str) -> str:
    """The deduplication id of a message. Within five minutes SQS drops a second message with the
    same id, also if the first was removed. So it is made of the whole letter, with its time."""
    return hashlib.sha256(body.encode()).hexdigest()


def _fitting(
    letter: Letter, body: str, bytes_max: int, large: LetterBucket | None, where: str
) -> str:
    """The body; if it is too large, one without the payload and with the URL of the whole letter,
    which has been kept in `large`. Raises: LetterTooLarge, SinkError."""
    if len(body) <= bytes_max:
        return body
    if large is None:
        raise LetterTooLarge(
            f"a dead letter of {len(body):,} bytes does not fit into {where}, which takes"
            f" {bytes_max:,}\nSet on_error.dead_letter.s3 as well, for dead letters of such a size"
        )
    large.keep(letter)
    return _ascii(msgspec.structs.replace(letter, data=b"", data_at=large.url_of(letter)))


def _kept(
    body: str, message: str, where: str, large: LetterBucket | None, handle: str
) -> KeptLetter:
    """The letter of a message. Raises: SettingsError, naming `message`; a ServiceError leaf."""
    letter = decode_letter(body, message)
    try:
        return _whole(letter, where, large, handle)
    except SettingsError as error:
        raise SettingsError(f"{message}: {error}") from None


def _whole(letter: Letter, where: str, large: LetterBucket | None, handle: Any) -> KeptLetter:
    """The letter with its payload. Raises: SettingsError, a ServiceError leaf."""
    if letter.data_at is None:
        return KeptLetter(letter, where, (handle,))
    # Any sender may write a message: its URL is followed within our own bucket only.
    if large is None or letter.data_at != large.url_of(letter):
        raise SettingsError(
            f"a dead letter is at {letter.data_at}: that is not in on_error.dead_letter.s3"
        )
    return KeptLetter(large.get(letter), where, (handle,), (letter,))


def _remove_large(large: LetterBucket | None, kept: Sequence[KeptLetter]) -> None:
    """Remove the objects, after the messages: a message without its object cannot be read again."""
    outside = [letter for kept_letter in kept for letter in kept_letter.outside]
    if large is not None and outside:
        large.remove_letters(outside)
