"""When the outputs of a lease commit: each at its own pace, or all together with the state [K5].

Must not know: user code, threads, the core.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import msgspec

from kclrun.errors import SinkError
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import Cursor, naming_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.lanes import Lane
from kclrun.outputs.outbox import BoxedOutput, Decided
from kclrun.outputs.waiting_rows import WaitingRows
from kclrun.state.keyed import Undoable
from kclrun.state.stores.state_versions import StateVersions

# With so many bytes of changes of the state waiting, a commit is made before it is due.
STATE_BUFFER_BYTES: Final = 64 * 2**20
# How often versions that no row needs are looked for: each time costs one LIST.
COLLECT_EVERY_S: Final = 3600.0
# An offer leaves a larger roll to the next owner: sending it takes longer than the gap of a move
# should be.
OFFER_BYTES_MAX: Final = 5 * 2**20


class Keyed(msgspec.Struct, frozen=True):
    """The keyed state among the outputs. `undo` takes a change back from the entries that user code
    sees. Versions that no row needs are deleted when they are older than `retain_s`. A commit is
    made before it is due when changes of `buffer_bytes` wait for it. With `is_boxed` the other
    outputs are `BoxedOutput`s, and the versions hold their rows [K12]."""

    versions: StateVersions
    undo: Callable[[Undoable], None]
    retain_s: float
    buffer_bytes: int = STATE_BUFFER_BYTES
    is_boxed: bool = False


class CommitSpans(Protocol):
    """The traces of the commits."""

    def emitted(
        self, output: str, rows: int, size: int, upto: ExtendedSequenceNumber, began: Instant, /
    ) -> None: ...


class Turn(NamedTuple):
    """One turn of the outputs: the commit that the core requests, and the highest position whose
    rows are sent. `is_at_tip`: rows that may be refused are committed now. `is_held`: delivery
    waits until half of a buffer is free."""

    asked: CommitOutputs | None
    limit: ExtendedSequenceNumber
    is_at_tip: bool
    is_held: bool


class Commits(ABC):
    """The commits of the outputs of one lease. `version` is that of the state at the last commit;
    None without state."""

    def __init__(
        self, rows: WaitingRows, now: Callable[[], Instant], spans: CommitSpans | None
    ) -> None:
        self._rows = rows
        self._lanes = rows.lanes
        self._now = now
        self._spans = spans
        self.version: str | None = None

    @abstractmethod
    def send(self, turn: Turn) -> ExtendedSequenceNumber:
        """Add the rows that may be sent, and commit what is due. Returns: the position up to which
        all outputs have their rows. Raises: as `Output.commit`."""

    def commit(self, lane: Lane) -> None:
        """Commit the rows that were added. Raises: as `Output.commit`."""
        began, before = self._now(), lane.committed_rows
        lane.is_unresolved = True
        with naming_output(lane.name):
            lane.committed = lane.output.commit()
        lane.is_dirty = lane.is_unresolved = False
        size = lane.added.size - lane.committed_bytes
        lane.committed_rows, lane.committed_bytes = lane.added.rows, lane.added.size
        if self._spans is not None:
            upto = lane.committed.position
            self._spans.emitted(lane.name, lane.added.rows - before, size, upto, began)


class OwnPaces(Commits):
    """Each output commits at its own pace."""

    def send(self, turn: Turn) -> ExtendedSequenceNumber:
        """As `Commits`. A commit that failed is repeated before anything is added."""
        for lane in self._lanes:
            if lane.is_unresolved:
                self.commit(lane)
        self._rows.add(turn.limit, self._now)
        for lane in self._lanes:
            if self._is_due(lane, turn):
                self.commit(lane)
        with self._rows.changed:
            for lane in self._lanes:
                if not lane.is_dirty and not self._rows.wait_upto(turn.limit):
                    lane.clear = turn.limit
            return min(lane.clear or turn.limit for lane in self._lanes)

    def _is_due(self, lane: Lane, turn: Turn) -> bool:
        asked = turn.asked
        if asked is not None and asked.must and lane.is_dirty:
            return not (asked.is_leaving and lane.output.unsent_bytes > OFFER_BYTES_MAX)
        if turn.is_at_tip and lane.is_dirty and lane.may_be_refused:
            return True
        return lane.is_due(self._now(), is_asked=asked is not None, is_held=turn.is_held)


class WithState(Commits):
    """One commit of the state and of all outputs at one position, the state first. So no output has
    rows of records whose state is not durable.

    `confirmed` is the version that a checkpoint of ours put on the row; None before one did.
    `decided` is the commit that the first output had decided when the lease began, until all
    outputs have its rows.
    """

    def __init__(
        self,
        rows: WaitingRows,
        now: Callable[[], Instant],
        spans: CommitSpans | None,
        state: Keyed,
    ) -> None:
        super().__init__(rows, now, spans)
        self._state = state
        self._whole: ExtendedSequenceNumber | None = None  # of the last commit
        self._under_way: ExtendedSequenceNumber | None = None  # of a commit that is not finished
        self.decided: Decided | None = None
        self._boxed_at: ExtendedSequenceNumber | None = None
        self.confirmed: str | None = None
        self._collect_instant: Instant | None = None

    def begin(self, start: ExtendedSequenceNumber) -> None:
        """The outputs were taken over: reading begins at `start`."""
        self._whole = start
        self.version = self._state.versions.version
        self._lanes[0].is_dirty = self._state.versions.must_write

    def take_decided(self, decided: Decided) -> None:
        """Give the rows of the decided commit to the outputs that lack them. At the end of a shard
        `shard_ended` is called once more, and the rows that it emits are dropped."""
        self.decided = decided
        for lane in self._lanes:
            box, at = decided.boxes.get(lane.name), lane.committed
            lane.known = max(lane.known or decided.at.reached, decided.at.reached)
            if box is None or at is None or at >= Cursor.parse(box.upto):
                continue  # without rows in that commit, or it has them
            if isinstance(lane.output, BoxedOutput):
                lane.output.fill(box.rows, decided.at)
                lane.is_dirty = True

    def finish_decided(self) -> None:
        """Commit the rows of the decided commit to the other outputs."""
        for lane in self._lanes:
            if lane.name and (lane.is_unresolved or lane.is_dirty):
                self.commit(lane)
        self.decided = None

    def send(self, turn: Turn) -> ExtendedSequenceNumber:
        """As `Commits`. A commit that failed half-way is finished, at its own position, before
        anything is added."""
        self._finish()
        self._rows.add(turn.limit, self._now)
        is_clean = not any(lane.is_dirty for lane in self._lanes)
        if not self._rows.wait_upto(turn.limit) and (is_clean or self._is_due(turn)):
            self._under_way = turn.limit
            self._box(turn.limit)
            self._finish()
        assert self._whole is not None, "begin() comes first"
        return self._whole

    def _finish(self) -> None:
        if self._under_way is None:
            return
        for lane in self._lanes:
            if lane.is_unresolved or lane.is_dirty:
                if lane.index == 1 and self._boxed_at == self._under_way:
                    self._decide(lane)
                self.commit(lane)
        self._whole, self.version = self._under_way, self._state.versions.version
        self._under_way = None

    def _box(self, upto: ExtendedSequenceNumber) -> None:
        """With an outbox: put the rows of all outputs into the version of this commit. The first
        output decides the commit, also if it has no rows of its own. It cannot decide a commit at
        or below the cursor that it had before the settings had an outbox [K12]. A commit without
        rows and without a change of the state names the version of an earlier commit again."""
        if not self._state.is_boxed or self._whole is None or upto <= self._whole:
            return
        boxes = {
            lane.name: lane.output.box()
            for lane in self._lanes
            if isinstance(lane.output, BoxedOutput) and lane.output.has_rows
        }
        for lane in self._lanes[2:]:  # what these refuse must be known before the first decides
            if isinstance(lane.output, BoxedOutput) and lane.output.has_rows:
                with naming_output(lane.name):
                    lane.output.try_rows((), [(it.output, ()) for it in self._lanes[1:]])
        self._state.versions.box(boxes)
        first = self._lanes[1]
        self._lanes[0].is_dirty |= bool(boxes)
        if first.known is None or upto > first.known:
            self._boxed_at, first.is_dirty = upto, True

    def _decide(self, first: Lane) -> None:
        upto, version = self._under_way, self._state.versions.version
        assert isinstance(first.output, BoxedOutput), "with an outbox every output is one"
        assert upto is not None, "a commit is under way"
        assert version is not None, "the first commit of a lease writes one"
        first.output.decide(version, Cursor.of(upto))

    def _is_due(self, turn: Turn) -> bool:
        """Whether all outputs commit now: at the pace of the slowest one that has rows."""
        dirty = [lane for lane in self._lanes if lane.is_dirty]
        asked, held = turn.asked, turn.is_held
        if asked is not None and asked.must:
            is_large = any(lane.output.unsent_bytes > OFFER_BYTES_MAX for lane in dirty)
            return not (asked.is_leaving and is_large)
        now = self._now()
        if turn.is_at_tip or any(lane.is_due(now, is_asked=False, is_held=held) for lane in dirty):
            return True
        return asked is not None and all(
            lane.is_due(now, is_asked=True, is_held=held) for lane in dirty
        )

    def confirm(self, version: str | None) -> None:
        """A checkpoint of ours put this version on the row."""
        self.confirmed = version

    @property
    def has_work(self) -> bool:
        """Whether there is something to do although no rows wait."""
        if self._under_way is not None or self.decided is not None:
            return True
        return self.may_collect

    @property
    def may_collect(self) -> bool:
        """Whether versions that no row needs may be deleted: once an hour, while the row names the
        newest version by a checkpoint of ours [K15]."""
        if self.confirmed is None or self._under_way is not None:
            return False
        is_due = self._collect_instant is None or self._now() >= self._collect_instant
        return is_due and self.confirmed == self._state.versions.version

    def collect(self) -> None:
        """Delete versions that no row needs. If the store is away, again in an hour."""
        self._collect_instant = Instant(self._now() + COLLECT_EVERY_S)
        with contextlib.suppress(SinkError):
            self._state.versions.collect(self._state.retain_s)
