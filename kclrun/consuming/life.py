"""One lease's life in its process: what to do next, decided here and nowhere else.

Knows: the states (`states.py`), the own row (`own_row.py`), the ledger, what is due (`agenda.py`),
the shard's end. May not know: clocks, threads, sockets, DynamoDB. `now` and `chance` are given.
Rule: every command's outcome comes back as an event, whatever the outcome.
"""

from __future__ import annotations

from collections.abc import Callable

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming import reports
from kclrun.consuming.agenda import Agenda
from kclrun.consuming.expectations import is_expected
from kclrun.consuming.fence import renew_interval_s
from kclrun.consuming.gatekeeping import GateKeeper
from kclrun.consuming.giving_away import Farewell
from kclrun.consuming.ledger import CheckpointLedger
from kclrun.consuming.loss import LET_GO_S, Loss
from kclrun.consuming.own_row import OwnRow, Verdict, VerdictKind
from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.requests import CheckpointRequests
from kclrun.consuming.row_evidence import OwnChange
from kclrun.consuming.row_writing import RowWriting
from kclrun.consuming.shard_end import CHILDREN_RETRY_S, ChildrenExist, Deferred, ShardEnd
from kclrun.consuming.states import FINAL, MAY_WITHDRAW, SILENT, TRANSITIONS, State, Step
from kclrun.errors import InvariantViolation
from kclrun.model import changes
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant

__all__ = ["LeaseLife"]

Commands = list[do.Command]


