"""The EC2 instance that we run on: its identity, and the events that await it.

Plain values. Must not know: how they are requested.
"""

from __future__ import annotations

import enum

import msgspec

from kclrun.model.time import WallTime


class NoticeKind(enum.Enum):
    """Why an instance will end, in the words of the log."""

    SPOT_INTERRUPTION = "spot interruption"
    REBALANCE = "rebalance recommendation"
    GROUP_TERMINATES = "the autoscaling group ends this instance"


class TargetState(enum.Enum):
    """The state to which the group moves the instance, as far as it matters to us."""

    IN_SERVICE = "InService"
    TERMINATED = "Terminated"
    # Detached, Standby and the states of a warm pool: the machine continues as it is.
    OTHER = "other"


class InstanceIdentity(msgspec.Struct, frozen=True):
    """The identity of this instance. `group` is None without a group, or if its tags are hidden."""

    instance_id: str
    region: str
    zone: str
    group: str | None = None


class Interruption(msgspec.Struct, frozen=True):
    """EC2's announced action on a spot instance (`terminate`, `stop`, `hibernate`), and its
    time."""

    action: str
    at: WallTime | None = None


class InstanceLook(msgspec.Struct, frozen=True):
    """One look at all events that may await the instance; usually there are none."""

    interruption: Interruption | None = None
    is_rebalance_recommended: bool = False
    target_state: TargetState | None = None


class LifecycleAction(msgspec.Struct, frozen=True):
    """The lifecycle hook of a group that holds an instance."""

    region: str
    group: str
    hook: str
    instance_id: str
