"""Up to which position the outputs have the rows of a lease, and the one commit under way [K5].

`state_machine.py` decides which position the row's checkpoint should have; this module limits it to
what the outputs have. Must not know: what an output is. Without outputs it has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kclrun.lease.commands import CommitOutputs
from kclrun.lease.policy import LifePolicy
from kclrun.lease.states import State
from kclrun.model.lease import Lease
from kclrun.model.output import Cursor, Cursors, StoredCursors, sorted_cursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol.reports import OUTPUT, STATE, ProcessorFailed, ProcessWarned

# How long a lease that is given away, or halts, waits for its last commit. After that its
# checkpoint is the position that every output has, and the next owner processes the rest again. A
# destination that works answers within this time; a drain must not depend on one that does not.
LAST_COMMIT_WAIT_S: Final = 10.0
# The time between two requests for the same rows, if the outputs do not have them all.
ASK_AGAIN_S: Final = 1.0


class OutputCommits:
    """`confirmed` is the position up to which every output has its rows.

    `waiting_since` is when the rows that a checkpoint needs were requested first; None if none are
    awaited. `refused` is why no repetition of a commit helps; None while one may help.
    `leave_instant` is when the lease stops waiting for its last commit; None before it waits.
    `failure` is why the last write failed, in words; empty once one succeeded.
    """

    def __init__(self, policy: LifePolicy) -> None:
        self.has_outputs = policy.has_outputs
        self.has_begun = not policy.has_outputs
        self._has_state = policy.has_keyed_state
        self._state_version: str | None = None  # at exactly `confirmed`
        self.confirmed = TRIM_HORIZON
        self.waiting_since: Instant | None = None
        self.refused: ProcessorFailed | None = None
        self._every_s = policy.checkpoint.every_s
        self._cursors: Cursors = ()
        self._asked: CommitOutputs | None = None
        self._needed = TRIM_HORIZON  # the highest position that was asked for
        self._answered: CommitOutputs | None = None
        self._rests_until = Instant(0.0)
        self.leave_instant: Instant | None = None
        self._final = TRIM_HORIZON  # the position of the last commit
        self._has_given_up = False
        self.failure = ""

    def claim(self, row: Lease) -> None:
        """Begin with the claimed row: its checkpoint covers rows that all outputs have."""
        self.confirmed = row.checkpoint
        self._cursors = row.outputs.cursors if row.outputs is not None else ()
        self._state_version = row.state_version

    def begin(
        self,
        position: ExtendedSequenceNumber,
        cursors: Mapping[str, Cursor],
        state_version: str | None = None,
    ) -> None:
        """The outputs were taken over, and have every row up to `position` [K11, K12]. There the
        state is `state_version`, or that of the row."""
        self.has_begun = True
        self._state_version = state_version or self._state_version
        self.confirmed = max(self.confirmed, position)
        self._cursors = sorted_cursors(cursors)

    def ask(self, wanted: CommitOutputs, now: Instant) -> tuple[CommitOutputs, ...]:
        """The command for these rows, unless the outputs have them, or it is too early to ask."""
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
        state_version: str | None = None,
    ) -> None:
        """The outputs have every row up to `upto`, and the version is the state there."""
        self.failure = ""
        if upto >= self.confirmed:
            self._state_version = state_version
        self.confirmed = max(self.confirmed, upto)
        self._cursors = sorted_cursors(cursors)
        if answers is not None and answers == self._asked:
            self._asked, self._answered = None, answers
            rest_s = ASK_AGAIN_S if answers.must else self._every_s
            self._rests_until = now if self.confirmed >= answers.upto else Instant(now + rest_s)
        if self.confirmed >= self._needed:
            self.waiting_since = None

    def leave(self, final: ExtendedSequenceNumber, now: Instant, fence: Instant | None) -> None:
        """The lease is given away, or halts: it waits for its last commit, at `final`, counted from
        the first call. With a `fence` the lease is not renewed any more: half of the time left is
        for the write."""
        self._final = final
        if self.leave_instant is None:
            wait_s = LAST_COMMIT_WAIT_S
            if fence is not None:
                wait_s = min(wait_s, (fence - now) / 2)
            self.leave_instant = Instant(now + wait_s)

    def is_last_awaited(self, now: Instant) -> bool:
        """Whether the last write waits for the outputs. It waits for one answer, also a lower
        one."""
        if self.leave_instant is None or now >= self.leave_instant or self.refused is not None:
            return False
        if self._final <= self.confirmed:
            return False
        answered = self._answered
        return answered is None or not answered.must or answered.upto < self._final

    def give_up(self, now: Instant) -> tuple[ProcessWarned, ...]:
        """Once the last commit is not waited for any longer although the outputs lack rows: why
        they do, also if that was reported before. Nothing if they answered without a failure."""
        is_left = self.leave_instant is not None and self._final > self.confirmed
        is_known = self._has_given_up or self.refused is not None
        if not is_left or is_known or self.is_last_awaited(now):
            return ()
        self._has_given_up = True
        if self.failure:
            return (ProcessWarned(f"the last write did not succeed: {self.failure}"),)
        if self._answered is not None and self._answered.upto >= self._final:
            return ()
        named = ", ".join(name for name, _ in self._cursors)
        outputs = f" of {named}" if named else ""
        return (ProcessWarned(f"the last write{outputs} was not answered in time"),)

    def covered(
        self,
        wanted: ExtendedSequenceNumber,
        otherwise: ExtendedSequenceNumber,
        saved: ExtendedSequenceNumber,
    ) -> ExtendedSequenceNumber:
        """`wanted`, if every output has its rows; else `otherwise`. With keyed state: the position
        of its last version, or `saved`, because a checkpoint needs a version at its position
        [K5]."""
        if self._has_state:
            return self.confirmed if saved <= self.confirmed <= wanted else saved
        return wanted if not self.has_outputs or wanted <= self.confirmed else otherwise

    def next_ask_instant(self, checkpointed: ExtendedSequenceNumber) -> Instant | None:
        """When a checkpoint that is due may be tried; None: not before an event of the outputs."""
        if not self.has_outputs or self.confirmed > checkpointed:
            return Instant(0.0)
        return self.again_instant

    @property
    def again_instant(self) -> Instant | None:
        """When rows that the outputs did not commit are requested again; None: not before an event
        of the outputs."""
        is_waiting = self._asked is not None or self.refused is not None or not self.has_begun
        return None if is_waiting else self._rests_until

    def to_write(
        self, row: Lease, position: ExtendedSequenceNumber
    ) -> tuple[Cursors | None, str | None]:
        """The cursors and the version of the state that are written to the row with `position`;
        None for each that the row has already [K2]."""
        is_known = row.outputs == StoredCursors(position, self._cursors)
        cursors = None if is_known or not (self._cursors or self._has_state) else self._cursors
        if not self._has_state:
            # The row's version was written for another position than these cursors.
            is_void = cursors is not None and row.state_version is not None
            return cursors, "" if is_void else None
        if position != self.confirmed:
            return None, None  # a write that moves no position: the row keeps what it has
        is_version_known = self._state_version in {None, row.state_version}
        return cursors, None if is_version_known else self._state_version


def wanted_commit(
    state: State,
    final: ExtendedSequenceNumber,
    asked_for: ExtendedSequenceNumber | None,
    due: ExtendedSequenceNumber | None,
    *,
    is_urgent: bool,
) -> CommitOutputs | None:
    """The commit that a checkpoint needs: the last commit, at `final`; or one at the position that
    user code requested, or that is due. `is_urgent`: the next batch waits for the checkpoint, so
    the outputs must not wait for their own pace."""
    if state is State.ENDING:
        return CommitOutputs(SHARD_END, must=True)
    if state in {State.FAILING, State.RELEASING}:
        return CommitOutputs(final, must=True, is_leaving=state is State.RELEASING)
    wanted = [position for position in (asked_for, due) if position is not None]
    return CommitOutputs(max(wanted), asked_for is not None or is_urgent) if wanted else None


def moved_past_outputs(row: Lease) -> ProcessorFailed:
    """Another program moved the checkpoint, so the cursors beside it are of another position."""
    if row.state_version is not None:
        at = "another one" if row.outputs is None else row.outputs.at
        return ProcessorFailed(
            STATE,
            f"the checkpoint is {row.checkpoint}, and the state on the row was written with {at}: a"
            " Java worker or a person moved it, or kclrun ran without `state`. There is no state"
            f" for this position. Put the checkpoint back to {at}, or begin again under a new name"
            " of the application",
            attempts=1,
        )
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
