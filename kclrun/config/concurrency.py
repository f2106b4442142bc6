"""The section `concurrency`: records of a shard that are processed at the same time."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kclrun.config.units import Duration

# So many threads take 8 GB of address space and some 30 MB of memory; tasks take less. More calls
# at a time than a service takes from one client only wait there.
RECORDS_MAX: Final = 1000


class ConcurrencySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many records of a shard are processed at the same time, by process_record."""

    records: Annotated[
        int,
        msgspec.Meta(
            description="most calls of process_record at a time in a shard: threads for `def`,"
            " tasks of one event loop for `async def`",
            ge=1,
            le=RECORDS_MAX,
        ),
    ] = 64
    order: Annotated[
        Literal["key", "none"],
        msgspec.Meta(
            description="`key`: records of a partition key follow each other; `none`: in any order"
        ),
    ] = "key"
    timeout: Annotated[
        Duration | None,
        msgspec.Meta(
            description="with `async def`: a call that takes longer is cancelled, and has failed"
        ),
    ] = None
