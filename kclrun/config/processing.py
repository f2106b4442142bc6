"""How the records of a shard are processed: the sections `concurrency`, `state`, `watermark`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kclrun.config.names import documented
from kclrun.config.units import ByteSize, Duration
from kclrun.model.policies import Order
from kclrun.model.table import is_table_arn

# So many threads take 8 GB of address space and some 30 MB of memory; tasks take less. More calls
# at a time than a service takes from one client only wait there.
RECORDS_MAX: Final = 1000


class ConcurrencySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many records of a shard are processed at the same time, by process_record."""

    records: Annotated[
        int,
        documented(
            "most calls of process_record at a time in a shard: threads for `def`,"
            " tasks of one event loop for `async def`",
            ge=1,
            le=RECORDS_MAX,
        ),
    ] = 64
    order: Annotated[
        Order,
        documented(
            "`key`: records of a partition key follow each other; `none`: in any order (not"
            " with `state`)"
        ),
    ] = "key"
    timeout: Annotated[
        Duration | None,
        documented("with `async def`: a call that takes longer is cancelled, and has failed"),
    ] = None


TABLE_SCHEME: Final = "dynamodb://"


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the values of context.state are kept. While a shard is read, they are in memory, or
    with `local` on a disk, too."""

    store: Annotated[
        str | None,
        documented(
            "folder that all machines of the application share, s3://bucket/prefix, or"
            " dynamodb://table, or a table's ARN; on Spark a folder or a bucket, or left out: then"
            " the state is below spark.checkpoint"
        ),
    ] = None
    max_bytes: Annotated[ByteSize, documented("of one shard; a lease above it halts")] = ByteSize(
        2**30
    )
    local: Annotated[
        str | None,
        documented(
            "folder on a disk of this machine for the values that `memory` does not"
            " hold; a process that starts again on this machine begins with that copy"
        ),
    ] = None
    memory: Annotated[
        ByteSize | None, documented("of one shard, with `local`; 256MiB if it is left out")
    ] = None
    retain: Annotated[
        Duration, documented("how long versions are kept that no lease begins with any more")
    ] = Duration(86400)
    outbox: Annotated[
        bool,
        documented(
            "versions hold the rows of their commits, too: several outputs and the"
            " state agree with each other also if the processor is not deterministic"
        ),
    ] = False
    begin: Annotated[
        Literal["empty"] | None,
        documented(
            "`empty`: leases that processed records before the application had `state`"
            " begin with none at their checkpoint; without it they are refused"
        ),
    ] = None

    @property
    def table(self) -> str | None:
        """The table that `store` names, if it is one."""
        store = self.store or ""
        is_table = store.startswith(TABLE_SCHEME) or is_table_arn(store)
        return store.removeprefix(TABLE_SCHEME) if is_table else None


class WatermarkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far the time of a shard has come, for timers and windows (`on_timer`)."""

    lateness: Annotated[Duration, documented("how much later than others a record may come")] = (
        Duration(10)
    )
    every: Annotated[
        Duration,
        documented(
            "the steps in which the watermark moves: a call of process_records ends at each of them"
        ),
    ] = Duration(1)
    idle: Annotated[
        Duration | None,
        documented(
            "after so long without records in a shard that is read to its end, event"
            " timers fire by the clock of Kinesis; if it is left out, they wait for a record"
        ),
    ] = None
