"""Watches the EC2 instance of this process, and acts on its notices and lifecycle actions.

The thin shell around `lifecycle/instance.py`. The loop never waits. Outside EC2, one thread of the
pool waits a second for an answer, once a minute at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, assert_never

from kclrun import errors
from kclrun.config.schema import InstanceSettings
from kclrun.lifecycle import instance
from kclrun.manager.loop import IoPool, Loop
from kclrun.manager.manager import Manager
from kclrun.manager.service_calls import OutageLog
from kclrun.manager.world import InstanceServices
from kclrun.model.instance import InstanceIdentity, InstanceLook
from kclrun.model.retries import PASSING_OF_WRITES
from kclrun.model.time import WallTime
from kclrun.observe.logs import EventLog

# The interval that EC2's guides give for both notices. Of a spot instance's two minutes, five
# seconds are lost.
_LOOK_EVERY_S: Final = 5.0
# Readiness, a stop and a deadline are noticed within half a second.
_TICK_EVERY_S: Final = 0.5
# Metadata may be late at boot. A machine without metadata later never gets any.
_ASK_AGAIN_S: Final = 5.0
_ASK_AGAIN_S_MAX: Final = 60.0
_METADATA: Final = "look at the instance metadata"
_GROUP: Final = "answer the autoscaling group"


class InstanceWatch:
    """The watch of one run. Call `open` once, in the loop.

    `stays` is called when all leases are given away.
    """

    def __init__(
        self,
        services: InstanceServices,
        settings: InstanceSettings,
        *,
        manager: Manager,
        loop: Loop,
        pool: IoPool,
        log: EventLog,
    ) -> None:
        self._services = services
        self._manager = manager
        self._loop = loop
        self._pool = pool
        self._log = log
        self._life = instance.InstanceLife(
            instance.InstancePolicy(
                drains_on_rebalance=settings.drains_on_rebalance,
                group=settings.group,
                launch_hook=settings.launch_hook,
                termination_hook=settings.termination_hook,
            )
        )
        self._is_surely_there = settings.watch is True
        self._outages = OutageLog(log, loop.now)
        self._ask_again_s = _ASK_AGAIN_S
        self._passed: set[type[instance.InstanceEvent]] = set()

    def open(self) -> None:
        """Ask the metadata service for our identity, in the background, until it answers."""
        self._ask_metadata(self._services.metadata.identify, self._identified, self._ask_later)

    def stays(self) -> bool:
        """Whether work for the machine is left, now that all leases are given away."""
        self._pass_once(instance.Drained())
        return self._life.stays

    # The metadata.

    def _identified(self, identity: InstanceIdentity) -> None:
        self._is_surely_there = True
        self._take_in(instance.Identified(identity))
        self._tick()
        self._look()

    def _ask_later(self) -> None:
        self._loop.after(self._ask_again_s, self.open)
        self._ask_again_s = min(2 * self._ask_again_s, _ASK_AGAIN_S_MAX)

    def _look(self) -> None:
        def looked(look: InstanceLook) -> None:
            self._pass_stop()
            self._take_in(instance.Looked(look, WallTime(time.time())))
            self._look_later()

        self._ask_metadata(self._services.metadata.look, looked, self._look_later)

    def _look_later(self) -> None:
        self._loop.after(_LOOK_EVERY_S, self._look)

    def _ask_metadata(
        self,
        job: Callable[[], object],
        then: Callable[..., None],
        otherwise: Callable[[], None],
    ) -> None:
        asked = self._loop.now()

        def succeeded(result: object) -> None:
            self._outages.worked(_METADATA)
            then(result)

        def failed(error: Exception) -> None:
            if not isinstance(error, errors.ServiceError):
                self._manager.broke(error)
                return
            if self._is_surely_there:
                self._outages.failed(_METADATA, error, asked)
            otherwise()

        self._pool.run(job, succeeded, failed)

    # Time, and the state of the manager.

    def _tick(self) -> None:
        if self._manager.is_ready:
            self._pass_once(instance.BecameReady())
        self._pass_stop()
        self._take_in(instance.Ticked())
        self._loop.after(_TICK_EVERY_S, self._tick)

    def _pass_stop(self) -> None:
        """Called before a look is passed on. A stop that began before a notice is not due to it."""
        if not self._manager.is_running:
            self._pass_once(instance.StopBegan())

    def _pass_once(self, event: instance.InstanceEvent) -> None:
        if type(event) not in self._passed:
            self._passed.add(type(event))
            self._take_in(event)

    # Events and commands.

    def _take_in(self, event: instance.InstanceEvent) -> None:
        for command in self._life.handle(event, self._loop.now()):
            self._perform(command)

    def _perform(self, command: instance.InstanceCommand) -> None:
        lifecycle = self._services.lifecycle
        match command:
            case instance.Note(event, fields):
                self._log.write(event, fields)
            case instance.DrainHost(notice, by):
                self._manager.drain(notice.value, by=by)
            case instance.Heartbeat(action):
                self._ask_group(
                    lambda: lifecycle.heartbeat(action),
                    lambda answer: self._take_in(instance.HeartbeatAnswered(action, answer)),
                )
            case instance.Complete(action):
                self._ask_group(
                    lambda: lifecycle.complete(action),
                    lambda answer: self._take_in(instance.CompletionAnswered(action, answer)),
                )
            case _:
                assert_never(command)

    def _ask_group(
        self, job: Callable[[], None], then: Callable[[instance.LifecycleAnswer], None]
    ) -> None:
        asked = self._loop.now()

        def done(_: None) -> None:
            self._outages.worked(_GROUP)
            then(instance.LifecycleAnswer(instance.LifecycleOutcome.DONE))

        def failed(error: Exception) -> None:
            if not isinstance(error, errors.KclrunError):
                self._manager.broke(error)
                return
            if isinstance(error, PASSING_OF_WRITES):
                self._outages.failed(_GROUP, error, asked)
            else:  # the group answered, with a refusal
                self._outages.worked(_GROUP)
            then(_answer(error))

        self._pool.run(job, done, failed)


def _answer(error: errors.KclrunError) -> instance.LifecycleAnswer:
    code = error.code if isinstance(error, errors.ServiceError) else ""
    match error:
        case errors.NotFound():
            outcome = instance.LifecycleOutcome.GONE
        case errors.Throttled() | errors.Unavailable():
            outcome = instance.LifecycleOutcome.LATER
        case errors.OutcomeUnknown():
            outcome = instance.LifecycleOutcome.UNKNOWN
        case _:
            outcome = instance.LifecycleOutcome.REFUSED
    return instance.LifecycleAnswer(outcome, code, str(error))
