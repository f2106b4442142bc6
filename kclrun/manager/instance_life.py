"""The life of the EC2 instance that we run on: what is done about its notices and hooks.

Pure: events in, commands out; `now` is an argument. Rules: a notice drains, once, and for good;
the termination hook is completed after the last lease is given up, never before; who was drained by
a notice and is still to hear from the group stays, without leases, until it does, because nobody
else on this host would complete the hook.

    watching ──notice, or a stop──► leaving ──drained──► staying
                                       │                   │ the group ends it
                                       │                   ▼
                                       └──drained──► completing ──answered──► over
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kclrun.manager.instance_events import (
    BecameReady,
    Complete,
    CompletionAnswered,
    Drain,
    Drained,
    Heartbeat,
    HeartbeatAnswered,
    Identified,
    InstanceCommand,
    InstanceEvent,
    Looked,
    Note,
    StopBegan,
    Ticked,
)
from kclrun.manager.lifecycle_completion import Completion, LifecycleOutcome
from kclrun.model.instance import (
    InstanceIdentity,
    Interruption,
    LifecycleAction,
    NoticeKind,
    TargetState,
)
from kclrun.model.time import Instant, WallTime

__all__ = ["HEARTBEAT_EVERY_S", "InstanceLife", "InstancePolicy"]

# A hook times out after 30 s at the least: two heartbeats in a row may fail.
HEARTBEAT_EVERY_S: Final = 10.0
# The group ends a machine that works when nobody completes its launch hook in time: an hour, unless
# the hook says another. Asking holds nothing up.
_LAUNCH_ASKED_FOR_S: Final = 3_600.0
# A machine that is drained and cannot say so ends with the hook's own time-out: half a minute is
# what a stop may be held up for that.
_TERMINATION_ASKED_FOR_S: Final = 30.0
# Forced processes get a second, and the releases of their rows five more (`stopping.py`); the rest
# is for the way of the notice, which says its time in whole seconds.
_LEAVE_BEFORE_END_S: Final = 10.0
# As a second signal: enough for a batch of the usual size.
_PATIENCE_S_MIN: Final = 2.0
# A clock that is wrong makes of the time left what it likes; EC2 gives two minutes.
_TIME_LEFT_S_MAX: Final = 120.0
_ENDS_FOR_GOOD: Final = "terminate"


class InstancePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings want. `group` is the autoscaling group's name, if they name it."""

    drains_on_rebalance: bool = True
    group: str | None = None
    launch_hook: str | None = None
    termination_hook: str | None = None


class InstanceLife:
    """Decides for one instance, from the first answer of its metadata to its end."""

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
        self._told: set[str] = set()
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
        """Take in what happened; say what to do next."""
        self._handlers[type(event)](event, now)
        self._begin_completions(now)
        self._beat_when_due(now)
        for completion in self._completions():
            # A machine that is leaving by now is not put into service.
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
        """Whether the program has something left to do for its instance after it is drained."""
        if self._termination is not None:
            return not self._termination.is_over
        is_awaited = self._is_replaced and not self._is_called_away
        return is_awaited and self._action(self._policy.termination_hook) is not None

    @property
    def is_identified(self) -> bool:
        return self._identity is not None

    def check(self) -> None:
        """The invariants: nothing is completed before its time."""
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
        # One that is stopped or hibernated comes back: no group waits for it.
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
        self._out.append(Drain(notice, by))

    def _on_ready(self, event: BecameReady, now: Instant) -> None:
        del event, now
        self._is_ready = True

    def _on_stop(self, event: StopBegan, now: Instant) -> None:
        del event, now
        self._is_stopping = True
        # Whoever asked for it waits for the program to end, and not for the machine.
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
        elif answer.outcome is LifecycleOutcome.REFUSED and "heartbeat" not in self._told:
            self._told.add("heartbeat")
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

    # What follows from them.

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
