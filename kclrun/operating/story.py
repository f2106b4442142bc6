"""The story of a shard: which transitions are recorded, and what they mean in sentences.

Pure. The sentences are here and nowhere else. It knows the events of the log by their names and
fields; it must not know where entries are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kclrun.model.lease import OFFERED, OWNER_PREFIX, Lease, Owner
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.stream import short_name
from kclrun.model.time import Instant, WallTime
from kclrun.operating.summaries import shortened
from kclrun.protocol.reports import DEAD_LETTER, DESTINATIONS

Value = str | int | float | None


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One transition, by the clock of the machine whose manager `owner` is. Without a shard it is
    one of the manager. `missed` counts entries of the shard that were left out before it."""

    at: WallTime
    owner: str
    event: str
    shard: str = ""
    fields: dict[str, Value] = {}
    missed: int = 0


# The events that are recorded, and the fields that are kept of each: no payload, no key, no message
# of user code.
RECORDED: Final[Mapping[str, tuple[str, ...]]] = {
    "manager_started": ("version",),
    "draining": ("reason",),
    "manager_stopped": ("reason",),
    "stop_hurried": ("action",),
    "stop_incomplete": ("leases",),
    "former_owners_gone": ("owners",),
    "lock_file_removed": (),
    "launcher_died": ("status",),
    "launcher_silent": (),
    "service_unreachable": ("operation", "code"),
    "service_back": ("operation", "outage_s"),
    "table_vanished": (),
    "instance_notice": ("reason",),
    "stream_recreated": (),
    "lease_created": ("position",),
    "lease_taken": ("position", "former"),
    "lease_claimed": ("position",),
    "lease_released": ("position",),
    "lease_asked": ("row_owner",),
    "lease_given_for_load": ("row_owner", "reason"),
    "lease_offered": ("position", "target"),
    "lease_passed_on": ("row_owner",),
    "lease_lost": ("owner",),
    "lease_halted": ("reason",),
    "lease_still_halted": ("reason",),
    "lease_paused": ("reason",),
    "lease_resumed": (),
    "children_healed": ("children",),
    "row_vanished": (),
    "row_restored": ("position",),
    "trimmed_row_deleted": (),
    "records_expired": ("position",),
    "shard_ended": ("children",),
    "shard_hot": ("reason",),
    "shard_cooled": (),
    "process_died": ("reason", "deaths"),
    "shared_process_died": ("reason",),
    "process_lost_lease": ("reason",),
    "process_replaced": ("reason",),
    "start_failed": ("reason",),
    "start_unclaimed": ("reason",),
    "process_stalled": ("reason", "waited_s"),
    "process_killed": ("signal",),
    "process_unkillable": (),
    "process_condemned": (),
    "checkpoint_missed": ("position", "checkpoint", "warning"),
    "checkpoint_late": ("checkpoint", "waited_s"),
    "checkpoint_moved": ("checkpoint", "after_s"),
    "reads_throttled": ("seconds",),
    "reads_unthrottled": (),
    "processor_raised": ("where", "error", "raised_at", "attempts"),
    "processor_recovered": ("where", "attempts"),
    "retry_later_began": ("where", "error"),
    "retry_later_ended": ("where", "attempts", "waited_s"),
    "processor_failed": ("where", "error", "raised_at", "attempts"),
    "record_dead_lettered": ("position", "error", "attempts"),
    "record_skipped": ("position", "error", "attempts"),
    "gil_held": ("seconds",),
    "lease_process_warned": ("detail",),
}
# A reason is a sentence of ours, and may end with that of a service or a database. Beyond this it
# explains nothing more, and an entry stays small.
TEXT_CHARACTERS_MAX: Final = 400
# The `where` of failures that are not of user code.
_OURS: Final = DESTINATIONS
_FAILED_OURS: Final = re.compile(
    rf"({'|'.join(sorted(_OURS))}) failed (?:once|\d+ times): (.*)", re.DOTALL
)
_TYPE: Final = re.compile(r"[A-Za-z_][\w.]*(?=:|\Z)")
# A text of `reason_of` (protocol/reports.py): behind the type, if there is one, is a message of
# user code. HaltShard has a message alone.
_OF_USER_CODE: Final = re.compile(
    r"((?:the processor|\w[\w ]{0,40}?) failed (?:once|\d+ times)"
    r"(?:: [A-Za-z_][\w.]*(?=:|\n| \(|\Z))?).*",
    re.DOTALL,
)


