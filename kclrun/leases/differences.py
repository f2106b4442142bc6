"""What this manager's settings and the table's rows do not agree on: one warning each.

Live owners must have one `failover` [P9] and, for each stream, one `start`. Rows of streams that
this application does not read are somebody else's work: they are left alone, and named once, for
they may be what a stream taken out of the configuration left behind.
Look next: `auditing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kclrun.leases.commands import Command, Note
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import TableView
from kclrun.model.stream_key import ONLY_STREAM, stream_name_of, stream_of

__all__ = ["Differences"]

_KEYS_SHOWN_MAX = 5


class Differences:
    """Looks at every scan; what it told it tells again only when it has changed."""

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

    def _tell(self, event: str, what: list[float] | list[str], **fields: str | float) -> None:
        """Once per change; nothing to tell is the healthy state, which is silent."""
        if self._told.get(event, []) == what:
            return
        self._told[event] = what
        if what:
            self._out.append(Note(event, "warning", fields={"what": str(what), **fields}))