class LeaseLife:
    """`handle` takes in what happened and says what to do; `check` holds its invariants."""

    def __init__(self, policy: LifePolicy, chance: Callable[[], float]) -> None:
        self.policy = policy
        self.state = State.CLAIMING
        self.own = OwnRow(policy.key, policy.me, policy.seen_counter, policy.failover_s)
        self.ledger = CheckpointLedger(TRIM_HORIZON, policy.uncheckpointed_max)
        self._chance = chance
        self._requests = CheckpointRequests()
        self._agenda = Agenda(policy, self.own, self._requests)
        self._writing = RowWriting(self.own, self._agenda, chance)
        self._farewell = Farewell(self.own, self._agenda, others_in_sight=policy.others_in_sight)
        self._shard_end = ShardEnd(policy.key, ())
        self._is_withdrawn = False
        self._manager_gone = False
        self._gate = GateKeeper(one_batch_a_checkpoint=policy.checkpoint_mode == "batch")
        self._is_initialized = False
        self._failure: on.ProcessorFailed | None = None
        self._is_saved_at_end = False
        self._loss: Loss | None = None
        self._warnings = reports.Warnings()

    @property
    def is_finished(self) -> bool:
        return self.state in FINAL

    def handle(self, event: on.Event, now: Instant) -> tuple[do.Command, ...]:
        """Take in what happened; say what to do next. Raises: InvariantViolation."""
        out: Commands = []
        if is_expected(event, self.state):
            self._take_in(event, now, out)
        if self.state not in FINAL:
            if self._farewell.is_asked_for(self.state, now):
                self._withdraw(out)
            self._watch_time(now, out)
            if self.policy.is_manual:
                self._watch_cap()
            if self.own.pending is None and self.state not in SILENT:
                self._write_what_is_due(now, out)
            if self.state is State.PROCESSING and self.own.fence is not None:
                out.extend(self._gate.open(self.own.fence, self.ledger))
        self.check()
        if out and self.own.pending is None:
            # A write that was given up in the same breath (the fence has passed) is not sent.
            out = [each for each in out if type(each) is not do.SendWrite]
        return tuple(out)

    def next_deadline(self, now: Instant) -> Instant:
        """When the next Ticked is due, at the latest."""
        if self.state is State.CLAIMING:
            return self.policy.expires_instant
        if self._loss is not None:
            return max(self._loss.deadline, now)
        deadline = Instant(now + renew_interval_s(self.own.failover_s))
        if self.own.fence is not None:
            deadline = min(deadline, self.own.fence)
            if self.own.pending is None:  # else nothing is due before its outcome
                due = self._agenda.due_instant(self.ledger, renews=not self._manager_gone)
                deadline = deadline if due is None else min(deadline, due)
                if self.state is State.CREATING and not self._shard_end.is_looking:
                    deadline = min(deadline, self._shard_end.not_before)
        return max(deadline, now)

    def check(self) -> None:
        """The invariants this core can see."""
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
                pass  # what is due by now follows every event
            case on.BatchDelivered(last, records, payload_bytes):
                self.ledger.deliver(last, records)
                self._agenda.note_bytes(payload_bytes)
            case on.BatchProcessed(last):
                self.ledger.process(last)
            case on.WriteResolved(changes.LateCheckpoint(), outcome):
                if self._loss is not None and self._loss.late is not None:
                    out.extend(self._loss.late.resolve(outcome, now, self._chance()))
            case on.WriteResolved() | on.OwnRowRead() | on.ReadFailed():
                self._take_in_answer(event, now, out)
            case on.Started() if now < self.policy.expires_instant:
                self._send(self._agenda.claim(), out)
            case on.RowsRead(rows):
                self._shard_end.read(rows)
            case on.ShardsListed(shards):
                self._shard_end.list(shards)
            case on.LookUpFailed(message):
                self._put_children_off(message, now, out)
            case on.ShardExhausted(children):
                self._shard_end = ShardEnd(self.policy.key, children)
                self._move(Step.EXHAUSTED)
            case on.CheckpointRequested(request, position):
                self._take_in_request(request, position, out)
            case on.CallReturned() | on.ProcessorFailed() | on.GateShut():
                self._take_in_user_code(event, now, out)
            case on.DrainRequested() | on.ReleaseRequested() | on.ManagerGone():
                self._manager_gone |= isinstance(event, on.ManagerGone)
                self._withdraw(out)
            case on.OthersInSight(others):
                self._farewell.others_in_sight = others
            case on.FailoverChanged(failover_s):
                self.own.set_failover(failover_s)
            case on.ThreadStalled(stalled_s, in_user_code):
                out.append(reports.stalled(stalled_s, in_user_code=in_user_code))

    def _take_in_answer(
        self, event: on.WriteResolved | on.OwnRowRead | on.ReadFailed, now: Instant, out: Commands
    ) -> None:
        verdict, commands = self._writing.take_in(event, self.state, now)
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
                out.append(reports.written_again(row))
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
                report = reports.given_away(change)
                self._finish(Step.RELEASE_WRITTEN, report, do.ExitCause.DONE, out)

    def _claimed(self, now: Instant, out: Commands) -> None:
        row = self.own.confirmed
        if (reason := reports.why_not_begun(row, has_waited=self.policy.has_waited)) is not None:
            self._refuse(reason, out)
            return
        self.ledger = CheckpointLedger(row.checkpoint, self.policy.uncheckpointed_max)
        self._agenda.begin(now)
        out.append(reports.claimed(row))
        if self._is_withdrawn or self._farewell.is_asked_for(self.state, now):
            self._move(Step.WITHDRAWN)
            return
        self._move(Step.CLAIMED)
        out.append(do.CallInitialize(row))

    def _saved(self, now: Instant, out: Commands) -> None:
        """A position is durable on the row: ours, or a greater one that stood there [P2]."""
        row = self.own.confirmed
        self.ledger.confirm(row.checkpoint)
        self._agenda.note_saved(now)
        # Told first: user code that is answered, and then raises, is not given these again.
        out.append(reports.saved(row))
        out.extend(self._requests.answer(row.checkpoint))

    def _take_in_user_code(
        self, event: on.CallReturned | on.ProcessorFailed | on.GateShut, now: Instant, out: Commands
    ) -> None:
        match self.state, event:
            case ((State.STOPPING | State.LOSING), on.GateShut()):
                if not self._gate.is_shut:  # asked for twice (drained, then lost): answered twice
                    self._gate.is_shut = True
                    self._say_goodbye(now, out)
            case ((State.STOPPING | State.LOSING), _) if not self._gate.is_shut:
                # `initialize` or `shard_ended` came back after the lease was withdrawn or lost.
                self._is_initialized |= isinstance(event, on.CallReturned)
            case ((State.STOPPING | State.LOSING), _):
                if isinstance(event, on.ProcessorFailed):
                    out.extend(self._warnings.once(f"{event.where} raised {event.error}"))
                self._part()
            case State.INITIALIZING, on.CallReturned():
                self._is_initialized = True
                self._agenda.note_saved(now)
                self._move(Step.READY)
            case State.CLOSING, on.CallReturned():
                self._close()
            case _, on.ProcessorFailed():
                self._fail(event)

    def _close(self) -> None:
        if self.policy.is_manual and not self._is_saved_at_end:
            self._fail(reports.UNSAVED_END)
        else:
            self._move(Step.CLOSED)

    def _say_goodbye(self, now: Instant, out: Commands) -> None:
        """User code is idle: its last call, if it ever began; then a lost lease's last write."""
        if not self._is_initialized:
            self._part()
        else:
            is_orderly = self.state is State.STOPPING
            out.append(do.CallShutdownRequested() if is_orderly else do.CallLeaseLost())
        if self._loss is not None and self._failure is None:
            late = self._agenda.late_checkpoint(self.ledger)
            out += [self._loss.save_late(late, now)] if late is not None else []

    def _part(self) -> None:
        """User code has nothing more to say."""
        if self._loss is not None:
            self._loss.user_code_is_done = True
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
        """Give the lease up in good order, from where that is possible.

        A claim under way is waited for; a shard whose children exist is ended: that is nearer.
        """
        self._is_withdrawn = True
        if self.state in MAY_WITHDRAW:
            self._move(Step.WITHDRAWN)
            out.extend(self._gate.shut())

    def _hand_over(self, reason: str, now: Instant, out: Commands) -> None:
        """The row names the next owner already [R8]: finish the batch within the fence that stands.

        Nothing but the hand-over can be written from here on, not even a checkpoint that user code
        waits for; so an end under way, or a halt, is for the next owner to come to again.
        """
        self._withdraw(out)
        if self.state not in {State.STOPPING, State.RELEASING}:
            self._lose(reason, now, out)
            return
        out.extend(self._requests.refuse_all(reason))

    def _fail(self, failure: on.ProcessorFailed) -> None:
        self._failure = failure
        self._move(Step.FAILED)

    def _lose(self, reason: str, now: Instant, out: Commands) -> None:
        if self.state is State.CLAIMING:
            self._refuse(reason, out)
            return
        self._move(Step.LOST)
        self.own.give_up()
        self._loss = Loss(reason, now if self._manager_gone else Instant(now + LET_GO_S))
        out.extend(self._requests.refuse_all(reason))
        out.extend(self._gate.shut())

    def _refuse(self, reason: str, out: Commands) -> None:
        self.own.give_up()
        self._finish(Step.REFUSED, reports.unclaimed(reason), do.ExitCause.UNCLAIMED, out)

    def _finish(self, step: Step, report: do.Report, cause: do.ExitCause, out: Commands) -> None:
        self._move(step)
        out.extend(self._requests.refuse_all(f"the lease is {self.state.value}"))
        out += [report, do.Exit(cause)]

    def _watch_time(self, now: Instant, out: Commands) -> None:
        if self.state is State.CLAIMING:
            if now >= self.policy.expires_instant:
                self._refuse("its start command expired before the claim succeeded [P4]", out)
        elif self._loss is not None:
            if self._loss.is_over(now):
                self._finish(Step.LET_GO, reports.lost(self._loss.words), do.ExitCause.LOST, out)
        elif self.own.fence is not None and now >= self.own.fence:
            # A host or a process that stood still: for how long is half of the story.
            ago_s = now - self.own.fence
            reason = f"it could not be renewed in time: its fence passed {ago_s:.1f} s ago [P7]"
            self._lose(reason, now, out)

    def _watch_cap(self) -> None:
        """With manual checkpoints only the processor can lift the cap: say so, do not hang."""
        is_stuck = self.ledger.is_full and self.ledger.is_idle and self._requests.highest is None
        if self.state is State.PROCESSING and is_stuck:
            self._fail(reports.stuck_at_cap(self.ledger))

    def _write_what_is_due(self, now: Instant, out: Commands) -> None:
        """Nothing is under way, and the row is ours to write, if it was claimed."""
        if self.own.row is None:
            return
        change = None if self.state is State.PROCESSING else self._change_of_state(now, out)
        if change is None and self.own.next_owner is not None:
            return
        if change is None:
            change = self._agenda.checkpoint(self.state, self.ledger, now)
        if change is None and self.state is State.FAILING:
            assert self._failure is not None, "failing without a failure"
            self._finish(Step.SETTLED, reports.failed(self._failure), do.ExitCause.FAILED, out)
            return
        if change is None and not self._manager_gone and self._agenda.is_renewal_due(now):
            change = self._agenda.renewal(now, drops_ask=self._farewell.drops_ask(now))
        if change is not None:
            self._send(change, out)

    def _change_of_state(self, now: Instant, out: Commands) -> OwnChange | None:
        """The write that the state itself waits for."""
        match self.state:
            case State.CREATING:
                return self._creation(now, out)
            case State.NAMING:
                return self._agenda.naming(self._shard_end.child_ids)
            case State.ENDING:
                return self._agenda.end()
            case State.RELEASING:
                return self._farewell.last_write(self.ledger, now)
            case _:
                return None

    def _creation(self, now: Instant, out: Commands) -> OwnChange | None:
        match self._shard_end.next_step(self.own.confirmed, now, self.own.failover_s):
            case changes.CreateChildren() as creation:
                return creation
            case ChildrenExist():
                self._move(Step.CHILDREN_CREATED)
                return self._agenda.naming(self._shard_end.child_ids)
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
