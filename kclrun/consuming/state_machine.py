"""Decides every next step of one lease in its process; `LeaseStateMachine` is the core.

Must not know: clocks, threads, sockets, DynamoDB. `now` and `chance` are arguments. Rule: the
outcome of every command comes back as an event, whatever the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.checkpoints import CheckpointLedger, CheckpointRequests
from kclrun.consuming.commands import AllowDelivery, Report, ReportKind, StopDelivery
from kclrun.consuming.events import ProcessorFailed
from kclrun.consuming.lease_writer import (
    GivingAway,
    LeaseWriter,
    OwnChange,
    RowWriting,
    Verdict,
    VerdictKind,
    WriteScheduler,
)
from kclrun.consuming.leaving import LOST_GRACE_S, GracefulRelease, LostLease, OutputWatch, words_of
from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.shard_end import CHILDREN_RETRY_S, ChildrenExist, Deferred, ShardEnd
from kclrun.consuming.states import (
    FINAL,
    GIVEN_UP_WHOLE,
    MAY_PUT_OFF,
    MAY_WITHDRAW,
    SILENT,
    TRANSITIONS,
    State,
    Step,
    is_expected,
)
from kclrun.errors import InvariantViolation
from kclrun.model.lease import CHILDREN_EXPIRED, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol import writes as changes
from kclrun.protocol.fence import renew_interval_s
from kclrun.protocol.writes import Unavailable


class DeliveryPermit:
    """Permission to deliver, as the shell was last told: only changes become commands."""

    def __init__(self, *, one_batch_a_checkpoint: bool) -> None:
        self._one_batch_a_checkpoint = one_batch_a_checkpoint
        self._told: AllowDelivery | None = None
        self.is_stopped = True

    def allow(self, fence: Instant, ledger: CheckpointLedger) -> tuple[AllowDelivery, ...]:
        """Let batches start. With one batch a checkpoint, only when no record is uncheckpointed."""
        allowed = ledger.delivered_max
        start_below = ledger.checkpointed_total + 1 if self._one_batch_a_checkpoint else allowed
        told = self._told
        if told is not None and (fence, start_below, allowed) == (
            told.fence,
            told.start_below,
            told.delivered_max,
        ):
            return ()
        self._told = AllowDelivery(fence, start_below, allowed)
        self.is_stopped = False
        return (self._told,)

    def stop(self) -> tuple[StopDelivery, ...]:
        """Stop new batches. It is stopped once DeliveryStopped says that no user code runs."""
        self._told = None
        self.is_stopped = False
        return (StopDelivery(),)


UNSAVED_END: Final = ProcessorFailed(
    "shard_ended",
    "returned without checkpointer.checkpoint(), which checkpoint: manual asks for",
    attempts=1,
)


def claimed(row: Lease) -> Report:
    return Report(ReportKind.CLAIMED, position=row.checkpoint, counter=row.counter)


def saved(row: Lease) -> Report:
    return Report(ReportKind.CHECKPOINTED, position=row.checkpoint, counter=row.counter)


def why_not_begun(row: Lease, *, has_waited: bool) -> str | None:
    """Why a claimed lease is not processed, or None."""
    if row.is_ended:  # by a write of the former process that landed late (trace H1)
        return "its shard has ended already"
    if row.taken_from is not None and not has_waited:
        return (
            f"it was taken by force from {row.taken_from}, which may still process it: the manager"
            " waits a failover and starts again [P18]"
        )
    return None


def given_away(change: GivingAway) -> Report:
    return Report(ReportKind.RELEASED, position=change.position, text=words_of(change))


def written_again(row: Lease) -> Report:
    return Report(
        ReportKind.WARNED,
        text="its row had vanished from the table and was written again, at"
        f" {row.checkpoint}: see who deletes rows of a running application",
    )


def records_expired(row: Lease) -> Report:
    """The shard was trimmed while its lease was held [P13]. The processed position is on its way to
    the row, if it is not there yet, so the loss begins behind `row`'s position at the earliest."""
    return Report(
        ReportKind.RECORDS_EXPIRED,
        position=row.checkpoint,
        text="the stream's retention passed before this shard was read to its end, and Kinesis has"
        f" deleted it: what it held after checkpoint {row.checkpoint} and was not processed is"
        " lost. The lease ends, and its children are read. To get the records back, replay them"
        " from their source; to prevent it, raise the retention above the longest time that a"
        " lease may be halted or behind",
    )