def recorded(event: str, fields: Mapping[str, Value]) -> dict[str, Value] | None:
    """The fields of the event to record; None for an event that is not recorded, or that repeats
    the one before.

    Of an exception of user code only its type is kept; the words of an output, of the state or of
    the place of the dead letters are ours. A failure that is repeated for hours is recorded at
    attempts 1, 2, 4, 8, …
    """
    names = RECORDED.get(event)
    if names is None:
        return None
    attempts = fields.get("attempts")
    if event == "processor_raised" and isinstance(attempts, int) and attempts & (attempts - 1):
        return None
    where = fields.get("where")
    return {
        name: _kept(name, fields[name], where) for name in names if fields.get(name) is not None
    }


def _kept(name: str, value: Value, where: Value) -> Value:
    if not isinstance(value, str):
        return value
    if name == "error":
        return _cut(value) if _is_ours(where, value) else _type_of(value)
    failed = _FAILED_OURS.match(value)
    if failed is not None and _is_ours(failed[1], failed[2]):
        return _cut(value)
    return _cut(_OF_USER_CODE.sub(r"\1", value))


def _is_ours(where: Value, error: str) -> bool:
    """Whether the error is in our words. That of a place of dead letters may be an exception."""
    return where in _OURS and (where != DEAD_LETTER or _TYPE.match(error) is None)


def _type_of(error: str) -> str:
    found = _TYPE.match(error)
    return found[0] if found is not None else "an exception"


def _cut(text: str) -> str:
    if len(text) <= TEXT_CHARACTERS_MAX:
        return text
    return f"{text[: TEXT_CHARACTERS_MAX - 1]}…"


# A checkpoint is late after so many intervals without one: one interval passes without a checkpoint
# when a write was not answered and is sent again.
_LATE_INTERVALS: Final = 3
# The least, for short intervals; and the time where the processor checkpoints by itself.
_LATE_MIN_S: Final = 30.0
_LATE_MANUAL_S: Final = 300.0


class NoticedEvent(msgspec.Struct, frozen=True):
    """An event that a watch found, as it is to be recorded."""

    event: str
    fields: dict[str, Value]


class LeaseWatch:
    """Notices, for one lease process, what no event shows: late checkpoints and throttled reads.

    `every_s` is `checkpoint.every`; None where the processor checkpoints by itself."""

    def __init__(self, every_s: float | None) -> None:
        late_s = _LATE_MANUAL_S if every_s is None else _LATE_INTERVALS * every_s
        self._late_s = max(_LATE_MIN_S, late_s)
        self._checkpoint: ExtendedSequenceNumber | None = None
        self._since: Instant | None = None
        self._is_late = self._is_throttled = False

    def look(
        self,
        now: Instant,
        checkpoint: ExtendedSequenceNumber | None,
        throttled: float,
        *,
        has_undone: bool,
    ) -> Iterator[NoticedEvent]:
        """Look at the status of its process. `throttled` is the share of its reads that were."""
        if self._since is None or checkpoint != self._checkpoint or not has_undone:
            if self._is_late and self._since is not None:
                after_s = round(now - self._since, 1)
                yield NoticedEvent(
                    "checkpoint_moved", {"checkpoint": str(checkpoint), "after_s": after_s}
                )
            self._checkpoint, self._since, self._is_late = checkpoint, now, False
        elif not self._is_late and now - self._since >= self._late_s:
            self._is_late = True
            waited_s = round(now - self._since, 1)
            yield NoticedEvent(
                "checkpoint_late", {"checkpoint": str(checkpoint), "waited_s": waited_s}
            )
        if bool(throttled) != self._is_throttled:
            self._is_throttled = bool(throttled)
            yield (
                NoticedEvent("reads_throttled", {"seconds": round(throttled, 3)})
                if throttled
                else NoticedEvent("reads_unthrottled", {})
            )


# The sentences.


class Sentence(msgspec.Struct, frozen=True):
    """One sentence of a story, or several of the same moment."""

    at: WallTime
    text: str


class Story(msgspec.Struct, frozen=True):
    """A story up to its end. `state` is the state of the shard then, in words; `owner` the last
    owner that the entries show."""

    sentences: tuple[Sentence, ...]
    state: str
    owner: str = ""


