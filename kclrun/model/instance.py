"""The EC2 instance that we run on, as it is told about itself: who it is, and what awaits it.

Plain values. May not know: how they are asked for. Look next: `manager/instance_life.py`, which
decides what follows from them.
"""

from __future__ import annotations

import enum

import msgspec

from kclrun.model.time import WallTime

__all__ = [
    "InstanceIdentity",
    "InstanceLook",
    "Interruption",
    "LifecycleAction",
    "NoticeKind",
    "TargetState",
]


class NoticeKind(enum.Enum):
    """Why an instance will end, in the words of the log."""

    SPOT_INTERRUPTION = "spot interruption"
    REBALANCE = "rebalance recommendation"
    GROUP_TERMINATES = "the autoscaling group ends this instance"


class TargetState(enum.Enum):
    """Where the group is taking the instance, as far as that is anything to us."""

    IN_SERVICE = "InService"
    TERMINATED = "Terminated"
    # Detached, Standby and the states of a warm pool: the machine goes on as it is.
    OTHER = "other"


class InstanceIdentity(msgspec.Struct, frozen=True):
    """Which instance this is. `group` is None where it has none, or is not shown its own tags."""

    instance_id: str
    region: str
    zone: str
    group: str | None = None


class Interruption(msgspec.Struct, frozen=True):
    """What EC2 will do to a spot instance (`terminate`, `stop`, `hibernate`), and when."""

    action: str
    at: WallTime | None = None


class InstanceLook(msgspec.Struct, frozen=True):
    """One look at all that may await the instance; nothing of it is the rule."""

    interruption: Interruption | None = None
    is_rebalance_recommended: bool = False
    target_state: TargetState | None = None


class LifecycleAction(msgspec.Struct, frozen=True):
    """What a lifecycle hook of a group holds an instance for."""

    region: str
    group: str
    hook: str
    instance_id: str
