"""Keeps the table complete and clean: creates missing leases and deletes rows that are not needed.

Knows: the last view and the last listing of one stream. Must not know: which owner processes a
shard. Every manager does this, and no leader is needed: every write here is conditional and
harmless to repeat. A write that does not apply is decided again after the next scan or listing.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases import cleanup, shard_sync
from kclrun.leases.commands import Command, DescribeStream, Note, WriteRow
from kclrun.leases.events import LeasesScanned, ShardsListed, StreamDescribed, WriteResolved
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.stream_rows import near_misses
from kclrun.leases.table_view import TableView, covers_all_hash_keys
from kclrun.model.lease import (
    CHILDREN_EXPIRED,
    Lease,
    LeaseKey,
    are_children_lost,
    highest_generation,
    pause_of_stream,
)
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange, Shard
from kclrun.model.stream import ONLY_STREAM, StreamKey, stream_name_of, stream_of
from kclrun.model.time import Instant, WallTime, utc_text
from kclrun.protocol import writes
from kclrun.protocol.trimming import LISTING_LAG_MAX_S

_KEYS_SHOWN_MAX: Final = 5
# After a reshard of thousands of shards, so many rows may go at once, and each manager that scans
# before they are gone deletes them. The 16 scans a second of the largest fleet (`policy.py`) then
# send 1,600 deletions, and a new on-demand table takes 4,000 writes: renewals are not throttled.
_DELETIONS_AT_ONCE_MAX: Final = 100
# To delete a stream and to create it again takes tens of seconds in all.
_VOUCHED_FOR_S: Final = 5.0

HOW_TO_GO_ON: Final = (
    "stop every manager of this application; name another table (leases.table), or delete this one"
    " (aws dynamodb delete-table); start again. Every shard then begins at `start`: TRIM_HORIZON"
    " reads the new stream from its first record"
)


def rows_of_another_stream(leases: Iterable[Lease], created_at: WallTime) -> Iterator[Lease]:
    """The rows whose creation time differs from the one that the service reports.

    Times are compared in whole milliseconds: the service and the rows use this unit.
    """
    created_ms = _ms(created_at)
    # Equal is the usual case, for each row of each scan.
    for lease in [lease for lease in leases if lease.stream_created_at != created_at]:
        theirs = lease.stream_created_at
        if theirs is not None and _ms(theirs) != created_ms:
            yield lease


def why_another_stream(
    leases: Iterable[Lease], created_at: WallTime, *, table: str = ""
) -> str | None:
    """Why these rows belong to another stream than the one created then, in words; else None."""
    for lease in rows_of_another_stream(leases, created_at):
        if lease.stream_created_at is not None:
            return _words(lease.stream_created_at, created_at, f" {table}" if table else "")
    return None


class StreamWatch:
    """Notices that a stream was deleted and made again under its name, and refuses it [P13].

    One instance for each stream. `created_at` is the creation time that the service reported at the
    start; None: the service was not asked, and nothing is compared. `described_instant` is when the
    service was asked; None: not known.

    The shards of the new stream have the names of the old ones and other sequence numbers, so the
    checkpoints of the rows mean nothing in it. An ended row would leave a new shard unread, and a
    sequence number is refused for ever.

    - Each row carries its stream's creation time (`streamCreatedAt`), written at creation and take.
      A row whose time differs from the service's is the proof, at the start and at every scan. Rows
      of Java workers have no time until we take them, and prove nothing.
    - While a manager runs, a listing can show it: a shard starts at another sequence number than
      before, or an open shard is gone. A resharded stream shows neither, but a lagging listing may
      show the second. So this is only a reason to ask the service for the creation time; from such
      a listing nothing is created and nothing deleted.
    - At the first listing the service is asked, too, because the stream may have been made again
      since the start described it. The listing itself is trusted. The service is not asked if the
      start described the stream seconds ago: to delete a stream and to make one takes longer, and
      1,000 managers that start together would send twice the requests that an account is served,
      while others wait for the answer to their first.
    - Where no row carries a time, a checkpoint below the first sequence number of its shard, or
      SHARD_END on a shard that stays open, is logged as an error. It stops nothing.

    A manager that has the proof stops. It gives its leases up in order, with the position that they
    processed in the old stream, and ends with exit code 78. Reading on would mix two streams under
    one checkpoint. Holding the rows without reading them would only hide the problem.
    """

    def __init__(
        self,
        stream: StreamKey,
        created_at: WallTime | None,
        described_instant: Instant | None = None,
    ) -> None:
        self._stream = stream
        self._described_instant = described_instant
        self._created_at = created_at
        self._open_and_ended_since: dict[str, Instant] = {}
        self._doubted: tuple[Shard, ...] | None = None
        self._vouched: tuple[Shard, ...] | None = None

    def why_rows_are_refused(self, leases: Iterable[Lease]) -> str | None:
        """Judge the rows of a scan: why they are refused, or None."""
        if self._created_at is None:
            return None
        return why_another_stream(leases, self._created_at)

    def asks_at_first(self, before: shard_sync.Listing | None, listing: shard_sync.Listing) -> bool:
        """Whether to ask the service for the creation time although nothing is wrong."""
        if self._created_at is None or not listing.shards or (before and before.shards):
            return False
        described = self._described_instant
        return described is None or listing.seen_instant - described >= _VOUCHED_FOR_S

    def doubts(self, before: shard_sync.Listing | None, listing: shard_sync.Listing) -> bool:
        """Whether this listing must not be used before the service was asked. A listing with the
        same shards as the one for which the service confirmed the stream is believed."""
        self._doubted = None
        if self._created_at is None or before is None or before.shards == listing.shards:
            return False
        if not listing.shards or listing.shards == self._vouched:
            return False
        if _contradicts(before, listing):
            self._doubted = listing.shards
        return self._doubted is not None

    def why_stream_is_refused(self, created_at: WallTime) -> str | None:
        """Judge the reported creation time: why the stream is refused, or None."""
        mine = self._created_at
        if mine is None or _ms(mine) == _ms(created_at):
            self._vouched, self._doubted = self._doubted or self._vouched, None
            return None
        if self._stream == ONLY_STREAM:
            return _words(mine, created_at, "", has_seen=True)
        was, now = (utc_text(at, "milliseconds") for at in (mine, created_at))
        return (
            f"stream {stream_name_of(self._stream)} was deleted and made again while we ran: it was"
            f" created at {was}, and now at {now}. To go on: start again; among several streams"
            " leases are named by the creation time, so the new one begins at `start`"
        )

    def misfits(self, leases: Iterable[Lease], listing: shard_sync.Listing) -> tuple[str, ...]:
        """Signs of rows of another stream, in words, whether rows carry a time or not."""
        found: list[str] = []
        ended_since = self._open_and_ended_since
        self._open_and_ended_since = {}
        for lease in leases:
            shard = listing.graph.get(lease.key)
            if shard is None:
                continue
            if lease.is_ended and shard.is_open:
                since = ended_since.get(lease.key, listing.seen_instant)
                self._open_and_ended_since[lease.key] = since
                if listing.seen_instant - since >= LISTING_LAG_MAX_S:
                    found.append(f"{lease.key} is at SHARD_END, and its shard is open")
            elif not lease.checkpoint.is_sentinel and lease.checkpoint < _position(
                shard.starting_sequence_number
            ):
                found.append(f"{lease.key} is at a checkpoint before its shard begins")
        return tuple(found[:_KEYS_SHOWN_MAX])


# As many as the largest fleet has shards: each listing compares all of them.
@functools.lru_cache(maxsize=16_384)
def _position(number: str) -> ExtendedSequenceNumber:
    return ExtendedSequenceNumber(number)


def _contradicts(before: shard_sync.Listing, listing: shard_sync.Listing) -> bool:
    for shard in before.shards:
        now = listing.graph.get(shard.shard_id)
        if now is None and shard.is_open:
            return True
        if now is not None and now.starting_sequence_number != shard.starting_sequence_number:
            return True
    return False


def _ms(at: WallTime) -> int:
    return round(at * 1000)


def _words(theirs: WallTime, now: WallTime, table: str, *, has_seen: bool = False) -> str:
    """What the two creation times show. `has_seen`: one manager saw the same name change its
    time. Else the rows may be of a stream with another name: they do not carry it."""
    made, made_again = (utc_text(at, "milliseconds") for at in (theirs, now))
    why, back = "", ""
    if has_seen:
        why = " It was deleted and made again under its name."
    elif theirs < now:
        why = (
            " Either the application read another stream before, or this one was deleted and made"
            " again under its name."
        )
        back = ". If the other stream is meant, name it in the settings instead"
    else:
        why = " The application read another stream before, which was created after this one."
        back = ". If the other stream is meant, name it in the settings instead"
    return (
        f"the lease table{table} has rows of a stream that was created at {made}, and the stream"
        f" that is read was created at {made_again}.{why} Their checkpoints mean nothing in it, so"
        f" nothing is read\nTo go on: {HOW_TO_GO_ON}{back}"
    )


class _Changes:
    """Log lines that are written once for each change of their value. `always`: the last fields of
    every line."""

    def __init__(self, always: Mapping[str, str | float] = MappingProxyType({})) -> None:
        self._always = always
        self._last: dict[str, object] = {}

    def note(
        self, event: str, value: object, *, level: str = "warning", **fields: str | float
    ) -> list[Command]:
        """A false value is the healthy state, which is not logged."""
        if self._last.get(event) == (value or None):
            return []
        self._last[event] = value or None
        if not value:
            return []
        what = value if isinstance(value, int) else str(value)
        return [Note(event, level, fields={"what": what, **fields, **self._always})]


class Auditor:
    """Creates and deletes the rows of one stream. One instance for each stream; it knows the rows
    of its own stream alone. `Audits` holds the instances.

    `held` are the leases that this manager holds. The auditor does not write their rows.

    Java workers beside us elect the leader of their shard sync by a shuffle of *all* owners, ours
    included. When it falls on one of ours, none of them syncs [R6]. So every manager does all that
    a Java 2.x leader does: the first sync of an empty table, and after every listing the leases
    that a hole in the hash range calls for (there after three looks two minutes apart). One duty of
    that leader is left out, because it is not needed: it writes hash ranges onto rows that lack
    them, which only its own search for holes reads. Ours takes the ranges from the listing. Cleanup
    is not a duty of the leader there: each worker deletes the rows of shards that it ended. Here
    all managers do, by `shard_sync.py`.
    """

    def __init__(
        self, policy: ManagerPolicy, held: Collection[LeaseKey], stream: StreamKey = ONLY_STREAM
    ) -> None:
        self.listing: shard_sync.Listing | None = None
        self.under_way: dict[LeaseKey, writes.LeaseChange] = {}
        self.should_list_soon = False
        self.problem: str | None = None  # why the last listing created no lease
        self._policy = policy
        self._held = held
        self._stream = stream
        self._trims = cleanup.TrimWatch(policy.failover_s)
        self._ends = cleanup.EndWatch(max(policy.failover_s, policy.ended_rows_stay_s))
        self._reported_expired: set[LeaseKey] = set()
        self._created_at = policy.created.get(stream)
        self.stream_watch = StreamWatch(stream, self._created_at, policy.described_instant)
        self._recent = shard_sync.RecentRows(policy.failover_s)
        self._has_seen_rows = False
        self._whole: list[HashRange] = []  # the last ranges that covered all hash keys
        self._changes = _Changes({"stream": stream_name_of(stream)} if stream else {})

    def needs_listing(self, view: TableView) -> bool:
        """Whether the scan calls for a listing now, even if other managers list, too [P10]."""
        return view.is_empty or view.lacks_children() or self._has_hole(view)

    def _has_hole(self, view: TableView) -> bool:
        """As `TableView.has_hole`. Shards seldom change: the same ranges are not judged again."""
        listing = self.listing
        ranges = view.hash_ranges(lambda key: listing.range_of(key) if listing else None)
        if ranges == self._whole:
            return False
        self._whole = ranges if covers_all_hash_keys(ranges) else []
        return not self._whole

    def after_scan(
        self, view: TableView, reasons: Mapping[str, str] = MappingProxyType({})
    ) -> list[Command]:
        """Log rows that cannot be read, with the reasons; delete ended rows that are not needed
        [P8, P13]."""
        self._has_seen_rows = self._has_seen_rows or not view.is_empty
        self._recent.update(view)
        broken = sorted(view.broken)[:10]
        why = "; ".join(f"{key}: {reasons[key]}" for key in broken if key in reasons)
        commands = self._changes.note(
            "rows_broken",
            len(view.broken),
            level="error",
            keys=", ".join(broken),
            **({"reason": why} if why else {}),
        )
        if self._policy.cleanup:
            ended = self._ends.deletable(view, self.listing)
            commands += self._write(ended[:_DELETIONS_AT_ONCE_MAX])
        return commands

    def after_listing(self, event: ShardsListed, view: TableView, now: Instant) -> list[Command]:
        """Create missing rows; delete the rows of trimmed shards. `view` is the scan before."""
        before = self.listing
        if before is not None and before.shards and not event.shards:
            # A stream always has shards, but a new one under the same name may look empty for a
            # moment. Compared with an empty listing, the new shards would contradict nothing [P13].
            return []
        if before is not None and before.shards == event.shards:
            listing = before.seen_again(event.listed_at, now)
        else:
            listing = shard_sync.Listing(event.shards, event.listed_at, now)
        is_doubted = self.stream_watch.doubts(before, listing)
        commands: list[Command] = []
        if is_doubted or self.stream_watch.asks_at_first(before, listing):
            commands.append(DescribeStream(self._stream))
        if is_doubted:
            return commands
        self.listing = listing
        misfits = self.stream_watch.misfits(view.rows.values(), listing)
        suspected = "; ".join(misfits)
        commands += self._changes.note("stream_recreation_suspected", suspected, level="error")
        plan = self._plan(event, view, listing)
        is_first_sync = event.at_start is not None and not self._has_seen_rows
        self.should_list_soon = is_first_sync and not plan.leases
        self.problem = plan.problem
        commands += self._changes.note("shard_sync_refused", plan.problem)
        # Children of shards with a row first: they are read from their beginning, whatever
        # `start` says.
        for created in (
            () if self._policy.is_bounded else shard_sync.children_to_create(view, listing)
        ):
            children = tuple(map(self._of_this_stream, created.children))
            commands += self._write((writes.CreateChildren(children, created.parents),))
        commands += self._write(
            writes.CreateLease(self._of_this_stream(lease)) for lease in plan.leases
        )
        self._trims.update(view, listing)
        if self._policy.cleanup:
            # One sync period: the expected time between two listings of this manager [P10].
            period_s = self._policy.scan_every_s * max(1.0, len(view.kclrun_owners) / 2)
            trimmed = self._trims.trimmed_rows(
                view, listing, two_periods_s=2 * period_s, held=self._held
            )
            self._reported_expired.intersection_update(view.rows)
            for change in islice(trimmed, _DELETIONS_AT_ONCE_MAX):
                # Before the write: its answer may be lost, or this manager may end before it
                # comes.
                commands += self._log_expired(view.rows[change.key])
                commands += self._write((change,))
        return commands

    def not_synced(self, view: TableView) -> tuple[str, ...]:
        """Why shards of this stream may have no lease yet, in words."""
        name = stream_name_of(self._stream)
        of_stream = f"stream {name}" if name else "the stream"
        if self.listing is not None and not self.listing.shards and view.is_empty:
            return ()  # a complete listing shows nothing to read
        if self.listing is None or self.problem is not None:
            return (f"the leases of {of_stream} are not known: {self.problem or 'no listing'}",)
        if view.is_empty:
            return (f"{of_stream} has no lease yet",)
        if self._policy.is_bounded:
            return ()  # shards outside of the time range have none
        missing = shard_sync.shards_without_lease(self.listing, view)
        return tuple(f"{shard} has no lease yet" for shard in missing)

    def resolved(self, event: WriteResolved) -> tuple[list[Command], bool]:
        """Take in an outcome. Also returns True once all rows that were being created can be taken.

        A creation that was refused or put off is decided again with the next scan. It does not
        cause a scan of its own: with a missing permission we would scan four times a second.

        An unknown outcome needs no reading back. The next scan shows the row or not, and the
        condition protects the row if the write arrives late.
        """
        for key in writes.keys_of(event.change):
            if self.under_way.pop(key, None) != event.change:
                raise InvariantViolation(f"lease {key}: an outcome of no write under way")
        commands: list[Command] = []
        if isinstance(event.outcome, writes.Applied):
            commands = self._note_write(event.change)
        elif isinstance(event.outcome, writes.Refused):
            code, message = event.outcome.code, event.outcome.message
            commands = self._changes.note("audit_refused", code, level="error", message=message)
        if isinstance(event.outcome, writes.Refused | writes.Throttled | writes.Unavailable):
            return commands, False
        has_created = isinstance(event.change, writes.CreateLease | writes.CreateChildren)
        return commands, has_created and not self.is_creating

    def _of_this_stream(self, lease: Lease) -> Lease:
        """A new row, with the stream's creation time on it [P13]."""
        return msgspec.structs.replace(lease, stream_created_at=self._created_at)

    @property
    def is_creating(self) -> bool:
        return any(
            isinstance(c, writes.CreateLease | writes.CreateChildren)
            for c in self.under_way.values()
        )

    def _plan(
        self, event: ShardsListed, view: TableView, listing: shard_sync.Listing
    ) -> shard_sync.SyncPlan:
        if not view.is_empty:
            older = listing.contradiction(view.rows.values())
            if older is not None:
                return shard_sync.SyncPlan(problem=f"the listing is older than the table: {older}")
            return shard_sync.sync_table(
                listing,
                lambda key: self._has_row(key, view),
                self._policy.start,
                highest_generation(view.rows.values()),
                pause_of_stream(view.rows.values()),
            )
        if self._has_seen_rows:
            return shard_sync.SyncPlan(
                problem=f"the lease table lost all {self._its_rows} while we were running; no"
                " position is guessed: restore the table, or restart kclrun to begin at the start"
                " position"
            )
        if event.at_start is None or listing.missing_parent is not None:
            return shard_sync.SyncPlan(problem=listing.missing_parent)
        return shard_sync.sync_empty_table(event.at_start, self._policy.start, event.listed_at)

    def _has_row(self, key: str, view: TableView) -> bool:
        """Whether the row is there, or was within a failover: its live owner may write it again."""
        return view.has_row(key) or self._recent.had(key)

    @property
    def _its_rows(self) -> str:
        name = stream_name_of(self._stream)
        return f"rows of stream {name}" if name else "its rows"

    def _write(self, changes: Iterable[writes.LeaseChange]) -> list[Command]:
        """Send the changes of rows that are not held here and have no write under way."""
        commands: list[Command] = []
        for change in changes:
            keys = writes.keys_of(change)
            if any(key in self.under_way or key in self._held for key in keys):
                continue
            self.under_way.update(dict.fromkeys(keys, change))
            commands.append(WriteRow(change))
        return commands

    def _note_write(self, change: writes.LeaseChange) -> list[Command]:
        """Log creations and trims: they are rare. Deletions of ended rows are not logged."""
        keys = writes.keys_of(change)
        if isinstance(change, writes.CreateLease):
            position = str(change.lease.checkpoint)
            return [Note("lease_created", key=keys[0], fields={"position": position})]
        if isinstance(change, writes.CreateChildren):
            parent, children = change.parents[0].key, ", ".join(keys)
            return [Note("children_healed", "warning", parent, {"children": children})]
        if isinstance(change, writes.DeleteTrimmed):
            return [Note("trimmed_row_deleted", "warning", keys[0])]
        return []

    def _log_expired(self, row: Lease) -> list[Command]:
        """Log the loss of records: the shard of an unended row is gone and the lease had no owner.
        A lease process would log the same. Logged once for each manager [P13]."""
        if row.is_ended or row.key in self._reported_expired:
            return []
        self._reported_expired.add(row.key)
        position = str(row.checkpoint)
        detail = (
            "no owner held the lease, the stream's retention passed, and Kinesis has deleted the"
            f" shard: what it held after checkpoint {position} is lost, unless it was read to"
            " its end. Its row is deleted, and its children are read. To get the records back,"
            " replay them from their source"
        )
        if self._has_lost_children(row):
            detail = f"{detail}. {CHILDREN_EXPIRED}"
        fields = {"position": position, "detail": detail}
        return [Note("records_expired", "error", row.key, {**fields})]

    def _has_lost_children(self, row: Lease) -> bool:
        listing = self.listing
        if listing is None:
            return False
        ranges = [listing.range_of(LeaseKey(key)) for key in listing.children_named(row.key)]
        return are_children_lost(
            row.hash_range, [hash_range for hash_range in ranges if hash_range is not None]
        )