_SENTENCES: Final[Mapping[str, str]] = {
    "manager_started": "{who} started.",
    "draining": "{who} began to give its leases away: {reason}.",
    "manager_stopped": "{who} ended: {reason}.",
    "stop_hurried": "The stop of {who} was hurried: {action}.",
    "stop_incomplete": "{who} ended before it gave {leases} leases away: they are left to expire.",
    "former_owners_gone": "{who} proved that a former manager of its host is gone.",
    "lock_file_removed": "The lock file of {who} was removed: if it ends, its leases wait for a"
    " failover.",
    "launcher_died": "The launcher of {who}, which forks its lease processes, died.",
    "launcher_silent": "The launcher of {who} did not answer in time, and was killed.",
    "service_unreachable": "{who} got no answer to {operation} ({code}), and tries again.",
    "service_back": "{operation} works again for {who}, after {outage_s} s.",
    "table_vanished": "The lease table was deleted: {who} stopped reading.",
    "instance_notice": "The machine of {who} is about to end: {reason}.",
    "stream_recreated": "The rows are of another stream: {who} stopped reading.",
    "lease_created": "The shard got a lease, to be read from {position}.",
    "lease_released": "{who} released the lease at {position}.",
    "lease_asked": "{who} asked {row_owner} for the lease.",
    "lease_given_for_load": "{who} gives the lease to {row_owner}, which has less load: {reason}.",
    "lease_passed_on": "{who} offered the expired lease of {row_owner} to the others: it has its"
    " share.",
    "lease_halted": "The lease was halted: {reason}. Nothing is read until it is resumed.",
    "lease_still_halted": "It is still halted: {reason}.",
    "lease_paused": "An operator paused the lease: {reason}. It is kept, and not read.",
    "lease_resumed": "The lease was resumed.",
    "children_healed": "{who} created rows of children that were missing: {children}.",
    "row_vanished": "The row was deleted from the lease table while {who} had the lease.",
    "row_restored": "{who} wrote the row again as it was, at {position}.",
    "trimmed_row_deleted": "The shard was trimmed by the stream's retention, and its row deleted.",
    "records_expired": "Records after {position} expired before they were read, and are lost.",
    "shard_hot": "The shard is hot: {reason}.",
    "shard_cooled": "The shard is not hot any more.",
    "shared_process_died": "The process that it shares with other leases died: {reason}.",
    "process_lost_lease": "Its process stopped, because the lease was lost: {reason}.",
    "process_replaced": "Its process stopped, and the next one begins from the checkpoint:"
    " {reason}.",
    "start_failed": "No process could be started for it: {reason}.",
    "start_unclaimed": "A process ended without a claim: {reason}.",
    "process_stalled": "It stood still for {waited_s} s: {reason}. {who} ends its process and"
    " starts another.",
    "process_killed": "Its process was sent {signal}.",
    "process_unkillable": "No signal ends its process: the lease goes on without it.",
    "process_condemned": "Its process wrote invalid data to its manager, and was killed.",
    "checkpoint_late": "No checkpoint for {waited_s} s, though records wait for one: it stands at"
    " {checkpoint}.",
    "checkpoint_moved": "A checkpoint was made at {checkpoint}, after {after_s} s without one.",
    "reads_throttled": "Kinesis throttles reads of the shard: other applications read it, too.",
    "reads_unthrottled": "Reads of the shard are not throttled any more.",
    "retry_later_began": "{where} raised {error}: it gets the same records again later.",
    "retry_later_ended": "{where} raises RetryLater no more, after {attempts} times in"
    " {waited_s} s.",
    "processor_recovered": "{where} returned again, at call {attempts}.",
    "processor_failed": "{where} failed for good at call {attempts}: {error}{place}.",
    "record_dead_lettered": "The record at {position} was kept as a dead letter after {attempts}"
    " calls: {error}.",
    "record_skipped": "The record at {position} was skipped after {attempts} calls: {error}.",
    "gil_held": "User code held the GIL for {seconds} s: no renewal was possible.",
    "lease_process_warned": "{detail}.",
}
# After these the shard is not read, by this owner or any, until the next claim.
_STOPS: Final[Mapping[str, str]] = {
    "lease_released": "had no owner",
    "lease_offered": "was offered and not taken yet",
    "lease_passed_on": "was offered and not taken yet",
    "lease_lost": "was lost by its owner",
    "lease_halted": "was halted",
    "lease_still_halted": "was halted",
    "lease_paused": "was paused",
    "lease_resumed": "was resumed, and not read yet",
    "shard_ended": "had ended",
    "process_died": "had no living process",
    "shared_process_died": "had no living process",
    "process_lost_lease": "had no living process",
    "process_replaced": "had no living process",
    "process_stalled": "stood still",
    "start_failed": "had no living process",
}
_UNKNOWN: Final = "?"


