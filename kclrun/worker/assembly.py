"""From a start command to the things that serve it: clients, table, core, desk."""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.signing import HeldCredentials
from kclrun.aws.wire import WireClient
from kclrun.consuming.error_policy import ErrorPolicy
from kclrun.consuming.pacing import Pacing
from kclrun.consuming.policy import LifePolicy, batch_records_max
from kclrun.ipc.spec import StartSpec
from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.shard import HashRange
from kclrun.ports import LeaseTable, ShardReader, StreamAdmin
from kclrun.worker.desk import DeskLimits

__all__ = [
    "Services",
    "desk_limits",
    "error_policy",
    "hash_range",
    "life_policy",
    "pacing",
    "services",
]

# One write of the row may not take longer than a quarter of the failover: three of them, and a
# read back, fit before the fence.
WRITE_SHARE: Final = 0.25


class Services(msgspec.Struct, frozen=True):
    """The ports of one lease process."""

    reader: ShardReader
    admin: StreamAdmin
    table: LeaseTable
    credentials: HeldCredentials


def services(spec: StartSpec) -> Services:
    """Clients made in this process, after the fork; no request is made yet."""
    credentials = HeldCredentials(spec.credentials)
    kinesis = WireClient(spec.kinesis, credentials, service="kinesis")
    patience_s = min(spec.dynamodb.read_timeout_s, spec.failover_s * WRITE_SHARE)
    impatient = msgspec.structs.replace(
        spec.dynamodb,
        read_timeout_s=patience_s,
        connect_timeout_s=min(spec.dynamodb.connect_timeout_s, patience_s),
    )
    dynamodb = WireClient(impatient, credentials, service="dynamodb")
    stream = spec.stream_arn or spec.stream_name
    return Services(
        reader=PollingReader(kinesis, stream),
        admin=WireStreamAdmin(kinesis, stream),
        table=DynamoLeaseTable(dynamodb, spec.table_name),
        credentials=credentials,
    )


def life_policy(spec: StartSpec) -> LifePolicy:
    return LifePolicy(
        key=LeaseKey(spec.lease_key),
        me=OwnerId(spec.owner),
        seen_counter=spec.seen_counter,
        expires_instant=spec.expires_instant,
        failover_s=spec.failover_s,
        checkpoint_mode=spec.checkpoint.mode,
        checkpoint_every_s=spec.checkpoint.every_s,
        uncheckpointed_max=spec.checkpoint.uncheckpointed_max,
        has_waited=spec.has_waited,
        others_in_sight=spec.others_in_sight,
    )


def error_policy(spec: StartSpec) -> ErrorPolicy:
    return ErrorPolicy(spec.on_error.retries, spec.on_error.backoff_s)


def pacing(spec: StartSpec) -> Pacing:
    return Pacing(spec.fetch.idle_s, spec.fetch.floor_s)


def desk_limits(spec: StartSpec) -> DeskLimits:
    half_the_cap = batch_records_max(spec.checkpoint.uncheckpointed_max)
    return DeskLimits(spec.fetch.buffer_bytes, min(spec.fetch.batch_max, half_the_cap))


def hash_range(spec: StartSpec) -> HashRange | None:
    if spec.hash_range_start is None or spec.hash_range_end is None:
        return None
    return HashRange(int(spec.hash_range_start), int(spec.hash_range_end))
