"""The settings of the Kinesis model."""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.local.limits import STORED_BYTES_MAX, ShardLimits
from kclrun.model.stream import LOOPBACK_REGION

# moto uses this account too, so that the ARNs of all services agree.
ACCOUNT_ID: Final = "123456789012"


class KinesisSettings(msgspec.Struct, frozen=True):
    """The settings of the model. `settle_s` is the duration of CREATING, UPDATING and DELETING;
    UPDATING takes at least `update_s`. `limits` None means no limits of rates."""

    account_id: str = ACCOUNT_ID
    region: str = LOOPBACK_REGION
    limits: ShardLimits | None = None
    settle_s: float = 0.0
    update_s: float = 0.0
    stored_bytes_max: int = STORED_BYTES_MAX
