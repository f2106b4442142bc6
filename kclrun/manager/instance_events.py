"""What happens to the instance that we run on, and what to do about it. Look next:
`instance_life.py`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kclrun.manager.lifecycle_completion import LifecycleAnswer
from kclrun.model.instance import InstanceIdentity, InstanceLook, LifecycleAction, NoticeKind
from kclrun.model.time import Instant, WallTime

__all__ = [
    "BecameReady",
    "Complete",
    "CompletionAnswered",
    "Drain",
    "Drained",
    "Heartbeat",
    "HeartbeatAnswered",
    "Identified",
    "InstanceCommand",
    "InstanceEvent",
    "Looked",
    "Note",
    "StopBegan",
    "Ticked",
]


class Identified(msgspec.Struct, frozen=True):
    """The metadata said which instance this is. Once."""

    identity: InstanceIdentity


class Looked(msgspec.Struct, frozen=True):
    """A look at the metadata, by the host's clock at `looked_at`."""

    look: InstanceLook
    looked_at: WallTime


class BecameReady(msgspec.Struct, frozen=True):
    """The lease table was read and lease processes can be started. Once."""


class StopBegan(msgspec.Struct, frozen=True):
    """A stop is under way, whoever asked for it. Once."""


class Drained(msgspec.Struct, frozen=True):
    """No lease process lives, and nothing more will be given up. Once."""


class HeartbeatAnswered(msgspec.Struct, frozen=True):
    """What a `Heartbeat` came to."""

    action: LifecycleAction
    answer: LifecycleAnswer


class CompletionAnswered(msgspec.Struct, frozen=True):
    """What a `Complete` came to."""

    action: LifecycleAction
    answer: LifecycleAnswer


class Ticked(msgspec.Struct, frozen=True):
    """Time went by: about every half second."""


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


class Drain(msgspec.Struct, frozen=True):
    """Give all leases up and take no more; by `by`, where the end of the instance is known."""

    notice: NoticeKind
    by: Instant | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """Have the hook's time begin anew; comes back as HeartbeatAnswered."""

    action: LifecycleAction


class Complete(msgspec.Struct, frozen=True):
    """Tell the group to go on; comes back as CompletionAnswered."""

    action: LifecycleAction


class Note(msgspec.Struct, frozen=True):
    """One line of the log."""

    event: str
    fields: Mapping[str, str | int | float | None]


InstanceCommand = Drain | Heartbeat | Complete | Note