class ConfigDrift:
    """Logs where the settings of this manager and the rows disagree: once, until it changes.

    Live owners must have one `failover` [P9] and, for each stream, one `start`. Rows of streams
    that this application does not read are the work of another application: they are left alone.
    They are named once, because a stream that was taken out of the configuration may have left them
    behind.
    """

    def __init__(self, policy: ManagerPolicy) -> None:
        self._policy = policy
        self._changes = _Changes()

    def after_scan(self, view: TableView) -> list[Command]:
        """Compare what live owners have published with ours [P9]."""
        me, others = self._policy.me, view.kclrun_owners
        expired, are_many = view.expired, len(self._policy.streams) > 1
        failover_s = self._policy.failover_s
        start = self._policy.of_stream(self._policy.streams[0]).start_text
        published = {
            (lease.failover_s, lease.start, stream_of(lease.key) if are_many else ONLY_STREAM)
            # Our own settings on a row are no difference; that is the usual case.
            for lease in [
                lease
                for lease in view.unended
                if lease.start != start or lease.failover_s != failover_s or are_many
            ]
            if lease.owner in others and lease.owner != me and lease.key not in expired
        }
        failovers = {failover_s for failover_s, _, _ in published if failover_s}
        failovers -= {failover_s}
        starts = set()
        for _, theirs, stream in published:
            ours = self._policy.of_stream(stream if are_many else self._policy.streams[0])
            if theirs is not None and theirs != ours.start_text:
                starts.add((ours.start_text, theirs))
        drifted = self._changes.note(
            "failover_differs",
            sorted(failovers),
            ours_s=failover_s,
            theirs_s=", ".join(f"{failover_s:g}" for failover_s in sorted(failovers)),
        )
        return drifted + self._changes.note(
            "start_differs",
            sorted({theirs for _, theirs in starts}),
            ours=", ".join(sorted({ours for ours, _ in starts})),
            theirs=", ".join(sorted({theirs for _, theirs in starts})),
        )

    def other_streams(self, keys: Iterable[str]) -> list[Command]:
        """Name rows of streams that are not ours to read."""
        strange = sorted(keys)
        names = sorted({stream_name_of(stream_of(key)) or "(none)" for key in strange})
        near = near_misses(self._policy.streams, map(stream_of, strange))
        more = {"reason": "; ".join(sorted(near.values()))} if near else {}
        return self._changes.note(
            "rows_of_other_streams",
            names,
            stream=", ".join(names),
            keys=", ".join(strange[:_KEYS_SHOWN_MAX]),
            **more,
        )


