"""Decides how to react to the notices and lifecycle hooks of the EC2 instance we run on. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, assert_never

import msgspec

from kclrun.model.instance import (
    InstanceIdentity,
    InstanceLook,
    Interruption,
    LifecycleAction,
    NoticeKind,
    TargetState,
)
from kclrun.model.time import Instant, WallTime

# The group's rate limit refills within seconds.
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 8.0
# The metadata shows the target state before the instance begins to wait (Terminating, then
# Terminating:Wait). So the answer "not waiting" may only mean that we asked too early. After
# 1 + 2 s the action counts as gone.
_GONE_ANSWERS_MAX: Final = 3


class LifecycleOutcome(enum.Enum):
    """The outcome of a request to the group."""

    DONE = "the group has taken it"
    GONE = "nothing waits there: no such hook or group, or the wait is over"
    LATER = "throttled or away: nothing happened"
    UNKNOWN = "sent, and its fate is not known"
    REFUSED = "it will never work: a permission, or a wrong name"


class LifecycleAnswer(msgspec.Struct, frozen=True):
    """An outcome, with the service's own words if the outcome was not a wanted one."""

    outcome: LifecycleOutcome
    code: str = ""
    error: str = ""


class Completion:
    """One lifecycle action of the autoscaling group, until it is completed or given up. Pure.

    Decides when to ask the group to go on, and when to stop asking. `is_over` once nothing is left
    to do. `asked_for_s` is how long to keep asking. Rule: a completion whose outcome is unknown is
    sent again: if it was done already, the group answers that nothing waits, which is as good.
    """

    def __init__(self, action: LifecycleAction, now: Instant, asked_for_s: float) -> None:
        self.action = action
        self._asked_for_s = asked_for_s
        self.attempts = 0
        self.is_over = False
        self.began_instant = now
        self._due_instant = now
        self._is_under_way = False
        self._is_maybe_done = False
        self._gone_answers = 0

    def is_due(self, now: Instant) -> bool:
        return not self.is_over and not self._is_under_way and now >= self._due_instant

    def sent(self) -> None:
        """A request was sent; an answer will come."""
        assert not self._is_under_way, "one request at a time"
        self._is_under_way = True
        self.attempts += 1

    def answered(self, answer: LifecycleAnswer, now: Instant) -> str | None:
        """Take in the answer. Returns the event that reports the end; None while it goes on."""
        assert self._is_under_way, "an answer follows a request"
        self._is_under_way = False
        match answer.outcome:
            case LifecycleOutcome.DONE:
                return self._end("lifecycle_completed")
            case LifecycleOutcome.GONE if self._is_maybe_done:
                return self._end("lifecycle_completed")
            case LifecycleOutcome.GONE:
                self._gone_answers += 1
                if self._gone_answers >= _GONE_ANSWERS_MAX:
                    return self._end("lifecycle_gone")
            case LifecycleOutcome.REFUSED:
                return self._end("lifecycle_not_completed")
            case LifecycleOutcome.UNKNOWN:
                self._is_maybe_done = True
            case LifecycleOutcome.LATER:
                pass
            case _:
                assert_never(answer.outcome)
        return self._again(now)

    def _again(self, now: Instant) -> str | None:
        self._due_instant = Instant(now + min(_PAUSE_S * 2 ** (self.attempts - 1), _PAUSE_S_MAX))
        if self._due_instant - self.began_instant > self._asked_for_s:
            return self._end("lifecycle_not_completed")
        return None

    def _end(self, event: str) -> str:
        self.is_over = True
        return event


class Identified(msgspec.Struct, frozen=True):
    """The metadata showed which instance this is. Once."""

    identity: InstanceIdentity


class Looked(msgspec.Struct, frozen=True):
    """A look at the metadata, by the host's clock at `looked_at`."""

    look: InstanceLook
    looked_at: WallTime


class BecameReady(msgspec.Struct, frozen=True):
    """The lease table was read and lease processes can be started. Once."""


class StopBegan(msgspec.Struct, frozen=True):
    """A stop is under way, from any cause. Once."""


class Drained(msgspec.Struct, frozen=True):
    """Every lease process has ended, and no further lease will be given up. Once."""


class HeartbeatAnswered(msgspec.Struct, frozen=True):
    """The outcome of a `Heartbeat`."""

    action: LifecycleAction
    answer: LifecycleAnswer


class CompletionAnswered(msgspec.Struct, frozen=True):
    """The outcome of a `Complete`."""

    action: LifecycleAction
    answer: LifecycleAnswer


class Ticked(msgspec.Struct, frozen=True):
    """Time passed: about every half second."""


InstanceEvent = (
    Identified
    | Looked
    | BecameReady
    | StopBegan
    | Drained
    | HeartbeatAnswered
    | CompletionAnswered
    | Ticked
)


class DrainHost(msgspec.Struct, frozen=True):
    """Give all leases up and take no more; before `by`, if the end of the instance is known."""

    notice: NoticeKind
    by: Instant | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """Restart the time of the hook; comes back as HeartbeatAnswered."""

    action: LifecycleAction


