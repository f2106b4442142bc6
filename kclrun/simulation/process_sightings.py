"""Sees named situations in the lives of lease processes: how they begin, stand still and end."""

from __future__ import annotations

from kclrun.consuming.commands import ExitCause, Report, ReportKind
from kclrun.simulation.situations import Situations


class ProcessSightings:
    """Gets these events from the lease processes and their managers."""

    def __init__(self, situations: Situations) -> None:
        self._seen = situations.seen
        self._killed: set[tuple[str, str]] = set()

    def started(self, owner: str, key: str) -> None:
        """A process was forked for a lease of this owner."""
        if (owner, key) in self._killed:
            self._killed.discard((owner, key))
            self._seen("process_restarted_by_a_living_manager")

    def killed(
        self, owner: str, key: str, *, has_claimed: bool, is_writing: bool, in_user_code: bool
    ) -> None:
        """A process was killed by a signal, or with its machine."""
        self._killed.add((owner, key))
        if not has_claimed:
            self._seen("killed_before_its_claim")
        if is_writing:
            self._seen("killed_with_a_write_under_way")
        if in_user_code:
            self._seen("killed_inside_user_code")

    def stood_still(self, *, in_user_code: bool) -> None:
        """A process stood still by SIGSTOP, or with its machine."""
        if in_user_code:
            self._seen("frozen_inside_user_code")

    def exited(self, cause: ExitCause, *, is_orphan: bool) -> None:
        """A process exited by itself."""
        if cause is ExitCause.UNCLAIMED:
            self._seen("start_unclaimed")
        elif cause is ExitCause.LOST:
            self._seen("orphan_exited_at_its_fence" if is_orphan else "lease_lost")
        elif cause is ExitCause.DONE and is_orphan:
            self._seen("orphan_gave_its_lease_away")

    def reported(self, report: Report) -> None:
        """A process sent a report to its manager."""
        if report.kind is ReportKind.WARNED and "has no lease yet" in report.text:
            self._seen("end_put_off")

    def fork_failed(self) -> None:
        self._seen("fork_failed")

    def drained_before_it_began(self) -> None:
        """Its manager was drained while it was being forked."""
        self._seen("drain_with_a_start_under_way")