class Audits:
    """The `Auditor` of each stream of the application, and their results together. One instance for
    each manager. `held` are the leases that this manager holds.

    Each auditor sees the rows of its own stream alone. An empty table, a hole, a waiting merge and
    trimmed shards concern one stream, and a stream that is added to a running application begins
    like one with an empty table.
    """

    def __init__(self, policy: ManagerPolicy, held: Collection[LeaseKey]) -> None:
        self._auditors: Mapping[StreamKey, Auditor] = {
            stream: Auditor(policy.of_stream(stream), held, stream) for stream in policy.streams
        }
        self._held = held
        self._views: Mapping[StreamKey, TableView] = {}
        self._synced: set[StreamKey] = set()
        self._reasons: Mapping[str, str] = {}
        self._config_drift = ConfigDrift(policy)

    def of_ours(self, event: LeasesScanned) -> tuple[LeasesScanned, list[Command]]:
        """The scan without the rows of streams that we do not read."""
        has_plain = ONLY_STREAM in self._auditors
        # A bare key needs no look at its stream; that is the usual case.
        keys = [lease.key for lease in event.leases if not has_plain or ":" in lease.key]
        strange = {key for key in (*keys, *event.broken) if not self.is_ours(key)}
        self._reasons = event.reasons
        if not strange:
            return event, self._config_drift.other_streams(())
        leases = tuple(lease for lease in event.leases if lease.key not in strange)
        broken = tuple(key for key in event.broken if key not in strange)
        ours = LeasesScanned(leases, broken, event.foreign, event.kcl3_mode, event.reasons)
        return ours, self._config_drift.other_streams(strange)

    def is_ours(self, key: str) -> bool:
        """Whether this lease is of a stream that we read."""
        return stream_of(key) in self._auditors

    def see(self, view: TableView) -> str | None:
        """Keep the view for the clean-up, the listings and the counts that follow. Returns why its
        rows are of another stream under the same name [P13]."""
        self._views = view.by_stream(self._auditors.keys())
        judged = (
            auditor.stream_watch.why_rows_are_refused(self._views[stream].rows.values())
            for stream, auditor in self._auditors.items()
        )
        return next((why for why in judged if why is not None), None)

    def why_stream_is_refused(self, event: StreamDescribed) -> str | None:
        """Why a stream is not the one that it was at our start [P13]."""
        return self._auditors[event.stream].stream_watch.why_stream_is_refused(event.created_at)

    def after_scan(self, view: TableView) -> list[Command]:
        """Clean up, stream by stream; compare settings with rows. Call after `see`."""
        commands: list[Command] = []
        for stream, auditor in self._auditors.items():
            commands += auditor.after_scan(self._views[stream], self._reasons)
        return commands + self._config_drift.after_scan(view)

    def empty_streams(self) -> frozenset[StreamKey]:
        """The streams of which the last scan showed no row."""
        return frozenset(stream for stream, view in self._views.items() if view.is_empty)

    def needs_listing(self, stream: StreamKey) -> bool:
        """Whether the last scan calls for a listing of this stream now [P10]."""
        return self._auditors[stream].needs_listing(self._views[stream])

    def after_listing(self, event: ShardsListed, now: Instant) -> tuple[list[Command], bool]:
        """Create missing rows, delete trimmed ones. Also returns True to list again soon."""
        auditor = self._auditors[event.stream]
        commands = auditor.after_listing(event, self._views[event.stream], now)
        if auditor.listing is not None:
            self._synced.add(event.stream)
        return commands, auditor.should_list_soon

    def not_synced(self) -> tuple[str, ...]:
        """Why shards may have no lease yet, by the last scan and listings; one line for each."""
        streams = self._auditors.items()
        lines = [auditor.not_synced(self._views[stream]) for stream, auditor in streams]
        return tuple(chain.from_iterable(lines))

    def resolved(self, event: WriteResolved) -> tuple[list[Command], bool]:
        """Take in an outcome. Also returns True once all rows that were being created can be
        taken."""
        stream = stream_of(writes.keys_of(event.change)[0])
        commands, has_created = self._auditors[stream].resolved(event)
        return commands, has_created and not self.is_creating

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether a write of ours to this row is under way."""
        auditor = self._auditors.get(stream_of(key))
        return auditor is not None and key in auditor.under_way

    def keys_under_way(self) -> Iterator[LeaseKey]:
        """The rows with a write of ours under way."""
        return chain.from_iterable(auditor.under_way for auditor in self._auditors.values())

    @property
    def has_writes_under_way(self) -> bool:
        return any(auditor.under_way for auditor in self._auditors.values())

    @property
    def is_creating(self) -> bool:
        return any(auditor.is_creating for auditor in self._auditors.values())

    @property
    def have_synced(self) -> bool:
        """Whether every stream was listed at least once."""
        return len(self._synced) == len(self._auditors)

    def totals(self) -> shard_sync.TableTotals:
        """The counts of the last scan and the last listings, over all streams."""
        return shard_sync.sum_totals(
            shard_sync.table_totals(self._views[stream], auditor.listing, self._held)
            for stream, auditor in self._auditors.items()
        )