class Complete(msgspec.Struct, frozen=True):
    """Ask the group to go on; comes back as CompletionAnswered."""

    action: LifecycleAction


class Note(msgspec.Struct, frozen=True):
    """One line of the log."""

    event: str
    fields: Mapping[str, str | int | float | None]


InstanceCommand = DrainHost | Heartbeat | Complete | Note


# A hook times out after 30 s at the least: two heartbeats in a row may fail.
HEARTBEAT_EVERY_S: Final = 10.0
# The group ends a working machine if its launch hook is not completed in time: an hour, unless the
# hook sets another time. Asking delays nothing.
_LAUNCH_ASKED_FOR_S: Final = 3_600.0
# A machine that is drained and cannot report it ends with the hook's own time-out. A stop may be
# delayed by half a minute for the report.
_TERMINATION_ASKED_FOR_S: Final = 30.0
# Forced processes get a second, and the releases of their rows five more (`lifecycle/stopping.py`).
# The rest is for the delay of the notice, which gives its time in whole seconds.
_LEAVE_BEFORE_END_S: Final = 10.0
# As after a second signal: enough for a batch of the usual size.
_PATIENCE_S_MIN: Final = 2.0
# With a wrong clock the computed time left can be anything; EC2 gives two minutes.
_TIME_LEFT_S_MAX: Final = 120.0
_ENDS_FOR_GOOD: Final = "terminate"


class InstancePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings. `group` is the autoscaling group's name, if they name it."""

    drains_on_rebalance: bool = True
    group: str | None = None
    launch_hook: str | None = None
    termination_hook: str | None = None


