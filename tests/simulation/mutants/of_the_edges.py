"""Bugs where bytes come in and processes are watched: what a storm does not see."""

from __future__ import annotations

from tests.simulation.mutants.mutant import Mutant

__all__ = ["OF_THE_EDGES"]

OF_THE_EDGES = (
    Mutant(
        name="rest-of-an-aggregate-dropped",
        file="kclrun/codec/kpl.py",
        old="        return [msgspec.structs.replace(record, malformed=True)]",
        new="        return []",
        breaks="the records of an aggregate that does not open are lost in silence",
        source="a3",
        layer="tests/properties/test_codec_kpl.py",
    ),
    Mutant(
        name="null-iterator-believed",
        file="kclrun/worker/fetching.py",
        old="        if not children and not self._is_closed_shard():",
        new="        if not children and page.records:",
        breaks="an open shard whose place the service lost is ended, and its rest never read",
        source="D.7: empty fetch taken for the end; K2",
        layer="tests/unit/worker/test_worker_fetching.py",
    ),
    Mutant(
        name="server-error-taken-for-nothing-happened",
        file="kclrun/ports.py",
        old="    if unclear and is_write and was_sent:",
        new="    if unclear and is_write and not was_sent:",
        breaks="a write that may have applied is repeated as if it had not",
        source="D.7: retry swallowed; D3",
        layer="tests/unit/aws/test_aws_exchange.py",
    ),
    Mutant(
        name="no-progress-watch",
        file="kclrun/manager/stall.py",
        old="    return Stall(what, since) if since > 0.0 and now - since >= stall_s else None",
        new="    return Stall(what, since) if since < 0.0 else None",
        breaks="user code that never returns keeps its lease for ever",
        source="a11",
        layer="tests/unit/manager/test_manager_watchdog.py",
    ),
    Mutant(
        name="wall-clock-in-the-fence",
        file="kclrun/worker/clock.py",
        old="    return Instant(time.clock_gettime(time.CLOCK_BOOTTIME))",
        new="    return Instant(time.clock_gettime(time.CLOCK_REALTIME))",
        breaks="a step of the wall clock prolongs the permission to read",
        source="D.7, T1",
        layer="tests/unit/worker/test_worker_clock.py",
    ),
    Mutant(
        name="pinned-latest-not-used",
        file="kclrun/consuming/start_point.py",
        old="timestamp=row.latest_pinned_at or now_at)",
        new="timestamp=now_at)",
        breaks="what arrived between the creation of a lease and its first read is skipped",
        source="P14",
        layer="tests/unit/consuming/test_consuming_pieces.py",
    ),
    Mutant(
        name="late-checkpoint-compares-text",
        file="kclrun/aws/clauses.py",
        old='    f"{_SENTINEL} OR size(checkpoint) < :digits"',
        new='    f"{_SENTINEL} OR checkpoint < :position OR size(checkpoint) < :digits"',
        breaks="positions are compared as text: SHARD_END is below any number",
        source="trace H6b",
        layer="tests/contract/test_lease_table_late.py",
    ),
    Mutant(
        name="sub-sequence-forgotten-at-the-start",
        file="kclrun/codec/kpl.py",
        old="        return (rank, len(number), number, record.sub_sequence_number) > last",
        new="        return (rank, len(number), number, 0) > last",
        breaks="the rest of an aggregate behind a checkpoint inside it is left out",
        source="a7",
        layer="tests/unit/codec/test_kpl.py",
    ),
)
