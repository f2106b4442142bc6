"""The settings of one lease: its policy, start point, pacing; and the metering of its load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.lease import LOAD_MEAN_S, Lease, LeaseKey, Load, OwnerId, Pause
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.quotas import SHARD_READ_PAUSE_S
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kclrun.model.time import Instant, WallTime, backoff_s


def batch_records_max(uncheckpointed_max: int) -> int:
    """The most records of one batch: half of the cap, so that there is room for another batch.

    A checkpoint inside a batch counts no record of it as covered. If a batch filled the whole cap,
    and a processor checkpointed all but its last records, there would be no room: no further batch
    could be delivered, and the lease would halt for lack of a checkpoint.
    """
    return max(1, uncheckpointed_max // 2)


class LeasePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`failover_s` is the smallest in the fleet; `expires_instant` ends an unclaimed start [P4].

    `has_waited`: a failover has passed since a take by force [P18]. `others_in_sight`: another
    kclrun owner can take offers [P17]. `has_keyed_state`: a position is never written without its
    snapshot, so there is no late checkpoint [P19]. `has_outputs`: emitted rows go to outputs that
    commit in a thread of their own, so that a checkpoint waits for OutputsCommitted [K5].
    `has_storing_outputs`: one of them keeps its cursor with its rows, so that a position on the row
    which another program wrote is never adopted [K2, K3]. `is_bounded`: a time range is read, which
    may end before the shard does, and then without children. `past_pause`: the pause that was on
    the row at the start, and was over; another one ends this process.
    """

    key: LeaseKey
    me: OwnerId
    seen_counter: int
    expires_instant: Instant
    failover_s: float
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    has_waited: bool = False
    past_pause: Pause | None = None
    others_in_sight: bool = False
    has_keyed_state: bool = False
    has_outputs: bool = False
    has_storing_outputs: bool = False
    is_bounded: bool = False

    @property
    def is_manual(self) -> bool:
        """Whether only the processor moves the checkpoint."""
        return self.checkpoint.mode == "manual"


def first_start(row: Lease, start_at: WallTime | None, now_at: WallTime) -> StartPoint:
    """The start for a claimed row.

    A checkpoint inside an aggregate is read again from its record; after opening it, user records
    at or below the checkpoint are dropped, as the Java KCL does (`IteratorBuilder`). Within a
    session reading goes on after the last record *received*. A start that has received nothing yet
    repeats itself. Therefore a LATEST is pinned to a time: if the sentinel were asked for twice,
    the records between would be skipped [P14].

    `start_at` is the instant of `start:`. `now_at` is the wall clock; it pins a LATEST that another
    program's row carries without a time.
    Raises: SettingsError for an AT_TIMESTAMP row whose instant is not known.
    """
    position = row.checkpoint
    match position.sequence_number:
        case TRIM_HORIZON.sequence_number:
            return StartPoint(IteratorType.TRIM_HORIZON)
        case LATEST.sequence_number:
            return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=row.latest_pinned_at or now_at)
        case AT_TIMESTAMP.sequence_number:
            return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=_instant_of(row, start_at))
        case number:
            return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number=number)


def _instant_of(row: Lease, start_at: WallTime | None) -> WallTime:
    # kcl-rust keeps the instant, in milliseconds, in the field of the sub-sequence number.
    if row.checkpoint.sub_sequence_number:
        return WallTime(row.checkpoint.sub_sequence_number / 1000)
    if start_at is None:
        raise SettingsError(
            f"lease {row.key} is to be read from an instant (AT_TIMESTAMP), and `start:` names"
            " none: give `start:` the instant the application was first started with"
        )
    return start_at


# One reader at the limit of all applications together.
FLOOR_S: Final = SHARD_READ_PAUSE_S
# Half of the five reads a second that all readers of a shard share: what one application takes at
# the tip, as the Spark source does (`fetch.every`).
EVERY_S: Final = 2 * SHARD_READ_PAUSE_S
# A thread that wakes so late does not shift the others (`polite_s`).
_LATE_S: Final = 0.05
# The longest pause of a throttled reader: an answer of 10 MB blocks the shard for 5 s (2 MB/s).
THROTTLE_MAX_S: Final = 5.0
# Failures other than throttling are retried for ever, at least at this pace (`model/time.py`).
ERROR_MAX_S: Final = 3.0


