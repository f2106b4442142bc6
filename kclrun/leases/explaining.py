"""The next decisions of one owner and their reasons, in words: for `kclrun leases --explain`.

Pure: from two scans of the table. `ConfigDrift` and `ModeWatch` log where this manager, the rows of
the table and a KCL 3 fleet disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from kclrun.leases.assignment import Action, Decision, LocalHoldings, OwnerLoads, plan
from kclrun.leases.commands import Command, Note, ReadKcl3Mode
from kclrun.leases.events import Kcl3ModeRead, Kcl3ModeUnreadable
from kclrun.leases.offers import LEFT_LYING_S, delay_s, delay_words
from kclrun.leases.policy import ManagerPolicy, is_seldom, kcl3_mode_every_s
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Lease, LeaseKey, OwnerId, is_native, mode_advice
from kclrun.model.stream import ONLY_STREAM, stream_name_of, stream_of
from kclrun.model.time import Instant

_KEYS_SHOWN_MAX = 5


class ConfigDrift:
    """Logs where the settings of this manager and the rows disagree: once, until it changes.

    Live owners must have one `failover` [P9] and, for each stream, one `start`. Rows of streams
    that this application does not read are the work of another application: they are left alone.
    They are named once, because a stream that was taken out of the configuration may have left them
    behind.
    """

    def __init__(self, policy: ManagerPolicy, out: list[Command]) -> None:
        self._policy = policy
        self._out = out
        self._told: dict[str, object] = {}

    def after_scan(self, view: TableView) -> None:
        """Compare what live owners have published with ours [P9]."""
        others = view.kclrun_owners - {self._policy.me}
        expired, are_many = view.expired, len(self._policy.streams) > 1
        published = {
            (lease.failover_s, lease.start, stream_of(lease.key) if are_many else ONLY_STREAM)
            for lease in view.unended
            if lease.owner in others and lease.key not in expired
        }
        failovers = {failover_s for failover_s, _, _ in published if failover_s}
        failovers -= {self._policy.failover_s}
        starts = set()
        for _, theirs, stream in published:
            ours = self._policy.of_stream(stream if are_many else self._policy.streams[0])
            if theirs is not None and theirs != ours.start_text:
                starts.add((ours.start_text, theirs))
        self._tell(
            "failover_differs",
            sorted(failovers),
            ours_s=self._policy.failover_s,
            theirs_s=", ".join(f"{failover_s:g}" for failover_s in sorted(failovers)),
        )
        self._tell(
            "start_differs",
            sorted({theirs for _, theirs in starts}),
            ours=", ".join(sorted({ours for ours, _ in starts})),
            theirs=", ".join(sorted({theirs for _, theirs in starts})),
        )

    def strangers(self, keys: Iterable[str]) -> None:
        """Rows of streams that are not ours to read."""
        strange = sorted(keys)
        names = sorted({stream_name_of(stream_of(key)) or "(none)" for key in strange})
        self._tell(
            "rows_of_other_streams",
            names,
            stream=", ".join(names),
            keys=", ".join(strange[:_KEYS_SHOWN_MAX]),
        )

    def _tell(
        self,
        event: str,
        what: list[float] | list[str],
        **fields: str | float,
    ) -> None:
        """Log once for each change. An empty value is the healthy state, which is not logged."""
        if self._told.get(event, []) == what:
            return
        self._told[event] = what
        if what:
            self._out.append(Note(event, "warning", fields={"what": str(what), **fields}))


class ModeWatch:
    """The mode of a KCL 3 fleet beside us [P8], from both places that may hold one: the lease
    table, which each scan shows, and the table of the early versions, which the fleet as a whole
    reads once a minute. A mode in the lease table counts before the other, as at the start."""

    def __init__(
        self, policy: ManagerPolicy, out: list[Command], chance: Callable[[], float]
    ) -> None:
        self._policy = policy
        self._out = out
        self._chance = chance
        self._in_table: str | None = None
        self._elsewhere: str | None = None
        self._told: str | None = None
        self._reads = policy.reads_kcl3_mode
        self._is_reading = False
        self._read_instant: Instant | None = None

    @property
    def native(self) -> str | None:
        """The state in which a KCL 3 leader assigns the leases, where it does."""
        mode = self._in_table if self._in_table is not None else self._elsewhere
        return mode if is_native(mode) else None

    def scanned(self, mode: str | None) -> None:
        """Take in the mode in the lease table, as the scan shows it."""
        self._in_table = mode
        self._tell()

    def read(self, event: Kcl3ModeRead) -> None:
        """Take in the mode in the other table."""
        self._is_reading = False
        self._elsewhere = event.mode
        self._tell()

    def unreadable(self, event: Kcl3ModeUnreadable) -> None:
        """We may not read the other table: logged once, and never read again."""
        self._reads = False
        self._out.append(Note("kcl3_mode_unreadable", fields={"reason": event.reason}))

    def read_when_due(self, owners: Collection[OwnerId], now: Instant) -> None:
        """Request a read if it is due. Called after a scan that shows these live kclrun owners. The
        start has just read the mode, so the first read is a random part of the interval later:
        managers that start together take turns.
        """
        if not self._reads or self._is_reading or is_seldom(self._policy, owners):
            return
        every_s = kcl3_mode_every_s(owners)
        if self._read_instant is None:
            self._read_instant = Instant(now + every_s * self._chance())
        elif now >= self._read_instant:
            self._read_instant = Instant(now + every_s)
            self._is_reading = True
            self._out.append(ReadKcl3Mode())

    def _tell(self) -> None:
        """Log once for each change. In a native mode our leases stay ours while we renew them, Java
        workers get nothing, and the next kclrun to start is refused."""
        native = self.native
        if native == self._told:
            return
        self._told = native
        if native is not None:
            self._out.append(
                Note(
                    "kcl3_native",
                    "error",
                    fields={"what": str([native]), "reason": mode_advice(native)},
                )
            )


# A draw in the middle: `explain` uses no chance, so it gives the same answer for the same table.
_EVEN_DRAW = 0.5


class Explained(msgspec.Struct, frozen=True):
    """One decision. `action` is "take", "take by force", "ask", "offer" or "nothing"; `key` is
    None for nothing. `sentence` is whole: "take shard X: expired …", "nothing: balanced: …"."""

    action: str
    key: LeaseKey | None
    sentence: str


def explain(
    earlier: tuple[Lease, ...],
    later: tuple[Lease, ...],
    policy: ManagerPolicy,
    *,
    apart_s: float,
    broken: tuple[str, ...] = (),
) -> tuple[Explained, ...]:
    """The decisions of the owner `policy.me` after the later scan, in the order they are made.

    Each scan is all readable leases of the table; `broken` are the keys of the others. `apart_s` is
    the time between the scans in seconds; with less than a failover no lease can be known to be
    expired. Never empty: where nothing is to be decided, the last line describes the situation.

    The planner of a manager decides, so a manager would decide the same. Only the choice among
    equal leases differs: a manager leaves it to chance, here it is fixed. Two scans do not show
    everything: not an owner's asks that went unanswered, not its places filled by leases it just
    took, and nothing that stood still for longer than the scans are apart.
    """
    earlier, later = _of_ours(earlier, policy), _of_ours(later, policy)
    observation = Observation(policy.failover_s)
    observation.update(earlier, Instant(0.0))
    now = Instant(apart_s)
    observation.update(later, now)
    view = TableView(later, broken, observation, me=policy.me, gone=frozenset(), now=now)
    held = [lease.key for lease in view.unended if lease.owner == policy.me]
    holdings = LocalHoldings(held=held)
    loads = OwnerLoads(view, observation, holdings, me=policy.me)
    offered = tuple(_explain_offer(lease, loads, policy) for lease in loads.offered)
    planned = plan(loads, observation, policy, holdings, lambda: _EVEN_DRAW)
    decided = tuple(_explain_decision(decision) for decision in planned.decisions)
    return offered + decided or (Explained("nothing", None, f"nothing: {planned.summary}"),)


def _of_ours(leases: tuple[Lease, ...], policy: ManagerPolicy) -> tuple[Lease, ...]:
    """The rows of the streams that this owner reads."""
    return tuple(lease for lease in leases if stream_of(lease.key) in policy.streams)


def _explain_decision(decision: Decision) -> Explained:
    key, action = decision.lease.key, decision.action
    if action is Action.ASK:
        sentence = f"ask {decision.owner} for {key}: {decision.because}"
    elif action is Action.FORCE:
        sentence = f"take shard {key} by force from {decision.owner}: {decision.because}"
    elif action is Action.OFFER:
        sentence = f"offer shard {key} in the name of {decision.owner}: {decision.because}"
    else:
        sentence = f"take shard {key}: {decision.because}"
    return Explained(action.value, key, sentence)


def _explain_offer(lease: Lease, loads: OwnerLoads, policy: ManagerPolicy) -> Explained:
    wait_s = delay_s(lease, loads.me, loads.kclrun_owners, loads.view.silent)
    words = delay_words(lease, loads.me)
    if lease.offered_to != loads.me and loads.mine >= loads.target(policy.leases_max):
        wait_s += LEFT_LYING_S
        words += "; we are at our target"
    when = "at once" if wait_s == 0 else f"in {wait_s:.1f} s unless another owner does"
    return Explained("take", lease.key, f"take shard {lease.key} {when}: {words}")
