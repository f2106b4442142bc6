"""Decides every next step of one lease in its process; `LeaseStateMachine` is the core.

Must not know: clocks, threads, sockets, DynamoDB. `now` and `chance` are arguments. Rule: the
outcome of every command comes back as an event, whatever the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kclrun.errors import InvariantViolation
from kclrun.lease import commands, events
from kclrun.lease.checkpoints import (
    EARLY_SHARE,
    CheckpointLedger,
    CheckpointRequests,
    DeliveryPermit,
    stuck_at_cap,
)
from kclrun.lease.commands import ExitCause
from kclrun.lease.lease_writer import (
    Answer,
    LeaseWriter,
    VerdictKind,
    WriteVerdict,
    stalled,
    why_not_begun,
    written_again,
)
from kclrun.lease.outputs import OutputCommits, moved_past_outputs, wanted_commit
from kclrun.lease.policy import LeasePolicy, LoadMeter
from kclrun.lease.shard_end import (
    CHILDREN_RETRY_S,
    LOST_GRACE_S,
    ChildrenExist,
    Deferred,
    GracefulRelease,
    LostLease,
    OutputWatch,
    ShardEnd,
    children_expired,
    given_away,
    late_checkpoint,
    records_expired,
)
from kclrun.lease.states import (
    EXPECTED,
    FINAL,
    GIVEN_UP_WHOLE,
    MAY_BE_REFUSED,
    MAY_PUT_OFF,
    MAY_WITHDRAW,
    SILENT,
    TRANSITIONS,
    State,
    Transition,
    require_late,
)
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol import reports, writes
from kclrun.protocol.fence import renew_interval_s
from kclrun.protocol.reports import OUTPUT, ProcessorFailed, Report

Commands = tuple[commands.Command, ...]


class LeaseStateMachine:
    """The core: `handle` takes in events and returns commands; `check` holds the invariants.
    `cpu_s` returns the CPU seconds that the lease process has used since its start."""

    def __init__(
        self,
        policy: LeasePolicy,
        chance: Callable[[], float],
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.policy = policy
        self.state = State.CLAIMING
        self.own = LeaseWriter(
            policy.key,
            policy.me,
            policy.seen_counter,
            policy.failover_s,
            chance,
            adopts=not policy.has_storing_outputs,
        )
        self.ledger = CheckpointLedger(TRIM_HORIZON, policy.checkpoint.uncheckpointed_max)
        self._chance = chance
        self._is_manual = policy.is_manual
        self._requests = CheckpointRequests(is_manual=policy.is_manual)
        self._graceful = GracefulRelease(self.own, others_in_sight=policy.others_in_sight)
        self.commits = OutputCommits(policy)
        self._shard_end = ShardEnd(policy)
        self._is_withdrawn = False
        self._keeps_lease = False  # withdrawn for a restart only: the row stays ours
        self._manager_gone = False
        self._permit = DeliveryPermit(one_batch_a_checkpoint=policy.checkpoint.mode == "batch")
        self._metering = LoadMeter(cpu_s)
        self._saved_instant = Instant(0.0)
        self._put_off_until = Instant(0.0)  # the last checkpoint failed: no other before this
        self._is_initialized = False
        self._failure: ProcessorFailed | None = None
        self._lost: LostLease | None = None
        self._output = OutputWatch()
        self._warned = ""

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
        ledger = self.ledger
        if self.state in GIVEN_UP_WHOLE or (late is not None and late.has_applied):
            # An output may have had too much to send before the lease was given away.
            return (
                self.state is State.RELEASED and self._covered(ledger.processed) < ledger.processed
            )
        is_asked_for = self._requests.highest is not None
        is_unsaved = self._requests.unacknowledged(ledger) > ledger.checkpointed
        return is_asked_for or is_unsaved or not ledger.is_idle

    def handle(self, event: events.Event, now: Instant) -> Commands:
        """Take in an event and return the commands that follow. Raises: InvariantViolation."""
        result: Commands = ()
        if self.state in EXPECTED[type(event)]:
            result = self._take_in(event, now)
        else:
            require_late(event, self.state)
        if self.state not in FINAL:
            if self._look_for_ask(now):
                result += self._withdraw()
            elif self.state is State.PROCESSING and self._is_paused:
                result += self._withdraw(keeps_lease=True)
            result += self._watch_time(now)
            if self._is_manual:
                self._watch_cap()
            if self.own.in_flight.change is None and self.state not in SILENT:
                result += self._write_what_is_due(now)
            may_begin = self.state is State.PROCESSING and self.commits.has_begun
            if may_begin and self.own.fence is not None:
                result += self._permit.allow(self.own.fence, self.ledger)
        self.check()
        if result and self.own.in_flight.change is None:
            # A write that was given up within this call (the fence has passed) is not sent.
            return tuple(command for command in result if type(command) is not commands.SendWrite)
        return result

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
            if self.commits.leave_instant is not None and now < self.commits.leave_instant:
                deadline = min(deadline, self.commits.leave_instant)
            if self.own.in_flight.change is None:  # else nothing is due before its outcome
                due = self._due_instant()
                deadline = deadline if due is None else min(deadline, due)
                if self.state is State.CREATING and not self._shard_end.is_looking:
                    deadline = min(deadline, self._shard_end.not_before)
        return max(deadline, now)

    def check(self) -> None:
        """The invariants that this core can see."""
        ledger, row = self.ledger, self.own.row
        assert ledger.checkpointed_total <= ledger.delivered_total, "counts out of step"
        # Equal is the usual case, and compared in C.
        assert ledger.processed == ledger.delivered or ledger.processed < ledger.delivered, (
            "processed beyond delivered [I2b]"
        )
        if row is not None:
            assert ledger.checkpointed == row.checkpoint or ledger.checkpointed < row.checkpoint, (
                "ledger ahead of its row"
            )
        elif self.state not in {State.CLAIMING, State.UNCLAIMED}:
            raise InvariantViolation(f"state {self.state.value} without a claim [P4]")

    def _take_in(  # noqa: C901, PLR0912 - one case an event
        self, event: events.Event, now: Instant
    ) -> Commands:
        match event:
            case events.BatchDelivered(last, records, payload_bytes):
                self.ledger.deliver(last, records)
                self._metering.deliver(payload_bytes)
            case events.BatchProcessed(last):
                self.ledger.process(last)
            case events.RowsNotKept(change, message):
                # The shell sent nothing: handled as if the table had not been reached.
                self._output.failed(message, now)
                unsent = events.WriteResolved(change, writes.Unavailable(message), now)
                return self._take_in(unsent, now)
            case _ if isinstance(event, events.OfOutputs):
                return self._take_in_outputs(event, now)
            case events.WriteResolved(writes.LateCheckpoint(), outcome):
                if self._lost is not None and self._lost.late is not None:
                    return self._lost.late.resolve(outcome, now, self._chance())
            case events.WriteResolved() | events.OwnRowRead() | events.ReadFailed():
                return self._take_in_answer(event, now)
            case events.Started() if now < self.policy.expires_instant:
                own = self.own  # the claim expects the counter of the manager's take [P4]
                return self._send(
                    writes.Claim(own.key, own.me, own.counter, self.policy.has_waited)
                )
            case events.RowsRead(rows):
                self._shard_end.read(rows)
            case events.ShardsListed(shards):
                self._shard_end.list(shards, self.own.confirmed)
            case events.LookUpFailed(message):
                return self._put_children_off(message, now)
            case events.ShardExhausted(children, is_expired):
                self._shard_end.exhaust(children, is_expired=is_expired)
                self._move(Transition.EXHAUSTED)
                if is_expired:
                    return (records_expired(self.own.confirmed),)
            case events.CheckpointRequested(request, position):
                return self._requests.admit(request, position, self.ledger)
            case events.CallReturned() | ProcessorFailed() | events.DeliveryStopped():
                return self._take_in_user_code(event, now)
            case events.DrainRequested() | events.ReleaseRequested() | events.ManagerGone():
                self._manager_gone |= isinstance(event, events.ManagerGone)
                return self._withdraw()
            case events.RestartRequested() if self.state is State.PROCESSING:
                return self._withdraw(keeps_lease=True)
            case events.OthersInSight(others):
                self._graceful.others_in_sight = others
            case events.FailoverChanged(failover_s):
                self.own.set_failover(failover_s, now)
            case events.ThreadStalled(stalled_s, in_user_code):
                return (stalled(stalled_s, in_user_code=in_user_code),)
            case events.Started() | events.RestartRequested() | events.Ticked():
                pass  # a start that expired, a restart without effect
            case _:
                assert_never(event)
        return ()  # due work follows every event, and is all that follows Ticked

    def _take_in_outputs(self, event: events.OfOutputs, now: Instant) -> Commands:
        match event:
            case events.OutputsBegan(position, cursors, version):
                if self.state in {State.INITIALIZING, State.PROCESSING}:
                    self.commits.begin(position, cursors, version)
                    self.ledger.adopt(position)
            case events.OutputsCommitted(upto, cursors, answers, version):
                self.commits.commit(upto, cursors, answers, now, version)
            case events.OutputsNotCommitted(_, message):
                self.commits.failure = message
                return self._warn_once(message)
            case events.OutputsRefused(message):
                self.commits.refused = ProcessorFailed(OUTPUT, message, attempts=1)
            case events.OutputsSuperseded(message) if self.state is not State.LOSING:
                return self._lose(message, now, begins_again=True)
            case events.OutputsSuperseded():
                pass  # it is lost already
            case _:
                assert_never(event)
        return ()

    def _take_in_answer(self, answer: Answer, now: Instant) -> Commands:
        verdict = self.own.take_in(answer, now)
        if verdict is None:
            return ()
        match verdict.kind:
            case VerdictKind.LOST | VerdictKind.MOVED:
                is_moved = verdict.kind is VerdictKind.MOVED
                return self._lose(verdict.reason, now, begins_again=is_moved)
            case VerdictKind.CONFIRMED:
                assert verdict.change is not None, "a confirmation names its change"
                result = self._confirmed(verdict.change, now)
            case VerdictKind.AGAIN:
                result = self._send_again(verdict, now)
            case VerdictKind.READ_BACK:
                result = (commands.ReadOwnRow(verdict.not_before),)
            case VerdictKind.HANDED_OVER:
                result = self._hand_over(verdict.reason, now)
            case VerdictKind.REDO:
                self._shard_end.begin_again(Instant(now + CHILDREN_RETRY_S))
                result = ()
            case _:
                assert_never(verdict.kind)
        return result + self._warn_once(verdict.reason)

    def _send_again(self, verdict: WriteVerdict, now: Instant) -> Commands:
        """Send the change again after its pause. A renewal may go before a checkpoint that fails,
        where the state allows it: a full disk costs no lease."""
        assert verdict.change is not None, "a repetition names its change"
        assert verdict.not_before is not None, "a repetition names its instant"
        at = verdict.not_before
        # A process that leaves because of its host does not wait for its last checkpoint.
        is_leaving = self._failure is not None and self._failure.is_host_fault
        may_put_off = self.state in MAY_PUT_OFF or is_leaving or self._keeps_lease
        is_checkpoint = isinstance(verdict.change, writes.Checkpoint)
        if at > now and is_checkpoint and may_put_off and self.own.in_flight.withdraw():
            self._put_off_until = at
            return ()
        return (commands.SendWrite(verdict.change, at),)

    def _confirmed(self, change: writes.Change, now: Instant) -> Commands:
        match change:
            case writes.Claim():
                return self._claimed(now)
            case writes.CreateLease(row):
                return (written_again(row),)
            case writes.Checkpoint():
                return self._saved(now)
            case writes.CreateChildren():
                if self.state is State.CREATING:  # not withdrawn
                    self._move(Transition.CHILDREN_CREATED)
            case writes.NameChildren():
                self._move(Transition.CHILDREN_NAMED)
                return (commands.CallShardEnded(),)
            case writes.End():
                ended = reports.ShardEnded(self._shard_end.child_ids)
                answers = self._requests.answer(SHARD_END)
                return answers + self._finish(Transition.SHARD_END_WRITTEN, ended, ExitCause.DONE)
            case writes.Release() | writes.Offer() | writes.HandOver():
                saved = self._saved(now)
                released = given_away(change)
                return saved + self._finish(Transition.RELEASE_WRITTEN, released, ExitCause.DONE)
            case writes.Renew() | writes.Take() | writes.HaltLease():
                pass  # all but the renewal are writes of managers
            case _:
                assert_never(change)
        return ()

    def _claimed(self, now: Instant) -> Commands:
        row = self.own.confirmed
        if (reason := why_not_begun(row, has_waited=self.policy.has_waited)) is not None:
            return self._refuse(reason)
        self.ledger = CheckpointLedger(row.checkpoint, self.policy.checkpoint.uncheckpointed_max)
        self.commits.claim(row)
        self._saved_instant = now
        self._metering.begin(now)
        claimed = reports.LeaseClaimed(row.counter, row.checkpoint)
        if self._is_withdrawn or self._look_for_ask(now):
            self._move(Transition.WITHDRAWN)
            return (claimed,)
        self._move(Transition.CLAIMED)
        if self.policy.has_storing_outputs and row.is_moved_past_outputs:
            self._fail(moved_past_outputs(row))
            return (claimed,)
        return (claimed, commands.CallInitialize(row))

    def _saved(self, now: Instant) -> Commands:
        """A position is durable on the row: ours, or a greater one that was there [P2]."""
        row = self.own.confirmed
        self._output.kept()
        self.ledger.confirm(row.checkpoint)
        self._saved_instant = now
        # The report comes first: if user code gets its answer and then raises, the records up to
        # the checkpoint are not delivered again.
        saved = reports.Checkpointed(row.checkpoint, row.counter)
        return (saved, *self._requests.answer(row.checkpoint))

    def _take_in_user_code(
        self, event: events.CallReturned | ProcessorFailed | events.DeliveryStopped, now: Instant
    ) -> Commands:
        match self.state, event:
            case ((State.STOPPING | State.LOSING), events.DeliveryStopped()):
                # A stop that was requested twice (drained, then lost) is answered twice.
                if not self._permit.is_stopped:
                    self._permit.is_stopped = True
                    return self._make_last_call(now)
            case ((State.STOPPING | State.LOSING), _) if not self._permit.is_stopped:
                # `initialize` or `shard_ended` returned after the lease was withdrawn or lost.
                self._is_initialized |= isinstance(event, events.CallReturned)
            case ((State.STOPPING | State.LOSING), _):
                self._user_code_finished()
                if isinstance(event, ProcessorFailed):
                    return self._warn_once(f"{event.where} raised {event.error}")
            case State.INITIALIZING, events.CallReturned():
                self._is_initialized = True
                self._saved_instant = now
                self._move(Transition.READY)
            case State.CLOSING, events.CallReturned():
                self._move(Transition.CLOSED)
            case _, ProcessorFailed():
                self._fail(event)
        return ()

    def _make_last_call(self, now: Instant) -> Commands:
        """User code is idle: make its last call, if `initialize` returned; then write the late
        checkpoint of a lost lease."""
        last_call: Commands = ()
        if not self._is_initialized:
            self._user_code_finished()
        elif self.state is State.STOPPING:
            last_call = (commands.CallShutdownRequested(),)
        else:
            last_call = (commands.CallLeaseLost(),)
        if self._lost is None or self._lost.begins_again or self._failure is not None:
            return last_call
        last = self.ledger.checkpointed
        position = self._covered(self._requests.unacknowledged(self.ledger))
        late = late_checkpoint(self.own, self.commits, position, last, self.policy)
        return last_call if late is None else (*last_call, self._lost.save_late(late, now))

    def _user_code_finished(self) -> None:
        """No call of user code follows."""
        if self._lost is not None:
            self._lost.user_code_is_done = True
        else:
            self._move(Transition.STOPPED)

    def _covered(self, position: ExtendedSequenceNumber) -> ExtendedSequenceNumber:
        """How far the row's checkpoint may go now, on the way to `position`. With manual
        checkpoints nothing lies between two positions that the processor asked for."""
        saved = self.ledger.checkpointed
        confirmed = saved if self._is_manual else max(saved, self.commits.confirmed)
        return self.commits.covered(position, confirmed, saved)

    def _move(self, step: Transition) -> None:
        try:
            self.state = TRANSITIONS[self.state][step]
        except KeyError:
            raise InvariantViolation(
                f"lease {self.policy.key}: {step.value} in state {self.state.value}"
            ) from None

    def _look_for_ask(self, now: Instant) -> bool:
        """Take in a handoff request on the row; nearly always there is none. Returns: whether it is
        to be answered."""
        row = self.own.row
        if (row is None or row.handoff is None) and self._graceful.ask is None:
            return False
        return self._graceful.look_for_ask(self.state, now)

    @property
    def _is_paused(self) -> bool:
        """Whether an operator paused the lease after the start of this process."""
        return self.own.row is not None and self.own.row.pause not in {None, self.policy.past_pause}

    def _withdraw(self, *, keeps_lease: bool = False) -> Commands:
        """Give the lease up in good order, or keep it and only end the process, in every state that
        allows it. A claim under way is awaited. A shard whose children exist is ended instead: that
        takes less time."""
        self._is_withdrawn, self._keeps_lease = True, keeps_lease
        if self.state not in MAY_WITHDRAW:
            return ()
        self._move(Transition.WITHDRAWN)
        return self._permit.stop()

    def _hand_over(self, reason: str, now: Instant) -> Commands:
        """The row names the next owner already [R8]: finish the batch within the current fence.

        From here on only the handover can be written, not even a checkpoint that user code waits
        for. So an end under way, or a halt, is left to the next owner.
        """
        stopped = self._withdraw()
        if self.state not in {State.STOPPING, State.RELEASING}:
            return stopped + self._lose(reason, now)
        return stopped + self._requests.refuse_all(reason)

    def _fail(self, failure: ProcessorFailed) -> None:
        self._failure = failure
        self._move(Transition.FAILED)

    def _lose(
        self, reason: str, now: Instant, *, is_host_fault: bool = False, begins_again: bool = False
    ) -> Commands:
        if self.state is State.CLAIMING:
            return self._refuse(reason)
        self._move(Transition.LOST)
        self.own.in_flight.end()
        let_go_instant = now if self._manager_gone else Instant(now + LOST_GRACE_S)
        self._lost = LostLease(
            reason, let_go_instant, is_host_fault=is_host_fault, begins_again=begins_again
        )
        return self._requests.refuse_all(reason) + self._permit.stop()

    def _refuse(self, reason: str) -> Commands:
        self.own.in_flight.end()
        return self._finish(Transition.REFUSED, reports.StartUnclaimed(reason), ExitCause.UNCLAIMED)

    def _finish(self, step: Transition, report: Report, cause: ExitCause) -> Commands:
        self._move(step)
        answers = self._requests.refuse_all(f"the lease is {self.state.value}")
        return (*answers, report, commands.Exit(cause))

    def _watch_time(self, now: Instant) -> Commands:
        own = self.own
        if self.state is State.CLAIMING:
            if now >= self.policy.expires_instant:
                return self._refuse("its start command expired before the claim succeeded [P4]")
        elif self._lost is not None:
            if self._lost.is_over(now):
                return self._finish(Transition.LET_GO, self._lost.report, self._lost.cause)
        elif self._must_leave_by is not None and now >= self._must_leave_by:
            return self._lose(self._output.words, now, is_host_fault=True)
        elif own.fence is not None and now >= own.fence:
            # How long ago the fence passed shows a standstill of the host or of the process.
            ago_s = now - own.fence
            trouble = own.trouble  # why the row, or its output, could not be written
            what = f"could not be written in time ({trouble})" if trouble else "was not renewed"
            return self._lose(f"its row {what}: its fence passed {ago_s:.1f} s ago [P7]", now)
        return ()

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

    def _warn_once(self, reason: str) -> Commands:
        """Report a new trouble once, however often it repeats in a row."""
        if not reason or reason == self._warned:
            return ()
        self._warned = reason
        return (reports.ProcessWarned(reason),)

    def _write_what_is_due(self, now: Instant) -> Commands:
        """Send the next write. None is in flight, and a claimed row is ours to write."""
        own = self.own
        if own.row is None:
            return ()
        if not self.policy.has_outputs:
            return self._write(now)
        if self.commits.refused is not None and self.state in MAY_BE_REFUSED:
            self._fail(self.commits.refused)
        return self._ask_outputs(now) + self.commits.give_up(now) + self._write(now)

    def _write(self, now: Instant) -> Commands:
        own = self.own
        if self.state is State.CREATING:
            creation = self._create_children(now)
            if own.in_flight.change is not None or self.state is not State.CREATING:
                return creation
            return creation + self._save_or_renew(now)
        change = None if self.state is State.PROCESSING else self._change_of_state(now)
        return self._save_or_renew(now) if change is None else self._send(change)

    def _ask_outputs(self, now: Instant) -> Commands:
        """Ask the outputs for the rows that the next checkpoint covers [K5]."""
        final = self._requests.final_position(self.ledger)
        if self.state in {State.FAILING, State.RELEASING}:
            is_renewed = not self._manager_gone and self.own.next_owner is None
            self.commits.leave(final, now, None if is_renewed else self.own.fence)
        is_urgent = self.policy.checkpoint.mode == "batch" or self.ledger.is_full
        due = self.ledger.processed if self._must_save(now) else None
        asked_for = self._requests.highest
        wanted = wanted_commit(self.state, final, asked_for, due, is_urgent=is_urgent)
        return () if wanted is None else self.commits.ask(wanted, now)

    def _save_or_renew(self, now: Instant) -> Commands:
        """Send the checkpoint or the renewal that is due; after its last one a halt is over."""
        own = self.own
        if own.next_owner is not None:
            return ()
        change: writes.Change | None = self._due_checkpoint(now)
        is_last = self.state is State.RELEASING and not self._has_last_checkpoint_to_write
        if is_last and not self.commits.is_last_awaited(now):
            kept = reports.LeaseKept(self._is_paused)
            return self._finish(Transition.RELEASE_WRITTEN, kept, ExitCause.DONE)
        if change is None and self.state is State.FAILING and not self.commits.is_last_awaited(now):
            assert self._failure is not None, "failing without a failure"
            cause = ExitCause.HOST if self._failure.is_host_fault else ExitCause.FAILED
            return self._finish(Transition.SETTLED, self._failure, cause)
        if change is None and not self._manager_gone:
            assert own.renewal_instant is not None, "no renewal before the claim"
            if now >= own.renewal_instant:
                # The heartbeat. It also removes an ask that is not answered [P16].
                kbps, load = self._metering.throughput_kbps(now), self._metering.load(now)
                drops_ask = self._graceful.drops_ask(now)
                change = writes.Renew(own.key, own.me, own.counter, kbps, drops_ask, load)
        return () if change is None else self._send(change)

    @property
    def _has_last_checkpoint_to_write(self) -> bool:
        """Whether a process that keeps its lease still has a checkpoint to write."""
        final = self._covered(self._requests.final_position(self.ledger))
        return final > self.own.confirmed.checkpoint

    def _change_of_state(self, now: Instant) -> writes.Change | None:
        """The write that the current state waits for."""
        own = self.own
        match self.state:
            case State.NAMING:
                children = frozenset(self._shard_end.child_ids)
                return writes.NameChildren(own.key, own.me, own.counter, children)
            case State.ENDING if not self.policy.has_outputs or self.commits.confirmed == SHARD_END:
                kept = self.commits.to_write(own.confirmed, SHARD_END)
                return writes.End(own.key, own.me, own.counter, own.confirmed.checkpoint, *kept)
            case State.RELEASING if not self._keeps_lease and not self.commits.is_last_awaited(now):
                position = self._covered(self._requests.final_position(self.ledger))
                return self._graceful.last_write(position, self.commits, now)
            case _:
                return None

    def _create_children(self, now: Instant) -> Commands:
        own, shard_end = self.own, self._shard_end
        step = shard_end.next_step(own.confirmed, now, own.failover_s)
        result: Commands = ()
        if isinstance(
            step, writes.CreateChildren | ChildrenExist
        ) and shard_end.must_report_lost_children(own.confirmed):
            result = (children_expired(own.confirmed),)
        match step:
            case writes.CreateChildren():
                return result + self._send(step)
            case ChildrenExist():
                self._move(Transition.CHILDREN_CREATED)
                if shard_end.child_ids:
                    return result + self._write_what_is_due(now)
                # The children were trimmed, too: there is none to name.
                self._move(Transition.CHILDREN_NAMED)
                return (*result, commands.CallShardEnded(), *self._save_or_renew(now))
            case Deferred(reason):
                return self._put_children_off(reason, now)
            case commands.ReadRows() | commands.ListShards() as question:
                return (question,)
            case None:
                return ()
            case _:
                assert_never(step)

    def _put_children_off(self, reason: str, now: Instant) -> Commands:
        self._shard_end.begin_again(Instant(now + CHILDREN_RETRY_S))
        return self._warn_once(reason)

    def _send(self, change: writes.Change) -> Commands:
        self.own.in_flight.begin(change)
        return (commands.SendWrite(change),)

    def _due_checkpoint(self, now: Instant) -> writes.Checkpoint | None:
        """The checkpoint that is due: asked for, by time, by number, or before a halt."""
        wanted, ledger = self._requests.highest, self.ledger
        if wanted is None and not ledger.has_unsaved:
            return None
        if self._must_save(now):
            wanted = ledger.processed if wanted is None else max(wanted, ledger.processed)
        if wanted is not None:
            wanted = self._covered(wanted)
        if wanted is None or wanted <= ledger.checkpointed or now < self._put_off_until:
            return None
        row, held = self.own.confirmed, (self.own.key, self.own.me, self.own.counter)
        # A renewal may have shown a late checkpoint of a former owner: never write a lower one
        # (N1).
        position = max(wanted, row.checkpoint)
        load = self._metering.load(now)
        kept = self.commits.to_write(row, position)
        return writes.Checkpoint(*held, position, row.checkpoint, load, *kept)

    def _must_save(self, now: Instant) -> bool:
        policy, ledger = self.policy, self.ledger
        if self._is_manual or not ledger.has_unsaved:
            return False
        if self.state in {State.FAILING, State.RELEASING}:
            return True
        if policy.checkpoint.mode == "batch" and ledger.has_uncounted:
            return True
        uncheckpointed = ledger.delivered_total - ledger.checkpointed_total
        if uncheckpointed >= policy.checkpoint.uncheckpointed_max * EARLY_SHARE:
            return True
        return now >= self._saved_instant + policy.checkpoint.every_s

    def _due_instant(self) -> Instant | None:
        """When the next write may be due, while none is in flight."""
        if self.own.next_owner is not None:
            return None  # no write before the batch has ended
        renewing = None if self._manager_gone else self.own.renewal_instant
        wanted = self._requests.highest
        if self.policy.has_outputs and wanted is not None and wanted > self.commits.confirmed:
            again = self.commits.again_instant
            return min(
                (instant for instant in (renewing, again) if instant is not None), default=None
            )
        if self.policy.checkpoint.mode != "auto" or not self.ledger.has_unsaved:
            return renewing
        due = Instant(self._saved_instant + self.policy.checkpoint.every_s)
        asking = self.commits.next_ask_instant(self.ledger.checkpointed)
        if asking is None:
            return renewing
        saving = max(due, self._put_off_until, asking)
        return saving if renewing is None else min(renewing, saving)