def story_of(shard: str, entries: Iterable[Entry], until: WallTime | None = None) -> Story:
    """The story of a shard, from entries of any managers in any order, up to `until`.

    An entry of a manager is a part of it while that manager has the lease. Times of different
    machines are by their own clocks."""
    writer = _StoryWriter(shard)
    for entry in sorted(entries, key=lambda entry: entry.at):
        if until is not None and entry.at > until:
            break
        writer.take(entry)
    return writer.story()


def finished_words(children: Iterable[str] = ()) -> str:
    """That a shard was read to its end, and which shards came after it."""
    after = " and ".join(map(short_name, children))
    return f"finished: the shard was read to its end{f'; after it came {after}' if after else ''}."


def present(lease: Lease, story: Story) -> Iterator[str]:
    """The present state by the row, and whether the story shows how its owner got the lease."""
    place = shortened(str(lease.checkpoint))
    if lease.is_ended:
        yield f"Now: {finished_words(sorted(lease.children))}"
        return
    if lease.halt is not None:
        yield f"Now: halted at {place}, by {who(lease.owner)}: {lease.halt.reason}"
    elif lease.owner is None:
        yield f"Now: at {place}, without an owner."
    elif lease.owner == OFFERED:
        yield f"Now: at {place}, offered by {who(lease.offered_by)}."
    else:
        yield f"Now: at {place}, owned by {who(lease.owner)}."
    if lease.owner not in (None, OFFERED, story.owner):
        yield (
            f"Nothing is recorded here of how {who(lease.owner)} got it: name the story of that"
            " machine with --story, or keep all in S3 (observe.story)."
        )


def who(owner: str | None) -> str:
    """An owner in short: its host and the first digits of its manager's start."""
    if not owner:
        return "an unknown owner"
    parsed = Owner.parse(owner)
    if parsed is None:
        return f"the worker {owner}"
    host = parsed.slot.rpartition("-")[0] or parsed.slot
    return f"{host}/{parsed.nonce[:4]}"


