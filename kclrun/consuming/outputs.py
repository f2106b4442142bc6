"""How far the outputs have the rows of a lease, and the one commit that is asked of them [K5].

`state_machine.py` decides which position the row's checkpoint needs; this says how far it may go.
Must not know: what an output is. Without outputs nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kclrun.consuming.commands import CommitOutputs
from kclrun.model.lease import Lease
from kclrun.model.output import Cursor, Cursors, StoredCursors, sorted_cursors
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol.reports import OUTPUT, ProcessorFailed

# How long a lease that is given away, or halts, waits for its last commit. Then it goes at the
# position that every output has, and the next owner does the rest again. A destination that
# answers at all answers within this time; a drain must not depend on one that does not.
LAST_COMMIT_WAIT_S: Final = 10.0
# Between two requests for the same rows, if the outputs answered that they do not have them all.
ASK_AGAIN_S: Final = 1.0


class OutputCommits:
    """`confirmed` is the position up to which every output has its rows.

    `waiting_since`: since when rows that a checkpoint needs are on their way; None if none are.
    `refused`: why no repetition of a commit helps; None while one may.
    """

    def __init__(self, *, has_outputs: bool, every_s: float) -> None:
        self.has_outputs = has_outputs
        self.has_begun = not has_outputs
        self.confirmed = TRIM_HORIZON
        self.waiting_since: Instant | None = None
        self.refused: ProcessorFailed | None = None
        self._every_s = every_s
        self._cursors: Cursors = ()
        self._asked: CommitOutputs | None = None
        self._needed = TRIM_HORIZON  # the highest position that was asked for
        self._answered: CommitOutputs | None = None
        self._rests_until = Instant(0.0)
        self._leave_instant: Instant | None = None

    def claim(self, row: Lease) -> None:
        """What the claimed row says: a checkpoint covers rows that all outputs have."""
        self.confirmed = row.checkpoint
        self._cursors = row.outputs.cursors if row.outputs is not None else ()

    def begin(self, position: ExtendedSequenceNumber, cursors: Mapping[str, Cursor]) -> None:
        """The outputs were taken over, and have every row up to `position` [K11, K12]."""
        self.has_begun = True
        self.confirmed = max(self.confirmed, position)
        self._cursors = sorted_cursors(cursors)

    def ask(self, wanted: CommitOutputs, now: Instant) -> tuple[CommitOutputs, ...]:
        """The command for these rows, unless they are there, or it is not the time to ask."""
        if not self.has_begun or self.refused is not None or wanted.upto <= self.confirmed:
            return ()
        under_way, answered = self._asked, self._answered
        if under_way is not None and (under_way.must or not wanted.must):
            return ()
        is_same = answered is not None and (answered.must or not wanted.must)
        if is_same and now < self._rests_until:
            return ()
        self._asked = wanted
        self._needed = max(self._needed, wanted.upto)
        if self.waiting_since is None:
            self.waiting_since = now
        return (wanted,)

    def commit(
        self,
        upto: ExtendedSequenceNumber,
        cursors: Mapping[str, Cursor],
        answers: CommitOutputs | None,
        now: Instant,
    ) -> None:
        """The outputs have every row up to `upto`."""
        self.confirmed = max(self.confirmed, upto)
        self._cursors = sorted_cursors(cursors)
        if answers is not None and answers == self._asked:
            self._asked, self._answered = None, answers
            rest_s = ASK_AGAIN_S if answers.must else self._every_s
            self._rests_until = now if self.confirmed >= answers.upto else Instant(now + rest_s)
        if self.confirmed >= self._needed:
            self.waiting_since = None

    def leave(self, now: Instant, wait_s: float) -> None:
        """The lease is given away, or halts: it waits for its last commit, for `wait_s` from the
        first call."""
        if self._leave_instant is None:
            self._leave_instant = Instant(now + wait_s)

    def is_last_awaited(self, upto: ExtendedSequenceNumber, now: Instant) -> bool:
        """Whether the last write waits for the outputs to have the rows up to `upto`. One answer
        is enough, also a lower one."""
        if self._leave_instant is None or now >= self._leave_instant or self.refused is not None:
            return False
        if upto <= self.confirmed:
            return False
        answered = self._answered
        return answered is None or not answered.must or answered.upto < upto

    @property
    def leave_instant(self) -> Instant | None:
        """When the lease stops waiting for its last commit; None before it waits."""
        return self._leave_instant

    def covered(
        self, wanted: ExtendedSequenceNumber, otherwise: ExtendedSequenceNumber
    ) -> ExtendedSequenceNumber:
        """`wanted`, if every output has its rows; else `otherwise`."""
        return wanted if not self.has_outputs or wanted <= self.confirmed else otherwise

    def next_ask_instant(self, checkpointed: ExtendedSequenceNumber) -> Instant | None:
        """When a checkpoint that is due may be tried. None: once the outputs have answered."""
        if not self.has_outputs or self.confirmed > checkpointed:
            return Instant(0.0)
        return self.again_instant

    @property
    def again_instant(self) -> Instant | None:
        """When rows that the outputs did not commit are asked for again. None: not before an event
        of theirs."""
        is_waiting = self._asked is not None or self.refused is not None or not self.has_begun
        return None if is_waiting else self._rests_until

    def to_write(self, row: Lease, position: ExtendedSequenceNumber) -> Cursors | None:
        """The cursors that go to the row with `position`; None if it has them already [K2]."""
        is_known = row.outputs == StoredCursors(position, self._cursors)
        return None if not self._cursors or is_known else self._cursors


def moved_past_outputs(row: Lease) -> ProcessorFailed:
    """Another program moved the checkpoint, so the cursors beside it are of another position."""
    assert row.outputs is not None, "only cursors on the row can be passed by"
    names = ", ".join(name for name, _ in row.outputs.cursors)
    return ProcessorFailed(
        OUTPUT,
        f"the checkpoint is {row.checkpoint}, and the cursors of the outputs ({names}) were"
        f" written with {row.outputs.at}: a Java worker or a person moved it, so rows between the"
        " two may be missing there, or be there twice. Look at the outputs; resume the lease to go"
        " on from its checkpoint",
        attempts=1,
    )