def children_expired(row: Lease) -> Report:
    """Children of the trimmed shard were trimmed, too, before they had a lease [P13]."""
    return Report(ReportKind.RECORDS_EXPIRED, position=row.checkpoint, text=CHILDREN_EXPIRED)


def failed(failure: ProcessorFailed) -> Report:
    return Report(
        ReportKind.FAILED,
        position=failure.position,
        text=failure.error,
        where=failure.where,
        attempts=failure.attempts,
        traceback_text=failure.traceback_text,
        raised_at=failure.raised_at,
        record=failure.record,
        is_host_fault=failure.is_host_fault,
    )


def broke(reason: str) -> Report:
    return Report(ReportKind.BROKE, text=reason)


def lost(reason: str) -> Report:
    return Report(ReportKind.LOST, text=reason)


def unclaimed(reason: str) -> Report:
    return Report(ReportKind.UNCLAIMED, text=reason)


def stuck_at_cap(ledger: CheckpointLedger) -> ProcessorFailed:
    """With manual checkpoints, only the processor can make room [I7]."""
    return ProcessorFailed(
        "process_records",
        f"{ledger.uncheckpointed} records were processed and none checkpointed:"
        " checkpoint: manual asks for checkpointer.checkpoint() before"
        " checkpoint.uncheckpointed_max is reached",
        attempts=1,
        position=ledger.processed,
    )


def stalled(stalled_s: float, *, in_user_code: bool) -> Report:
    """The lease thread stood still: user code held the GIL, or the whole process stood still."""
    if in_user_code:
        return Report(ReportKind.GIL_HELD, text="gil_held", seconds=stalled_s)
    return Report(ReportKind.WARNED, text="the process stood still", seconds=stalled_s)


class Warnings:
    """Reports each new trouble once, however often it repeats in a row."""

    def __init__(self) -> None:
        self._told = ""

    def once(self, reason: str) -> tuple[Report, ...]:
        if not reason or reason == self._told:
            return ()
        self._told = reason
        return (Report(ReportKind.WARNED, text=reason),)


Commands = list[do.Command]


