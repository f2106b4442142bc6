"""One lease's life in its process: what to do next, decided here and nowhere else.

Knows: the states (`states.py`), the own row (`own_row.py`), the ledger, what is due (`agenda.py`),
the shard's end. May not know: clocks, threads, sockets, DynamoDB. `now` and `chance` are given.
Rule: every command's outcome comes back as an event, whatever the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming import reports
from kclrun.consuming.agenda import Agenda
from kclrun.consuming.expectations import is_expected
from kclrun.consuming.fence import renew_interval_s
from kclrun.consuming.gatekeeping import GateKeeper
from kclrun.consuming.ledger import CheckpointLedger
from kclrun.consuming.own_row import OwnChange, OwnRow, Verdict, VerdictKind
from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.requests import CheckpointRequests
from kclrun.consuming.shard_end import Deferred, ShardEnd
from kclrun.consuming.states import FINAL, SILENT, TRANSITIONS, State, Step
from kclrun.errors import InvariantViolation
from kclrun.model import changes
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant

__all__ = ["LeaseLife"]

# How long a lost lease waits for the batch under way before the process is ended with it inside.
# Nothing it does counts any more; half a minute lets most work reach a clean end.
LET_GO_S: Final = 30.0
# The other parent's lease appears when its own chain gets there: minutes, seldom; one look a
# second costs one GetItem.
CHILDREN_RETRY_S: Final = 1.0
# While these last a renewal goes before a checkpoint that fails: a full disk costs no lease.
MAY_PUT_OFF: Final = frozenset({State.PROCESSING, State.CLOSING})

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
        self._shard_end = ShardEnd(policy.shard_id, ())
        self._withdrawn: str | None = None
        self._manager_gone = False
        self._gate = GateKeeper(one_batch_a_checkpoint=policy.checkpoint_mode == "batch")
        self._is_initialized = False
        self._failure: on.ProcessorFailed | None = None
        self._is_saved_at_end = False
        self._let_go_instant: Instant | None = None
        self._lost_reason = ""
        self._warnings = reports.Warnings()
        self._reads_failed = 0

    @property
    def is_finished(self) -> bool:
        return self.state in FINAL

    def handle(self, event: on.Event, now: Instant) -> tuple[do.Command, ...]:
        """Take in what happened; say what to do next. Raises: InvariantViolation."""
        out: Commands = []
        if is_expected(event, self.state):
            self._take_in(event, now, out)
        if not self.is_finished:
            self._watch_time(now, out)
            self._watch_cap()
            self._write_what_is_due(now, out)
            if self.state is State.PROCESSING and self.own.fence is not None:
                out.extend(self._gate.open(self.own.fence, self.ledger))
        self.check()
        # A write that was given up in the same breath (the fence has passed) is not sent.
        return tuple(each for each in out if self.own.pending or type(each) is not do.SendWrite)

    def next_deadline(self, now: Instant) -> Instant:
        """When the next Ticked is due, at the latest."""
        if self.state is State.CLAIMING:
            return self.policy.expires_instant
        if self.state is State.LOSING and self._let_go_instant is not None:
            return max(self._let_go_instant, now)
        deadlines = [Instant(now + renew_interval_s(self.own.failover_s))]
        if self.own.fence is not None:
            deadlines.append(self.own.fence)
            if self.own.pending is None:  # else nothing is due before its outcome
                deadlines += self._due_instants()
        return max(min(deadlines), now)

    def _due_instants(self) -> Iterator[Instant]:
        if not self._manager_gone:
            yield self._agenda.renewal_instant
        if (saving := self._agenda.save_instant(self.ledger)) is not None:
            yield saving
        if self.state is State.CREATING and not self._shard_end.is_looking:
            yield self._shard_end.not_before

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
            case on.Started() if now < self.policy.expires_instant:
                self._send(changes.Claim(self.own.key, self.own.me, self.own.counter), out)
            case on.WriteResolved() | on.OwnRowRead() | on.ReadFailed():
                self._take_in_answer(event, now, out)
            case on.RowsRead(rows):
                self._shard_end.read(rows)
            case on.ShardsListed(shards):
                self._shard_end.list(shards)
            case on.LookUpFailed(message):
                self._put_children_off(message, now, out)
            case on.BatchDelivered(last, records, payload_bytes):
                self.ledger.deliver(last, records)
                self._agenda.note_bytes(payload_bytes)
            case on.BatchProcessed(last):
                self.ledger.process(last)
            case on.ShardExhausted(children):
                self._shard_end = ShardEnd(self.policy.shard_id, children)
                self._move(Step.EXHAUSTED)
            case on.CheckpointRequested(request, position):
                self._take_in_request(request, position, out)
            case on.CallReturned() | on.ProcessorFailed() | on.GateShut():
                self._take_in_user_code(event, now, out)
            case on.DrainRequested(reason):
                self._withdraw(reason, out)
            case on.ReleaseRequested():
                self._withdraw("released by the processor", out)
            case on.ManagerGone():
                self._manager_gone = True
                self._withdraw("the manager is gone", out)
            case on.FailoverChanged(failover_s):
                self.own.failover_s = failover_s
            case on.ThreadStalled(stalled_s, in_user_code):
                out.append(reports.stalled(stalled_s, in_user_code=in_user_code))

    def _take_in_answer(
        self, event: on.WriteResolved | on.OwnRowRead | on.ReadFailed, now: Instant, out: Commands
    ) -> None:
        if self.own.pending is None:
            return  # It was given up meanwhile (the fence passed): the answer decides nothing.
        match event:
            case on.WriteResolved(_, outcome, sent):
                self._follow(self.own.resolve(outcome, sent), now, out)
            case on.OwnRowRead(row):
                self._reads_failed = 0
                self._follow(self.own.read_back(row), now, out)
            case on.ReadFailed():
                self._reads_failed += 1
                pause = self.own.retry_pause_s(self._reads_failed, self._chance())
                out.append(do.ReadOwnRow(not_before=Instant(now + pause)))

    def _follow(self, verdict: Verdict, now: Instant, out: Commands) -> None:
        if verdict.kind is not VerdictKind.LOST:
            out.extend(self._warnings.once(verdict.reason))
        match verdict.kind:
            case VerdictKind.CONFIRMED:
                assert verdict.change is not None, "a confirmation names its change"
                self._confirmed(verdict.change, now, out)
            case VerdictKind.AGAIN:
                assert verdict.change is not None, "a repetition names its change"
                paused = self.own.retry_pause_s(self.own.retries, self._chance())
                pause = paused if verdict.slower else 0.0
                is_checkpoint = isinstance(verdict.change, changes.Checkpoint)
                if pause and is_checkpoint and self.state in MAY_PUT_OFF and self.own.put_off():
                    self._agenda.put_off(Instant(now + pause))
                else:
                    out.append(do.SendWrite(verdict.change, Instant(now + pause)))
            case VerdictKind.READ_BACK:
                out.append(do.ReadOwnRow())
            case VerdictKind.REDO:
                self._shard_end.begin_again(Instant(now + CHILDREN_RETRY_S))
            case VerdictKind.LOST:
                self._lose(verdict.reason, now, out)

    def _confirmed(self, change: OwnChange, now: Instant, out: Commands) -> None:
        match change:
            case changes.Claim():
                self._claimed(now, out)
            case changes.Renew():
                pass
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
            case changes.Release(position=position):
                self._saved(now, out)
                report = do.Report(do.ReportKind.RELEASED, position=position)
                self._finish(Step.RELEASE_WRITTEN, report, do.ExitCause.DONE, out)

    def _claimed(self, now: Instant, out: Commands) -> None:
        row = self.own.confirmed
        if row.is_ended:  # by a write of the former process that landed late (trace H1)
            self._refuse("its shard has ended already", out)
            return
        self.ledger = CheckpointLedger(row.checkpoint, self.policy.uncheckpointed_max)
        self._agenda.begin(now)
        out.append(reports.claimed(row))
        if self._withdrawn is not None:
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
                    self._say_goodbye(out)
            case ((State.STOPPING | State.LOSING), _) if not self._gate.is_shut:
                # `initialize` or `shard_ended` came back after the lease was withdrawn or lost.
                self._is_initialized |= isinstance(event, on.CallReturned)
            case ((State.STOPPING | State.LOSING), _):
                if isinstance(event, on.ProcessorFailed):
                    out.extend(self._warnings.once(f"{event.where} raised {event.error}"))
                self._part(out)
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

    def _say_goodbye(self, out: Commands) -> None:
        """User code is idle: its last call, if it ever began."""
        if not self._is_initialized:
            self._part(out)
        else:
            is_orderly = self.state is State.STOPPING
            out.append(do.CallShutdownRequested() if is_orderly else do.CallLeaseLost())

    def _part(self, out: Commands) -> None:
        if self.state is State.STOPPING:
            self._move(Step.STOPPED)
        else:
            self._let_go(out)

    def _take_in_request(
        self, request: int, position: ExtendedSequenceNumber | None, out: Commands
    ) -> None:
        if self.state is State.LOSING or self.is_finished:
            out.append(do.AnswerCheckpoint(request, do.CheckpointAnswer.LOST, self._lost_reason))
            return
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

    def _withdraw(self, reason: str, out: Commands) -> None:
        """Give the lease up in good order, from where that is possible.

        A claim under way is waited for; a shard whose children exist is ended: that is nearer.
        """
        self._withdrawn = self._withdrawn or reason
        if self.state in {State.INITIALIZING, State.PROCESSING, State.CREATING}:
            self._move(Step.WITHDRAWN)
            out.extend(self._gate.shut())

    def _fail(self, failure: on.ProcessorFailed) -> None:
        self._failure = failure
        self._move(Step.FAILED)

    def _lose(self, reason: str, now: Instant, out: Commands) -> None:
        self._lost_reason = reason
        if self.state is State.CLAIMING:
            self._refuse(reason, out)
            return
        self._move(Step.LOST)
        self.own.give_up()
        self._let_go_instant = now if self._manager_gone else Instant(now + LET_GO_S)
        out.extend(self._requests.refuse_all(reason))
        out.extend(self._gate.shut())

    def _refuse(self, reason: str, out: Commands) -> None:
        self.own.give_up()
        self._finish(Step.REFUSED, reports.unclaimed(reason), do.ExitCause.UNCLAIMED, out)

    def _let_go(self, out: Commands) -> None:
        self._finish(Step.LET_GO, reports.lost(self._lost_reason), do.ExitCause.LOST, out)

    def _finish(self, step: Step, report: do.Report, cause: do.ExitCause, out: Commands) -> None:
        self._move(step)
        out += [report, do.Exit(cause)]

    def _watch_time(self, now: Instant, out: Commands) -> None:
        if self.state is State.CLAIMING:
            if now >= self.policy.expires_instant:
                self._refuse("its start command expired before the claim succeeded [P4]", out)
        elif self.state is State.LOSING:
            if self._let_go_instant is not None and now >= self._let_go_instant:
                self._let_go(out)
        elif self.own.fence is not None and now >= self.own.fence:
            self._lose("it could not be renewed in time: the fence has passed [P7]", now, out)

    def _watch_cap(self) -> None:
        """With manual checkpoints only the processor can lift the cap: say so, do not hang."""
        is_stuck = self.ledger.is_full and self.ledger.is_idle and self._requests.highest is None
        if self.state is State.PROCESSING and self.policy.is_manual and is_stuck:
            self._fail(reports.stuck_at_cap(self.ledger))

    def _write_what_is_due(self, now: Instant, out: Commands) -> None:
        if self.own.pending is not None or self.own.row is None or self.state in SILENT:
            return
        change = self._change_of_state(now, out)
        if change is None:
            change = self._agenda.checkpoint(self.state, self.ledger, now)
        if change is None and self.state is State.FAILING:
            assert self._failure is not None, "failing without a failure"
            self._finish(Step.SETTLED, reports.failed(self._failure), do.ExitCause.FAILED, out)
            return
        if change is None and not self._manager_gone:
            change = self._agenda.renewal(now)
        if change is not None:
            self._send(change, out)

    def _change_of_state(self, now: Instant, out: Commands) -> OwnChange | None:
        """The write that the state itself waits for."""
        match self.state:
            case State.CREATING:
                return self._creation(now, out)
            case State.NAMING:
                children = frozenset(self._shard_end.child_ids)
                return changes.NameChildren(self.own.key, self.own.me, self.own.counter, children)
            case State.ENDING:
                return self._agenda.end()
            case State.RELEASING:
                return self._agenda.release(self.ledger)
            case _:
                return None

    def _creation(self, now: Instant, out: Commands) -> changes.CreateChildren | None:
        if now < self._shard_end.not_before:
            return None
        question = self._shard_end.look_up()
        if question is not None:
            out.append(question)
            return None
        decision = self._shard_end.creation(self.own.confirmed)
        if isinstance(decision, Deferred):
            self._put_children_off(decision.reason, now, out)
            return None
        return decision

    def _put_children_off(self, reason: str, now: Instant, out: Commands) -> None:
        out.extend(self._warnings.once(reason))
        self._shard_end.begin_again(Instant(now + CHILDREN_RETRY_S))

    def _send(self, change: OwnChange, out: Commands) -> None:
        out.append(do.SendWrite(self.own.begin(change)))