class InstanceLife:
    """Decides for one instance, from the first answer of its metadata to its end.

    Pure: events in, commands out; `now` is an argument. Rules: a notice drains, once, and for good.
    The termination hook is completed after the last lease is given up, never before. An instance
    that was drained by a notice and still waits for an answer of the group stays, without leases,
    until it gets it, because no other program on this host would complete the hook.

        watching ──notice, or a stop──► leaving ──drained──► staying
                                           │                   │ the group ends it
                                           │                   ▼
                                           └──drained──► completing ──answered──► over
    """

    def __init__(self, policy: InstancePolicy) -> None:
        self._policy = policy
        self._out: list[InstanceCommand] = []
        self._identity: InstanceIdentity | None = None
        self._is_ready = self._is_stopping = self._is_drained = False
        self._is_ended_by_group = False
        self._noticed: dict[NoticeKind, None] = {}
        self._is_replaced = self._is_called_away = False
        self._beat_instant: Instant | None = None
        self._is_beating = False
        self._logged: set[str] = set()
        self._launch: Completion | None = None
        self._termination: Completion | None = None
        self._handlers: Mapping[type[InstanceEvent], Callable[[Any, Instant], None]] = {
            Identified: self._on_identified,
            Looked: self._on_looked,
            BecameReady: self._on_ready,
            StopBegan: self._on_stop,
            Drained: self._on_drained,
            HeartbeatAnswered: self._on_heartbeat,
            CompletionAnswered: self._on_completion,
            Ticked: lambda _, __: None,
        }

    def handle(self, event: InstanceEvent, now: Instant) -> tuple[InstanceCommand, ...]:
        """Take in an event and return the commands that follow."""
        self._handlers[type(event)](event, now)
        self._begin_completions(now)
        self._beat_when_due(now)
        for completion in self._completions():
            # A machine that is leaving already is not put into service.
            is_wanted = completion is self._termination or not self._is_leaving
            if is_wanted and completion.is_due(now):
                completion.sent()
                self._out.append(Complete(completion.action))
        self.check()
        commands = tuple(self._out)
        self._out.clear()
        return commands

    @property
    def stays(self) -> bool:
        """Whether the program must stay for its instance after it is drained."""
        if self._termination is not None:
            return not self._termination.is_over
        is_awaited = self._is_replaced and not self._is_called_away
        return is_awaited and self._action(self._policy.termination_hook) is not None

    def check(self) -> None:
        """The invariants: no action is completed before its time."""
        assert self._termination is None or self._is_drained, "completed with leases still held"
        assert self._launch is None or self._is_ready, "in service before it is ready"

    # Events.

    def _on_identified(self, event: Identified, now: Instant) -> None:
        del now
        identity = self._identity = event.identity
        policy = self._policy
        hooks = [hook for hook in (policy.launch_hook, policy.termination_hook) if hook is not None]
        self._note(
            "instance_watched",
            instance=identity.instance_id,
            zone=identity.zone,
            group=self._group or "",
            hook=", ".join(hooks),
        )
        if hooks and self._group is None:
            self._note(
                "lifecycle_not_completed",
                hook=", ".join(hooks),
                reason="the autoscaling group of this machine is not known",
                action="set instance.group, or show the instance its tags (InstanceMetadataTags)",
            )

    def _on_looked(self, event: Looked, now: Instant) -> None:
        look = event.look
        if look.target_state is TargetState.TERMINATED:
            self._is_ended_by_group = True
            self._notice(NoticeKind.GROUP_TERMINATES, now, None)
        if look.interruption is not None:
            self._interrupted(look.interruption, now, event.looked_at)
        if look.is_rebalance_recommended and self._policy.drains_on_rebalance:
            self._is_replaced = True
            self._notice(NoticeKind.REBALANCE, now, None)

    def _interrupted(self, interruption: Interruption, now: Instant, looked_at: WallTime) -> None:
        # A stopped or hibernated instance comes back: the group does not wait for it.
        self._is_replaced = self._is_replaced or interruption.action == _ENDS_FOR_GOOD
        left_s = None
        if interruption.at is not None:
            left_s = max(0.0, min(interruption.at - looked_at, _TIME_LEFT_S_MAX))
        self._notice(NoticeKind.SPOT_INTERRUPTION, now, left_s, action=interruption.action)

    def _notice(
        self, notice: NoticeKind, now: Instant, left_s: float | None, action: str = ""
    ) -> None:
        if notice in self._noticed:
            return
        self._noticed[notice] = None
        self._note("instance_notice", reason=notice.value, action=action, deadline_s=left_s)
        by = None
        if left_s is not None:
            by = Instant(now + max(_PATIENCE_S_MIN, left_s - _LEAVE_BEFORE_END_S))
        self._out.append(DrainHost(notice, by))

    def _on_ready(self, event: BecameReady, now: Instant) -> None:
        del event, now
        self._is_ready = True

    def _on_stop(self, event: StopBegan, now: Instant) -> None:
        del event, now
        self._is_stopping = True
        # A stop that a person or a program asked for waits for the program to end, not for the
        # machine.
        self._is_called_away = not self._noticed

    def _on_drained(self, event: Drained, now: Instant) -> None:
        del event, now
        self._is_stopping = self._is_drained = True
        if self.stays and not self._is_ended_by_group:
            self._note("lifecycle_awaited", hook=self._policy.termination_hook, group=self._group)

    def _on_heartbeat(self, event: HeartbeatAnswered, now: Instant) -> None:
        del now
        self._is_beating = False
        answer = event.answer
        if answer.outcome is LifecycleOutcome.DONE:
            self._note("lifecycle_heartbeat", hook=event.action.hook, group=event.action.group)
        elif answer.outcome is LifecycleOutcome.REFUSED and "heartbeat" not in self._logged:
            self._logged.add("heartbeat")
            self._note(
                "lifecycle_not_completed",
                hook=event.action.hook,
                group=event.action.group,
                reason="no heartbeat",
                code=answer.code,
                error=answer.error,
            )

    def _on_completion(self, event: CompletionAnswered, now: Instant) -> None:
        completion = next(one for one in self._completions() if one.action == event.action)
        ended = completion.answered(event.answer, now)
        if ended is not None:
            self._note(
                ended,
                hook=event.action.hook,
                group=event.action.group,
                attempts=completion.attempts,
                seconds=now - completion.began_instant,
                code=event.answer.code,
                error=event.answer.error,
            )

    # Consequences of the events.

    def _begin_completions(self, now: Instant) -> None:
        launch = self._action(self._policy.launch_hook)
        may_serve = self._is_ready and not self._is_leaving
        if launch is not None and may_serve and self._launch is None:
            self._launch = Completion(launch, now, _LAUNCH_ASKED_FOR_S)
        termination = self._action(self._policy.termination_hook)
        is_due = self._is_drained and self._is_ended_by_group
        if termination is not None and is_due and self._termination is None:
            self._termination = Completion(termination, now, _TERMINATION_ASKED_FOR_S)

    def _beat_when_due(self, now: Instant) -> None:
        action = self._action(self._policy.termination_hook)
        is_waited_for = self._is_ended_by_group and not self._is_drained
        if action is None or not is_waited_for or self._is_beating:
            return
        if self._beat_instant is None or now >= self._beat_instant:
            self._beat_instant = Instant(now + HEARTBEAT_EVERY_S)
            self._is_beating = True
            self._out.append(Heartbeat(action))

    def _completions(self) -> tuple[Completion, ...]:
        return tuple(one for one in (self._launch, self._termination) if one is not None)

    @property
    def _is_leaving(self) -> bool:
        return self._is_stopping or bool(self._noticed)

    @property
    def _group(self) -> str | None:
        if self._policy.group is not None:
            return self._policy.group
        return self._identity.group if self._identity is not None else None

    def _action(self, hook: str | None) -> LifecycleAction | None:
        identity, group = self._identity, self._group
        if hook is None or identity is None or group is None:
            return None
        return LifecycleAction(identity.region, group, hook, identity.instance_id)

    def _note(self, event: str, **fields: str | int | float | None) -> None:
        self._out.append(Note(event, {k: v for k, v in fields.items() if v not in {"", None}}))