class LeaseStateMachine:
    """The core: `handle` takes in events and returns commands; `check` holds the invariants."""

    def __init__(self, policy: LifePolicy, chance: Callable[[], float]) -> None:
        self.policy = policy
        self.state = State.CLAIMING
        self.own = LeaseWriter(policy.key, policy.me, policy.seen_counter, policy.failover_s)
        self.ledger = CheckpointLedger(TRIM_HORIZON, policy.uncheckpointed_max)
        self._chance = chance
        self._requests = CheckpointRequests()
        self._scheduler = WriteScheduler(policy, self.own, self._requests)
        self._writing = RowWriting(self.own, self._scheduler, chance)
        self._graceful = GracefulRelease(
            self.own, self._scheduler, others_in_sight=policy.others_in_sight
        )
        self._shard_end = ShardEnd(policy.key, ())
        self._is_withdrawn = False
        self._manager_gone = False
        self._permit = DeliveryPermit(one_batch_a_checkpoint=policy.checkpoint_mode == "batch")
        self._is_initialized = False
        self._failure: on.ProcessorFailed | None = None
        self._is_saved_at_end = False
        self._lost: LostLease | None = None
        self._output = OutputWatch()
        self._warnings = Warnings()

    @property
    def is_finished(self) -> bool:
        return self.state in FINAL

    @property
    def has_undone(self) -> bool:
        """Whether user code got records that no checkpoint covers: they are delivered again.

        With manual checkpoints, processed records count only where user code asked for a
        checkpoint.
        """
        late = self._lost.late if self._lost is not None else None
        if self.state in GIVEN_UP_WHOLE or (late is not None and late.has_applied):
            return False
        ledger = self.ledger
        is_asked_for = self._requests.highest is not None
        is_unsaved = self._scheduler.unacknowledged(ledger) > ledger.checkpointed
        return is_asked_for or is_unsaved or not ledger.is_idle

    def handle(self, event: on.Event, now: Instant) -> tuple[do.Command, ...]:
        """Take in an event and return the commands that follow. Raises: InvariantViolation."""
        out: Commands = []
        if is_expected(event, self.state):
            self._take_in(event, now, out)
        if self.state not in FINAL:
            if self._graceful.is_asked_for(self.state, now):
                self._withdraw(out)
            self._watch_time(now, out)
            if self.policy.is_manual:
                self._watch_cap()
            if self.own.pending is None and self.state not in SILENT:
                self._write_what_is_due(now, out)
            if self.state is State.PROCESSING and self.own.fence is not None:
                out.extend(self._permit.allow(self.own.fence, self.ledger))
        self.check()
        if out and self.own.pending is None:
            # A write that was given up within this call (the fence has passed) is not sent.
            out = [each for each in out if type(each) is not do.SendWrite]
        return tuple(out)

    def next_deadline(self, now: Instant) -> Instant:
        """When the next Ticked is due, at the latest."""
        if self.state is State.CLAIMING:
            return self.policy.expires_instant
        if self._lost is not None:
            return max(self._lost.deadline, now)
        deadline = Instant(now + renew_interval_s(self.own.failover_s))
        if self.own.fence is not None:
            deadline = min(deadline, self.own.fence)
            if self._must_leave_by is not None:
                deadline = min(deadline, self._must_leave_by)
            if self.own.pending is None:  # else nothing is due before its outcome
                due = self._scheduler.due_instant(self.ledger, renews=not self._manager_gone)
                deadline = deadline if due is None else min(deadline, due)
                if self.state is State.CREATING and not self._shard_end.is_looking:
                    deadline = min(deadline, self._shard_end.not_before)
        return max(deadline, now)

    def check(self) -> None:
        """The invariants that this core can see."""
        self.ledger.check()
        if self.own.row is not None:
            assert self.ledger.checkpointed <= self.own.row.checkpoint, "ledger ahead of its row"
        elif self.state not in {State.CLAIMING, State.UNCLAIMED}:
            raise InvariantViolation(f"state {self.state.value} without a claim [P4]")

    def _take_in(  # noqa: C901, PLR0912 - one case an event
        self, event: on.Event, now: Instant, out: Commands
    ) -> None:
        match event:
            case on.Ticked():
                pass  # due work follows every event
            case on.BatchDelivered(last, records, payload_bytes):
                self.ledger.deliver(last, records)
                self._scheduler.note_bytes(payload_bytes)
            case on.BatchProcessed(last):
                self.ledger.process(last)
            case on.RowsNotKept(change, message):
                # The shell sent nothing: handled as if the table had not been reached.
                self._output.failed(message, now)
                self._take_in(on.WriteResolved(change, Unavailable(message), now), now, out)
            case on.WriteResolved(changes.LateCheckpoint(), outcome):
                if self._lost is not None and self._lost.late is not None:
                    out.extend(self._lost.late.resolve(outcome, now, self._chance()))
            case on.WriteResolved() | on.OwnRowRead() | on.ReadFailed():
                self._take_in_answer(event, now, out)
            case on.Started() if now < self.policy.expires_instant:
                self._send(self._scheduler.claim(), out)
            case on.RowsRead(rows):
                self._shard_end.read(rows)
            case on.ShardsListed(shards):
                self._shard_end.list(shards)
            case on.LookUpFailed(message):
                self._put_children_off(message, now, out)
            case on.ShardExhausted(children, is_expired):
                if is_expired:
                    out.append(records_expired(self.own.confirmed))
                self._shard_end = ShardEnd(self.policy.key, children, is_expired=is_expired)
                self._move(Step.EXHAUSTED)
            case on.CheckpointRequested(request, position):
                self._take_in_request(request, position, out)
            case on.CallReturned() | on.ProcessorFailed() | on.DeliveryStopped():
                self._take_in_user_code(event, now, out)
            case on.DrainRequested() | on.ReleaseRequested() | on.ManagerGone():
                self._manager_gone |= isinstance(event, on.ManagerGone)
                self._withdraw(out)
            case on.OthersInSight(others):
                self._graceful.others_in_sight = others
            case on.FailoverChanged(failover_s):
                self.own.set_failover(failover_s, now)
            case on.ThreadStalled(stalled_s, in_user_code):
                out.append(stalled(stalled_s, in_user_code=in_user_code))

    def _take_in_answer(
        self, event: on.WriteResolved | on.OwnRowRead | on.ReadFailed, now: Instant, out: Commands
    ) -> None:
        # A process that leaves because of its host does not wait for its last checkpoint.
        is_leaving = self._failure is not None and self._failure.is_host_fault
        may_put_off = self.state in MAY_PUT_OFF or is_leaving
        verdict, commands = self._writing.take_in(event, now, may_put_off=may_put_off)
        out.extend(commands)
        if verdict is not None:
            self._follow(verdict, now, out)

    def _follow(self, verdict: Verdict, now: Instant, out: Commands) -> None:
        match verdict.kind:
            case VerdictKind.LOST:
                self._lose(verdict.reason, now, out)
                return
            case VerdictKind.HANDED_OVER:
                self._hand_over(verdict.reason, now, out)
            case VerdictKind.CONFIRMED:
                assert verdict.change is not None, "a confirmation names its change"
                self._confirmed(verdict.change, now, out)
            case VerdictKind.REDO:
                self._shard_end.begin_again(Instant(now + CHILDREN_RETRY_S))
        out.extend(self._warnings.once(verdict.reason))

    def _confirmed(self, change: OwnChange, now: Instant, out: Commands) -> None:
        match change:
            case changes.Claim():
                self._claimed(now, out)
            case changes.Renew():
                pass
            case changes.CreateLease(row):
                out.append(written_again(row))
            case changes.Checkpoint():
                self._saved(now, out)
            case changes.CreateChildren() if self.state is State.CREATING:  # not withdrawn
                self._move(Step.CHILDREN_CREATED)
            case changes.NameChildren():
                self._move(Step.CHILDREN_NAMED)
                out.append(do.CallShardEnded())
            case changes.End():
                out.extend(self._requests.answer(SHARD_END))
                report = do.Report(do.ReportKind.SHARD_ENDED, children=self._shard_end.child_ids)
                self._finish(Step.SHARD_END_WRITTEN, report, do.ExitCause.DONE, out)
            case changes.Release() | changes.Offer() | changes.HandOver():
                self._saved(now, out)
                report = given_away(change)
                self._finish(Step.RELEASE_WRITTEN, report, do.ExitCause.DONE, out)

    def _claimed(self, now: Instant, out: Commands) -> None:
        row = self.own.confirmed
        if (reason := why_not_begun(row, has_waited=self.policy.has_waited)) is not None:
            self._refuse(reason, out)
            return
        self.ledger = CheckpointLedger(row.checkpoint, self.policy.uncheckpointed_max)
        self._scheduler.begin(now)
        out.append(claimed(row))
        if self._is_withdrawn or self._graceful.is_asked_for(self.state, now):
            self._move(Step.WITHDRAWN)
            return
        self._move(Step.CLAIMED)
        out.append(do.CallInitialize(row))

    def _saved(self, now: Instant, out: Commands) -> None:
        """A position is durable on the row: ours, or a greater one that was there [P2]."""
        row = self.own.confirmed
        self._output.kept()
        self.ledger.confirm(row.checkpoint)
        self._scheduler.note_saved(now)
        # Reported first: if user code gets its answer and then raises, these records do not come
        # again.
        out.append(saved(row))
        out.extend(self._requests.answer(row.checkpoint))

    def _take_in_user_code(
        self,
        event: on.CallReturned | on.ProcessorFailed | on.DeliveryStopped,
        now: Instant,
        out: Commands,
    ) -> None:
        match self.state, event:
            case ((State.STOPPING | State.LOSING), on.DeliveryStopped()):
                # Asked for twice (drained, then lost), it is answered twice.
                if not self._permit.is_stopped:
                    self._permit.is_stopped = True
                    self._say_goodbye(now, out)
            case ((State.STOPPING | State.LOSING), _) if not self._permit.is_stopped:
                # `initialize` or `shard_ended` returned after the lease was withdrawn or lost.
                self._is_initialized |= isinstance(event, on.CallReturned)
            case ((State.STOPPING | State.LOSING), _):
                if isinstance(event, on.ProcessorFailed):
                    out.extend(self._warnings.once(f"{event.where} raised {event.error}"))
                self._part()
            case State.INITIALIZING, on.CallReturned():
                self._is_initialized = True
                self._scheduler.note_saved(now)
                self._move(Step.READY)
            case State.CLOSING, on.CallReturned():
                self._close()
            case _, on.ProcessorFailed():
                self._fail(event)

    def _close(self) -> None:
        if self.policy.is_manual and not self._is_saved_at_end:
            self._fail(UNSAVED_END)
        else:
            self._move(Step.CLOSED)

    def _say_goodbye(self, now: Instant, out: Commands) -> None:
        """User code is idle: make its last call, if it ever began; then write for a lost lease."""
        if not self._is_initialized:
            self._part()
        else:
            is_orderly = self.state is State.STOPPING
            out.append(do.CallShutdownRequested() if is_orderly else do.CallLeaseLost())
        if self._lost is not None and self._failure is None:
            late = self._scheduler.late_checkpoint(self.ledger)
            out += [self._lost.save_late(late, now)] if late is not None else []

    def _part(self) -> None:
        """User code has finished."""
        if self._lost is not None:
            self._lost.user_code_is_done = True
        else:
            self._move(Step.STOPPED)

    def _take_in_request(
        self, request: int, position: ExtendedSequenceNumber | None, out: Commands
    ) -> None:
        if self.state is State.CLOSING and position in {None, self.ledger.delivered}:
            self._is_saved_at_end = True
        out.extend(self._requests.admit(request, position, self.ledger))

    def _move(self, step: Step) -> None:
        try:
            self.state = TRANSITIONS[self.state][step]
        except KeyError:
            raise InvariantViolation(
                f"lease {self.policy.key}: {step.value} in state {self.state.value}"
            ) from None

    def _withdraw(self, out: Commands) -> None:
        """Give the lease up in good order, from every state that allows it.

        A claim under way is waited for. A shard whose children exist is ended: that takes less
        time.
        """
        self._is_withdrawn = True
        if self.state in MAY_WITHDRAW:
            self._move(Step.WITHDRAWN)
            out.extend(self._permit.stop())

    def _hand_over(self, reason: str, now: Instant, out: Commands) -> None:
        """The row names the next owner already [R8]: finish the batch within the current fence.

        From here on only the handover can be written, not even a checkpoint that user code waits
        for. So an end under way, or a halt, is left to the next owner.
        """
        self._withdraw(out)
        if self.state not in {State.STOPPING, State.RELEASING}:
            self._lose(reason, now, out)
            return
        out.extend(self._requests.refuse_all(reason))

    def _fail(self, failure: on.ProcessorFailed) -> None:
        self._failure = failure
        self._move(Step.FAILED)

    def _lose(
        self, reason: str, now: Instant, out: Commands, *, is_host_fault: bool = False
    ) -> None:
        if self.state is State.CLAIMING:
            self._refuse(reason, out)
            return
        self._move(Step.LOST)
        self.own.give_up()
        let_go_instant = now if self._manager_gone else Instant(now + LOST_GRACE_S)
        self._lost = LostLease(reason, let_go_instant, is_host_fault=is_host_fault)
        out.extend(self._requests.refuse_all(reason))
        out.extend(self._permit.stop())

    def _refuse(self, reason: str, out: Commands) -> None:
        self.own.give_up()
        self._finish(Step.REFUSED, unclaimed(reason), do.ExitCause.UNCLAIMED, out)

    def _finish(self, step: Step, report: do.Report, cause: do.ExitCause, out: Commands) -> None:
        self._move(step)
        out.extend(self._requests.refuse_all(f"the lease is {self.state.value}"))
        out += [report, do.Exit(cause)]

    def _watch_time(self, now: Instant, out: Commands) -> None:
        if self.state is State.CLAIMING:
            if now >= self.policy.expires_instant:
                self._refuse("its start command expired before the claim succeeded [P4]", out)
        elif self._lost is not None:
            if self._lost.is_over(now):
                self._let_go(self._lost, out)
        elif self._must_leave_by is not None and now >= self._must_leave_by:
            self._lose(self._output.words, now, out, is_host_fault=True)
        elif self.own.fence is not None and now >= self.own.fence:
            # After a standstill of the host or the process its length explains much, so it is
            # reported.
            ago_s = now - self.own.fence
            trouble = self.own.trouble  # of a row that is not written, or of its output
            what = f"could not be written in time ({trouble})" if trouble else "was not renewed"
            self._lose(f"its row {what}: its fence passed {ago_s:.1f} s ago [P7]", now, out)

    def _let_go(self, lost_lease: LostLease, out: Commands) -> None:
        """Stop waiting. The report says whether the lease or the host is the cause."""
        if lost_lease.is_host_fault:
            self._finish(Step.LET_GO, broke(lost_lease.words), do.ExitCause.HOST, out)
        else:
            self._finish(Step.LET_GO, lost(lost_lease.words), do.ExitCause.LOST, out)

    @property
    def _must_leave_by(self) -> Instant | None:
        """When another host should get the lease, because the output of ours keeps no rows."""
        is_wanted = self.state is State.PROCESSING and self._graceful.others_in_sight
        return self._output.give_up_instant if is_wanted else None

    def _watch_cap(self) -> None:
        """With manual checkpoints only the processor can lift the cap: fail instead of hanging."""
        is_stuck = self.ledger.is_full and self.ledger.is_idle and self._requests.highest is None
        if self.state is State.PROCESSING and is_stuck:
            self._fail(stuck_at_cap(self.ledger))

    def _write_what_is_due(self, now: Instant, out: Commands) -> None:
        """Send the next write. None is under way, and a claimed row is ours to write."""
        if self.own.row is None:
            return
        change = None if self.state is State.PROCESSING else self._change_of_state(now, out)
        if change is None and self.own.next_owner is not None:
            return
        if change is None:
            change = self._scheduler.checkpoint(self.state, self.ledger, now)
        if change is None and self.state is State.FAILING:
            assert self._failure is not None, "failing without a failure"
            is_host_fault = self._failure.is_host_fault
            cause = do.ExitCause.HOST if is_host_fault else do.ExitCause.FAILED
            self._finish(Step.SETTLED, failed(self._failure), cause, out)
            return
        if change is None and not self._manager_gone and self._scheduler.is_renewal_due(now):
            change = self._scheduler.renewal(now, drops_ask=self._graceful.drops_ask(now))
        if change is not None:
            self._send(change, out)

    def _change_of_state(self, now: Instant, out: Commands) -> OwnChange | None:
        """The write that the current state waits for."""
        match self.state:
            case State.CREATING:
                return self._creation(now, out)
            case State.NAMING:
                return self._scheduler.naming(self._shard_end.child_ids)
            case State.ENDING:
                return self._scheduler.end()
            case State.RELEASING:
                return self._graceful.last_write(self.ledger, now)
            case _:
                return None

    def _creation(self, now: Instant, out: Commands) -> OwnChange | None:
        step = self._shard_end.next_step(self.own.confirmed, now, self.own.failover_s)
        if isinstance(step, changes.CreateChildren | ChildrenExist) and (
            self._shard_end.tells_lost_children(self.own.confirmed)
        ):
            out.append(children_expired(self.own.confirmed))
        match step:
            case changes.CreateChildren() as creation:
                return creation
            case ChildrenExist():
                self._move(Step.CHILDREN_CREATED)
                if self._shard_end.child_ids:
                    return self._scheduler.naming(self._shard_end.child_ids)
                self._move(Step.CHILDREN_NAMED)  # the children were trimmed, too: none to name
                out.append(do.CallShardEnded())
            case Deferred(reason):
                self._put_children_off(reason, now, out)
            case do.ReadRows() | do.ListShards() as question:
                out.append(question)
        return None

    def _put_children_off(self, reason: str, now: Instant, out: Commands) -> None:
        out.extend(self._warnings.once(reason))
        self._shard_end.begin_again(Instant(now + CHILDREN_RETRY_S))

    def _send(self, change: OwnChange, out: Commands) -> None:
        out.append(do.SendWrite(self.own.begin(change)))
