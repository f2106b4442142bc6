"""The settings of a machine that is an EC2 instance, of an autoscaling group or not. Part of
`schema.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kclrun.config.setting_types import documented

__all__ = ["InstanceSettings"]

# What EC2 Auto Scaling takes as the name of a hook.
_HookName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9_/-]{1,255}$",
        extra={"words": " of letters, digits, dashes, underscores and slashes"},
    ),
]


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is done about the life of the EC2 instance that this runs on."""

    watch: Annotated[
        Literal["auto"] | bool,
        documented(
            "drain when EC2 or the autoscaling group is about to end this machine; auto: where"
            " there is instance metadata"
        ),
    ] = "auto"
    rebalance: Annotated[
        Literal["auto", "drain", "ignore"],
        documented(
            "what a rebalance recommendation means; auto: drain where a termination hook is named"
        ),
    ] = "auto"
    group: Annotated[
        str | None,
        documented(
            "autoscaling group of this machine; left out: as its tag in the instance metadata says",
            min_length=1,
            max_length=255,
        ),
    ] = None
    launch_hook: Annotated[
        _HookName | None, documented("lifecycle hook to complete when this machine is ready")
    ] = None
    termination_hook: Annotated[
        _HookName | None, documented("lifecycle hook to complete when this machine is drained")
    ] = None

    @property
    def drains_on_rebalance(self) -> bool:
        """A recommendation ends nothing by itself: who drains for it and is not replaced is idle
        for good. A hook says that somebody set up a group that replaces its machines."""
        if self.rebalance == "auto":
            return self.termination_hook is not None
        return self.rebalance == "drain"
