"""Rows as messages of a queue, a topic or a delivery stream: at least once, in order per group.

Decides when a message is sent; `ports.MessageSender` sends it. Must not know which service it is.
"""

from __future__ import annotations

import collections
import hashlib
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun import errors
from kclrun.codec.row_lines import encode_row_line
from kclrun.model.output import Cursor, Message, MessageLimits, OutputDestination, RowsOf
from kclrun.model.retries import PASSING_OF_WRITES
from kclrun.model.time import backoff_s
from kclrun.ports import MessageSender
from kclrun.processor import Row

# Requests under way at once. One takes 10 to 40 ms, so four send 1,000 to 4,000 messages a second
# to a queue: as many as one shard can have.
CONCURRENCY: Final = 4
# `commit` repeats requests for this time while the service takes no message; then it fails, and the
# shell calls it again after a pause. So a stop of the process is not delayed for longer.
GIVE_UP_AFTER_S: Final = 10.0
_BACKOFF_BASE_S: Final = 0.1
_BACKOFF_MAX_S: Final = 2.0
# SQS and SNS document it for MessageGroupId: 128 letters, digits and marks.
_GROUP: Final = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,./:;<=>?@\[\\\]^_`{|}~-]{1,128}")
# The text of SQS and SNS is XML, which cannot have these two characters; JSON can escape them.
_NOT_IN_XML: Final = (("\ufffe", "\\ufffe"), ("\uffff", "\\uffff"))
# The types of a key: different values have different texts.
_KEY_TYPES: Final = (str, int)

_Outcome = Sequence[str | None] | errors.ServiceError


class RowEncoder:
    """Rows of one output as JSON, and the text of the column that orders them."""

    def __init__(self, place: OutputDestination) -> None:
        self._column = place.key[0] if place.key else None

    def __call__(self, row: Row) -> tuple[bytes, str | None]:
        """One line of JSON with its end, and the key; None without `key` in the settings.

        Raises: TypeError, LimitExceeded; they name the column and never a value.
        """
        line = encode_row_line(row)
        return line, None if self._column is None else _key_text(row, self._column)


def _key_text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, _KEY_TYPES):
        given = "is missing" if value is None else f"is of type {type(value).__name__}"
        raise TypeError(f"column {column} {given}: the key of a message is a text or an integer")
    return str(value)


def naming(where: str, error: errors.ServiceError) -> errors.ServiceError:
    """The same error, with the destination in front."""
    return error.reworded(f"{where}: {error}")


class MessageOutput:
    """Implements `ports.Output`. `add` sends ahead without waiting; `commit` waits for everything.

    A request has at most one message of a group, and no other request under way has a message of
    that group: so the order of a group survives the refusal of any message. Messages without a
    group fill requests in their order, and a refused one is sent again.

    The deduplication id of a message is made from the rows' origin, the cursor of the last commit,
    the number of the row since then, and its text. After a crash the next process begins at that
    cursor: a deterministic processor emits the same rows, and a FIFO destination drops those that
    it has. The text is part of it because another processor's row of that number must not be lost.
    """

    stores_cursor = False

    def __init__(
        self,
        place: OutputDestination,
        of: RowsOf,
        sender: MessageSender,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._sender = sender
        self._encoder = RowEncoder(place)
        self._keeps_end = place.firehose is not None
        self._is_fifo = sender.limits.is_fifo
        self._shard_group = of.shard_id
        self._origin = _origin(place, of)
        self._clock = clock
        self._wait = wait
        self._chance = chance
        self._committed = self._upto = Cursor.parse("TRIM_HORIZON")
        self._number = 0
        self._messages = _Waiting()
        self._requests: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[list[Message], _Outcome]] = queue.SimpleQueue()
        self._is_serving = False
        self._under_way = 0
        self._failures = 0
        self._held_until = 0.0
        self._failing_since: float | None = None

    def encode(self, row: Row) -> tuple[Any, int]:
        """As `Output.encode`: the message without its deduplication id."""
        line, key = self._encoder(row)
        text = line.decode() if self._keeps_end else line[:-1].decode()
        for character, named in _NOT_IN_XML:
            if character in text:
                text = text.replace(character, named)
        size_bytes = len(text) if text.isascii() else len(text.encode())
        bytes_max = self._sender.limits.message_bytes_max
        if size_bytes > bytes_max:
            raise errors.LimitExceeded(
                f"a row of {size_bytes:,} bytes does not fit into {self._sender.where}, which takes"
                f" {bytes_max:,}"
            )
        return Message(text, size_bytes, self._group(key) if self._is_fifo else None), size_bytes

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: finds the destination. A former owner is not kept from sending."""
        try:
            self._sender.look()
        except errors.ServiceError as error:
            raise self._failed(error) from None
        self._committed = self._upto = at
        if not self._is_serving:  # `begin` is repeated while another output is away
            self._is_serving = True
            for _ in range(CONCURRENCY):
                threading.Thread(target=self._serve, name="messages", daemon=True).start()
        return at

    def add(self, rows: Sequence[Any], upto: Cursor) -> None:
        """As `Output.add`; it never fails. If a request fails, the next `commit` raises."""
        for message in rows:
            self._messages.add(self._identified(message) if self._is_fifo else message)
        self._upto = upto
        self._take_answers()
        self._send_due()

    @property
    def unsent_bytes(self) -> int:
        """As `Output.unsent_bytes`: messages that are not taken yet."""
        return self._messages.size_bytes

    def commit(self) -> Cursor:
        self._failures, self._failing_since, self._held_until = 0, None, 0.0
        while self._messages.count:
            self._send_due()
            self._await_news()
        if self._committed != self._upto:
            self._committed, self._number = self._upto, 0
        return self._committed

    def check(self) -> str:
        """As `Output.check`: looks at the destination, and sends what it can never accept."""
        try:
            self._sender.look()
            return f"{self._sender.where}; {self._sender.prove()}"
        except errors.ServiceError as error:
            raise naming(self._sender.where, error) from None

    def close(self) -> None:
        for _ in range(CONCURRENCY):
            self._requests.put(None)
        self._sender.close()

    def _group(self, key: str | None) -> str:
        if key is None:
            return self._shard_group
        return key if _GROUP.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()

    def _identified(self, message: Message) -> Message:
        named = f"{self._origin}|{self._committed}|{self._number}|{message.body}"
        self._number += 1
        digest = hashlib.sha256(named.encode()).hexdigest()
        return msgspec.structs.replace(message, deduplication_id=digest)

    def _send_due(self) -> None:
        """Send the requests that are due. While requests are under way, only full requests
        follow."""
        if self._clock() < self._held_until:
            return
        while self._under_way < CONCURRENCY:
            batch = self._messages.take(self._sender.limits, full_only=self._under_way > 0)
            if not batch:
                return
            self._under_way += 1
            self._requests.put(batch)

    def _serve(self) -> None:
        """A thread that sends requests until `close`."""
        while (batch := self._requests.get()) is not None:
            outcome: _Outcome
            try:
                outcome = self._sender.send(batch)
            except errors.ServiceError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - its caller waits for an answer
                outcome = errors.Unavailable(f"{type(error).__name__}: {error}")
            self._answers.put((batch, outcome))

    def _await_news(self) -> None:
        """Wait for an answer, or until a refused message may be sent again."""
        if self._under_way:
            self._settle(*self._answers.get())
        else:
            self._wait(max(0.0, self._held_until - self._clock()))
        self._take_answers()

    def _take_answers(self) -> None:
        """Handle the answers that are there. A failure is not raised here, because `add` must take
        its rows."""
        while not self._answers.empty():
            self._settle(*self._answers.get(), gives_up=False)

    def _settle(self, batch: list[Message], outcome: _Outcome, *, gives_up: bool = True) -> None:
        """Handle one answer. Raises: SinkError if a repetition does not help, or has not helped for
        GIVE_UP_AFTER_S; the messages that were not taken wait then, in their order."""
        self._under_way -= 1
        if isinstance(outcome, errors.ServiceError):
            self._messages.give_back(batch, [False] * len(batch))
            self._note_failure(outcome, gives_up=gives_up)
            return
        codes = sorted({code for code in outcome if code is not None})
        self._messages.give_back(batch, [code is None for code in outcome])
        if None in outcome:
            self._failures, self._failing_since = 0, None
        if codes:
            refused = sum(code is not None for code in outcome)
            text = f"{refused} of {len(batch)} messages were refused: {', '.join(codes)[:200]}"
            self._note_failure(errors.Unavailable(text), gives_up=gives_up)

    def _note_failure(self, error: errors.ServiceError, *, gives_up: bool) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        self._failures += 1
        pause_s = backoff_s(
            self._failures, self._chance(), base_s=_BACKOFF_BASE_S, max_s=_BACKOFF_MAX_S
        )
        self._held_until = now + pause_s
        may_pass = isinstance(error, PASSING_OF_WRITES)
        has_lasted = now - self._failing_since >= GIVE_UP_AFTER_S
        if gives_up and (has_lasted or not may_pass):
            raise self._failed(error)

    def _failed(self, error: errors.ServiceError) -> errors.SinkError:
        waiting = self._messages.count
        left = f" ({waiting} messages wait)" if waiting else ""
        return errors.SinkError(f"cannot send to {self._sender.where}: {error}{left}")


class _Waiting:
    """Messages that are not taken yet, in order per group. `count` and `size_bytes` include those
    under way."""

    def __init__(self) -> None:
        self._loose: collections.deque[Message] = collections.deque()
        self._groups: dict[str, collections.deque[Message]] = {}
        # The groups of which no message is under way, in the order of their turns.
        self._ready: collections.deque[str] = collections.deque()
        self.count = 0
        self.size_bytes = 0

    def add(self, message: Message) -> None:
        self.count += 1
        self.size_bytes += message.size_bytes
        if message.group is None:
            self._loose.append(message)
            return
        group = self._groups.get(message.group)
        if group is None:
            group = self._groups[message.group] = collections.deque()
            self._ready.append(message.group)
        group.append(message)

    def take(self, limits: MessageLimits, *, full_only: bool) -> list[Message]:
        """The next request. A message of a group stays first in its group until `give_back`."""
        available = len(self._loose) + len(self._ready)
        if not available or (full_only and not self._fills(available, limits)):
            return []
        batch: list[Message] = []
        size_bytes = 0
        while len(batch) < limits.batch_messages_max and (self._loose or self._ready):
            message = self._loose[0] if self._loose else self._groups[self._ready[0]][0]
            size_bytes += message.size_bytes
            if batch and size_bytes > limits.batch_bytes_max:
                break
            (self._loose or self._ready).popleft()
            batch.append(message)
        return batch

    def _fills(self, available: int, limits: MessageLimits) -> bool:
        """Whether so many messages fill a request, by their number or at their mean size."""
        mean_bytes, is_full = self.size_bytes / self.count, available >= limits.batch_messages_max
        return is_full or available * mean_bytes >= limits.batch_bytes_max

    def give_back(self, batch: list[Message], taken: Sequence[bool]) -> None:
        """A request was answered: drop the messages that were taken; the rest is sent first."""
        for message, is_taken in zip(reversed(batch), reversed(taken), strict=True):
            if is_taken:
                self.count -= 1
                self.size_bytes -= message.size_bytes
            if message.group is None:
                if not is_taken:
                    self._loose.appendleft(message)
                continue
            group = self._groups[message.group]
            if not is_taken:
                self._ready.appendleft(message.group)
                continue
            group.popleft()
            if group:
                self._ready.append(message.group)
            else:
                del self._groups[message.group]


def _origin(place: OutputDestination, of: RowsOf) -> str:
    """The origin of the rows [K4], without the token: the next owner sends the same rows again."""
    parts = (of.application, of.stream, repr(of.stream_created_at), of.shard_id)
    # A commit of the shard may begin at the position of a letter, and its first row be the same.
    redriven = () if of.letter is None else ("redriven",)
    return "|".join((*parts, str(of.generation), place.name, *redriven))
