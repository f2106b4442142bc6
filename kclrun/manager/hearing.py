"""What a lease process says through its ring, as events for the core and lines for the log.

Rule: a lease process runs user code, so its words are checked like any stranger's: what is no
transition condemns it. A word that found no room in the ring is made up for from its slot and its
exit code. Look next: `children.py`, `ipc/transitions.py`.
"""

from __future__ import annotations

from typing import Final

from kclrun.errors import MalformedFrame
from kclrun.ipc import transitions as said
from kclrun.ipc.exit_codes import FAILED, LOST, UNCLAIMED
from kclrun.leases import events as heard
from kclrun.manager.child import Child, exit_code_of
from kclrun.model.lease import LeaseKey
from kclrun.observe.events import CATALOGUE
from kclrun.observe.logs import EventLog

__all__ = ["Listener"]

# A ring holds 64 KiB of entries of 40 bytes and more; a dead process's is emptied to the last one.
_DRAINS_MAX: Final = 16
_FAREWELLS: Final = (said.Unclaimed, said.ShardEnded, said.Released, said.Lost, said.Failed)


class Listener:
    """Turns transitions into events, and notes those that the core does not note itself."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def hear(self, child: Child) -> list[heard.Event]:
        """What is in the child's ring now.

        Raises: MalformedFrame if it wrote what is no transition; end it.
        """
        events: list[heard.Event] = []
        for payload in child.ring.drain():
            events += self._heard(child, said.decode(payload))
        if child.ring.gap():
            events += self._made_up_position(child)
        return events

    def hear_last(self, child: Child) -> list[heard.Event]:
        """Everything a dead child left, its farewell from the exit code if the ring has none."""
        events: list[heard.Event] = []
        try:
            for _ in range(_DRAINS_MAX):
                events += self.hear(child)
        except MalformedFrame as error:
            self._log.note("process_condemned", shard=child.key, error=str(error))
        if not child.farewell:
            events += _made_up_farewell(child)
        return events

    def _heard(self, child: Child, transition: said.Transition) -> list[heard.Event]:
        key = child.key
        if isinstance(transition, _FAREWELLS):
            child.farewell = True
        match transition:
            case said.Claimed(counter, position):
                self._log.note("lease_claimed", shard=key, counter=counter, position=str(position))
                return [heard.LeaseClaimed(key, counter, position)]
            case said.Checkpointed(position):
                return [heard.PositionMoved(key, position)]
            case said.ShardEnded(children):
                self._log.note("shard_ended", shard=key, children=", ".join(children))
                return [heard.ShardEnded(key, children)]
            case said.Released(position):
                self._log.note("lease_released", shard=key, position=str(position))
                return [heard.LeaseReleased(key, position)]
            case said.Unclaimed(reason):
                return [heard.StartUnclaimed(key, reason)]
            case said.Lost(reason):
                return [heard.LeaseLost(key, reason)]
            case said.Failed():
                return [self._failed(key, transition)]
            case _:
                self._note_only(key, transition)
                return []

    def _failed(self, key: LeaseKey, failed: said.Failed) -> heard.Event:
        self._log.note(
            "processor_failed",
            shard=key,
            where=failed.where,
            attempts=failed.attempts,
            error=failed.error,
            position=str(failed.position) if failed.position is not None else None,
            traceback=failed.traceback_text,
        )
        times = "once" if failed.attempts == 1 else f"{failed.attempts} times"
        where = f"{failed.where} failed {times}" if failed.where else "failed"
        return heard.ProcessorFailed(key, f"{where}: {failed.error}")

    def _note_only(self, key: LeaseKey, transition: said.Transition) -> None:
        match transition:
            case said.GilHeld(seconds):
                self._log.note("gil_held", shard=key, seconds=seconds)
            case said.Warned(event, detail) if event in CATALOGUE:
                self._log.note(event, level="warning", shard=key, detail=detail)
            case said.Warned(event, detail):
                self._log.note("lease_process_warned", shard=key, warning=event, detail=detail)
            case _:
                pass  # Started and Drained: the pidfd says when it began and when it ended.

    def _made_up_position(self, child: Child) -> list[heard.Event]:
        self._log.note("transitions_missed", shard=child.key)
        status = child.look()
        if status is None or status.checkpointed is None:
            return []
        return [heard.PositionMoved(child.key, status.checkpointed)]


def _made_up_farewell(child: Child) -> list[heard.Event]:
    reason = "its report was lost; by its exit code"
    match exit_code_of(child.status):
        case code if code == UNCLAIMED:
            return [heard.StartUnclaimed(child.key, reason)]
        case code if code == LOST:
            return [heard.LeaseLost(child.key, reason)]
        case code if code == FAILED:
            return [heard.ProcessorFailed(child.key, f"the processor failed; {reason}")]
        case _:
            # DONE too: what was done, ended or released, the core reads on the row.
            return []