class Pacing:
    """The pause before the next GetRecords, counted from the start of the last one. Pure.

    The Java KCL polls at a fixed pause even when far behind (its issue 237) and sleeps after any
    failure. `idle_s` is the pause after an empty page at the tip, `every_s` the least one after any
    page at the tip. While behind, the pause is `floor_s`.
    """

    def __init__(self, idle_s: float, floor_s: float = FLOOR_S, every_s: float = 0.0) -> None:
        self._floor_s = floor_s
        self._every_s = max(every_s, floor_s)
        self.idle_s = max(idle_s, self._every_s)
        self._failures = 0
        self._has_expired = False

    def after_page(self, records: int, millis_behind_latest: int | None) -> float:
        """The pause after a page.

        An empty page while behind is normal (a gap in the shard) and does not cause the idle pause.
        A page counts as read at the tip of the shard if its lag is at most `every_s`. If the lag of
        a page with records is not known, the page counts as read behind the tip.
        """
        self._failures, self._has_expired = 0, False
        if records == 0:
            return self._floor_s if millis_behind_latest else self.idle_s
        is_behind = millis_behind_latest is None or millis_behind_latest > self._every_s * 1000
        return self._floor_s if is_behind else self._every_s

    def polite_s(self, rest_s: float, pause_s: float) -> float:
        """The pause that is made, where idle threads wake together after `rest_s` instead of
        `pause_s`: one beat later, if that is too soon at the tip."""
        least_s = min(self._every_s, pause_s - _LATE_S)
        return rest_s if rest_s >= least_s else rest_s + pause_s

    def after_throttle(self, chance: float) -> float:
        """The pause after throttling, doubling. The iterator is used again: it lasts 5 minutes."""
        return self._grown(FLOOR_S, THROTTLE_MAX_S, chance)

    def after_error(self, chance: float) -> float:
        return self._grown(FLOOR_S, ERROR_MAX_S, chance)

    def after_expired(self, chance: float) -> float:
        """The pause after an expired iterator: 0 for the first one since the last page, because it
        was not used for five minutes. A new one that has expired is an error as any other."""
        if not self._has_expired:
            self._has_expired = True
            return 0.0
        return self.after_error(chance)

    def _grown(self, base_s: float, max_s: float, chance: float) -> float:
        self._failures += 1
        return backoff_s(self._failures, chance, base_s=base_s, max_s=max_s)


# The Java KCL 3 smooths `throughputKBps` by half and keeps six decimals.
THROUGHPUT_ALPHA: Final = 0.5
_THROUGHPUT_DECIMALS: Final = 6
# The digits of a load: each renewal is billed by the size of the row, and a tenth of a KiB/s or of
# a thousandth of a core decides nothing.
_KBPS_DECIMALS: Final = 1
_CPU_DECIMALS: Final = 4


class LoadMeter:
    """The load of a lease since its claim: the figures that its heartbeats write to the row.

    `throughput_kbps` is the payload delivered, in KiB/s, smoothed by half at each renewal as the
    Java KCL 3 does. It follows every poll, so nothing is decided from it.

    `load` is the payload and the CPU time of the lease process, which owners balance by. It is the
    mean since the claim, and after `LOAD_MEAN_S` a mean in which older seconds fade. Until then it
    is None, because a process that starts reads what waited for it: the row keeps the figures of
    the former process.
    """

    def __init__(self, cpu_s: Callable[[], float]) -> None:
        self._cpu_s = cpu_s
        self._began = self._renewed = self._measured = Instant(0.0)
        self._since_renewal = self._since_measured = 0  # bytes
        self._cpu_measured_s = 0.0
        self._kbps = self._mean_kbps = self._mean_cpu = 0.0

    def begin(self, now: Instant) -> None:
        """The lease is claimed."""
        self._began = self._renewed = self._measured = now
        self._cpu_measured_s = self._cpu_s()

    def deliver(self, payload_bytes: int) -> None:
        """User code gets a batch."""
        self._since_renewal += payload_bytes
        self._since_measured += payload_bytes

    def throughput_kbps(self, now: Instant) -> float:
        """The rate up to now; the next one counts from here."""
        elapsed_s = now - self._renewed
        if elapsed_s > 0:
            rate_kbps = self._since_renewal / 1024 / elapsed_s
            smoothed = THROUGHPUT_ALPHA * rate_kbps + (1 - THROUGHPUT_ALPHA) * self._kbps
            self._kbps = round(smoothed, _THROUGHPUT_DECIMALS)
            self._since_renewal = 0
            self._renewed = now
        return self._kbps

    def load(self, now: Instant) -> Load | None:
        """The means up to now; None until they are those of `LOAD_MEAN_S`."""
        elapsed_s, age_s = now - self._measured, now - self._began
        if elapsed_s > 0:
            cpu_s = self._cpu_s()
            # Up to LOAD_MEAN_S each second weighs the same: a running mean.
            weight = elapsed_s / max(elapsed_s, min(age_s, LOAD_MEAN_S))
            kbps = self._since_measured / 1024 / elapsed_s
            cpu = (cpu_s - self._cpu_measured_s) / elapsed_s
            self._mean_kbps += weight * (kbps - self._mean_kbps)
            self._mean_cpu += weight * (cpu - self._mean_cpu)
            self._since_measured, self._cpu_measured_s, self._measured = 0, cpu_s, now
        if age_s < LOAD_MEAN_S:
            return None
        return Load(round(self._mean_kbps, _KBPS_DECIMALS), round(self._mean_cpu, _CPU_DECIMALS))