class _StoryWriter:
    """Takes entries in the order of their times."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._sentences: list[Sentence] = []
        self._owner = ""
        self._state = "was not known here"
        self._stopped_at: WallTime | None = None
        self._last_of: dict[str, Entry] = {}
        self._raised: list[Entry] = []
        self._gone: set[str] = set()

    def take(self, entry: Entry) -> None:
        if entry.event == "former_owners_gone":
            self._gone.update(str(entry.fields.get("owners", "")).split(", "))
        is_ours = entry.shard == self._shard or (not entry.shard and entry.owner == self._owner)
        if not is_ours:
            self._last_of[entry.owner] = entry
            return
        if entry.event == "processor_raised":
            self._raise(entry)
        else:
            self._flush()
            self._add(entry)
        self._note(entry)
        self._last_of[entry.owner] = entry

    def story(self) -> Story:
        self._flush()
        return Story(tuple(self._sentences), f"the shard {self._state}", self._owner)

    def _add(self, entry: Entry) -> None:
        sentence = _WITH_CAUSE.get(entry.event)
        text = sentence(self, entry) if sentence is not None else None
        template = _SENTENCES.get(entry.event)
        if text is None and template is not None:
            text = template.format_map(_FieldTexts(entry))
        if text is None:
            return
        missed = f" ({entry.missed} entries before it were left out.)" if entry.missed else ""
        self._sentences.append(Sentence(entry.at, text + missed))

    def _note(self, entry: Entry) -> None:
        """Keep the state that the entry leaves the shard in."""
        if not entry.shard:
            return
        stop = _STOPS.get(entry.event)
        if entry.event == "lease_taken":
            # An owner that was lost has not recorded since when the shard was not read.
            self._owner, self._state = entry.owner, f"was taken by {who(entry.owner)}, not read yet"
        elif entry.event == "lease_claimed":
            self._owner, self._stopped_at = entry.owner, None
            self._state = f"was read by {who(entry.owner)}"
        elif entry.event in {"processor_raised", "processor_failed"}:
            self._state = f"was read by {who(entry.owner)}, whose user code raised"
        elif entry.event == "processor_recovered":
            self._state = f"was read by {who(entry.owner)}"
        elif stop is not None and entry.owner == (self._owner or entry.owner):
            self._state = stop
            self._stopped_at = self._stopped_at or entry.at

    # Exceptions of user code: repetitions are one sentence.

    def _raise(self, entry: Entry) -> None:
        if self._raised and _raised_as(self._raised[-1]) != _raised_as(entry):
            self._flush()
        self._raised.append(entry)

    def _flush(self) -> None:
        if not self._raised:
            return
        first, last = self._raised[0], self._raised[-1]
        self._raised = []
        shown = _FieldTexts(first)
        text = f"{shown['where']} raised {shown['error']}{shown['place']}"
        if first is last:
            text += "; the call is repeated."
        else:
            attempts = last.fields.get("attempts")
            text += f", at least {attempts} times in {last.at - first.at:.1f} s."
        self._sentences.append(Sentence(first.at, text))

    # Sentences with a cause from earlier entries.

    def taken(self, entry: Entry) -> str:
        former, me = entry.fields.get("former"), who(entry.owner)
        if not former:
            return f"{me} took the lease, which had no owner."
        if former == OFFERED:
            gap = self._gap(entry)
            return f"{me} took the offered lease{gap}."
        former = str(former)
        if former == entry.owner:
            return f"{me} took its lease again."
        if not former.startswith(OWNER_PREFIX):
            return f"{me} took the lease from {who(former)}, of the Java KCL."
        if former in self._gone:
            return f"{me} took the lease of {who(former)}, a manager of the same host that is gone."
        last = self._last_of.get(former)
        evidence = "" if last is None else f"; the last it recorded was {entry.at - last.at:.1f} s"
        evidence += " before" if evidence else ""
        return (
            f"{me} took the lease of {who(former)}, which had not renewed it for a failover: its"
            f" machine was lost, stood still, or could not reach the lease table{evidence}."
        )

    def claimed(self, entry: Entry) -> str:
        position = _FieldTexts(entry)["position"]
        return f"{who(entry.owner)} began to read after {position}{self._unread(entry)}."

    def offered(self, entry: Entry) -> str:
        target = entry.fields.get("target")
        meant = f", for {who(str(target))}" if target and target != "*" else ""
        return f"{who(entry.owner)} gave the lease away at {_FieldTexts(entry)['position']}{meant}."

    def lost(self, entry: Entry) -> str:
        now = entry.fields.get("owner")
        names = f"its row names {who(str(now))}" if now else "its row names no owner"
        return f"{who(entry.owner)} lost the lease: {names}."

    def died(self, entry: Entry) -> str:
        deaths = entry.fields.get("deaths")
        row = f", {deaths} times in a row" if isinstance(deaths, int) and deaths > 1 else ""
        return (
            f"Its process died{row}: {_FieldTexts(entry)['reason']}."
            f" {who(entry.owner)} starts another."
        )

    def missed(self, entry: Entry) -> str:
        shown, warning = _FieldTexts(entry), entry.fields.get("warning")
        because = f" The last warning before: {str(warning).rstrip('.')}." if warning else ""
        return (
            f"{shown['who']} stopped before it could checkpoint {shown['position']}: what came"
            f" after {shown['checkpoint']} is read again.{because}"
        )

    def ended(self, entry: Entry) -> str:
        children = [child for child in str(entry.fields.get("children") or "").split(", ") if child]
        if not children:
            return "The shard was read to its end, or to that of a time range."
        how = "It was split into" if len(children) > 1 else "It was merged into"
        return f"The shard was read to its end. {how} {' and '.join(map(short_name, children))}."

    def _gap(self, entry: Entry) -> str:
        since = self._stopped_at
        return "" if since is None else f", {entry.at - since:.1f} s after that"

    def _unread(self, entry: Entry) -> str:
        since = self._stopped_at
        return "" if since is None else f"; it was not read for {entry.at - since:.1f} s"


_WITH_CAUSE: Final[Mapping[str, Callable[[_StoryWriter, Entry], str]]] = {
    "lease_taken": _StoryWriter.taken,
    "lease_claimed": _StoryWriter.claimed,
    "lease_offered": _StoryWriter.offered,
    "lease_lost": _StoryWriter.lost,
    "process_died": _StoryWriter.died,
    "shard_ended": _StoryWriter.ended,
    "checkpoint_missed": _StoryWriter.missed,
}


class _FieldTexts(dict[str, str]):
    """The fields of an entry as a sentence shows them; `?` for one that is missing: an entry may be
    of another version."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(who=who(entry.owner))
        for name, value in entry.fields.items():
            self[name] = _field(name, value)
        self["place"] = f" ({self['raised_at']})" if entry.fields.get("raised_at") else ""

    def __missing__(self, name: str) -> str:
        return _UNKNOWN


def _field(name: str, value: Value) -> str:
    if name == "row_owner":
        return who(str(value))
    if name in {"position", "checkpoint"}:
        return shortened(str(value))
    return f"{value:g}" if isinstance(value, float) else str(value).rstrip(".")


def _raised_as(entry: Entry) -> tuple[Value, Value]:
    return entry.fields.get("where"), entry.fields.get("error")
