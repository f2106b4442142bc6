"""Bugs in the lease manager's decisions: expiry, takes, parents, balance, clean-up."""

from __future__ import annotations

from tests.simulation.mutants.mutant import Mutant

__all__ = ["OF_MANAGERS"]

BALANCE = "tests/properties/test_leases_balance.py"

OF_MANAGERS = (
    Mutant(
        name="expiry-by-first-sight",
        file="kclrun/leases/observation.py",
        old="if seen is None or seen[0] != counter or seen[1] != owner:",
        new="if seen is None:",
        breaks="a lease expires a failover after it was first seen, however often it is renewed",
        source="P9",
        found_at=0,
    ),
    Mutant(
        name="expiry-too-soon",
        file="kclrun/leases/observation.py",
        old=(
            "if now - since[lease.key][2] >= shortest_s]\n"
            "        return frozenset(lease.key for lease in candidates if"
            " self.has_expired(lease, now))"
        ),
        new=(
            "if now - since[lease.key][2] >= shortest_s / 2]\n"
            "        return frozenset(lease.key for lease in candidates)"
        ),
        breaks="a lease is taken while its owner is still permitted",
        source="P9",
        found_at=0,
    ),
    Mutant(
        name="take-not-read-back",
        file="kclrun/leases/writing.py",
        old=(
            "                write.may_have_applied = True\n               "
            " custody.is_reading = True"
        ),
        new=(
            "                if isinstance(write.change, Take):\n"
            "                    return self._judged(custody, write, None)\n"
            "                write.may_have_applied = True\n"
            "                custody.is_reading = True"
        ),
        breaks="a take that applied without an answer is given up: the row says us, nobody reads",
        source="a2",
        # In a fleet the next scan shows the stray, which is adopted: a second net.
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="strays-left-alone",
        file="kclrun/leases/manager.py",
        old="            if lease.owner == me and self._is_free(lease.key):",
        new="            if lease.is_ended and self._is_free(lease.key):",
        breaks="rows that say us and are in nobody's hands are never picked up",
        source="a2, a9: any error leaves the row owned",
        # In a fleet every take is read back before it is given up: strays are seldom.
        layer="tests/unit/leases/test_lease_asks_and_offers.py",
    ),
    Mutant(
        name="parents-not-asked",
        file="kclrun/leases/lineage.py",
        old="    return all(parent is None or parent.is_ended for parent in parents)",
        new="    return any(parent is None or parent.is_ended for parent in parents)",
        breaks="a child is started when one of its parents has ended",
        source="D.7: one merge parent forgotten",
        # In a fleet the scan has said before that all parents have ended: a second net.
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="scan-believed-about-parents",
        file="kclrun/leases/keeping.py",
        old="            custody.are_parents_over = custody.are_parents_over or not row.parents",
        new="            custody.are_parents_over = True",
        breaks="a child is started on the word of a scan, without consistent reads",
        source="trace C2",
        # Rows of a simulated scan are never stale, as an eventually consistent one's may be.
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="drained-manager-keeps-idle-rows",
        file="kclrun/leases/keeping.py",
        old="elif custody.state in _IDLE and (self.is_draining or self._is_asked_for(row, now)):",
        new="elif custody.state in _IDLE and self._is_asked_for(row, now):",
        breaks="a draining manager keeps rows that have no process, and never finishes",
        source="trace N8",
        # In a fleet a drain has an end by time, and what it left behind expires: time is lost.
        layer="tests/unit/leases/test_lease_giving_away.py",
    ),
    Mutant(
        name="ask-counted-twice",
        file="kclrun/leases/standing.py",
        old=(
            "            self._promised.add(lease.key)\n            return\n       "
            " self.counts[to] += 1"
        ),
        new=(
            "            self._promised.add(lease.key)\n            return\n"
            "        self.counts[owner] += 1\n        self.counts[to] += 1"
        ),
        breaks="a lease on its way counts for its owner and for the asker: no fixed point",
        source="Assignment",
        layer=BALANCE,
    ),
    Mutant(
        name="own-lease-not-counted",
        file="kclrun/leases/assignment.py",
        old="        allowed = min(\n            self._policy.moves",
        new="        self._mine -= 1\n        allowed = min(\n            self._policy.moves",
        breaks="a manager holds itself for poorer than it is: leases wander between even owners",
        source="D.7: own lease counted as rich",
        layer=BALANCE,
    ),
    Mutant(
        name="clean-up-before-children-begin",
        file="kclrun/leases/cleanup.py",
        old=(
            "        row is not None and row.checkpoint.sequence_number not in _NOT_BEGUN"
            " for row in rows"
        ),
        new="        row is not None for row in rows",
        breaks="an ended row goes while its children have not begun",
        source="P13, I11",
        layer="dense storms",
        found_at=4,
    ),
    Mutant(
        name="clean-up-before-parents",
        file="kclrun/leases/cleanup.py",
        old="        if not any(view.has_row(parent) for parent in row.parents)",
        new="        if row.is_ended",
        breaks="an ended row goes before those of its own parents",
        source="P13",
        layer="dense storms",
        found_at=2,
    ),
    Mutant(
        name="deletion-on-one-listing",
        file="kclrun/leases/cleanup.py",
        old="            if listing.seen_instant - since < max(two_periods_s, lag_s):",
        new="            if listing.seen_instant - since < 0.0:",
        breaks="one listing that lacks a shard deletes its row, and its checkpoint with it",
        source="a10",
        found_at=1,
    ),
    Mutant(
        name="listing-lag-forgotten",
        file="kclrun/leases/cleanup.py",
        old="            lag_s = _LAG_MAX_S if _is_newer(row, listing) else 0.0",
        new="            lag_s = 0.0",
        breaks="a shard that the listing does not show yet is taken for trimmed",
        source="K5",
        layer="rough storms",
        found_at=0,
    ),
    Mutant(
        name="latest-not-pinned",
        file="kclrun/leases/shard_sync.py",
        old="    pinned_at = listed_at if sentinel == LATEST else None",
        new="    pinned_at = None",
        breaks="what arrives between the creation of a lease and its first read is skipped",
        source="P14",
        layer="tests/scenarios/test_scenarios.py",
    ),
)
