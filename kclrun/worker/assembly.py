"""What a start command becomes: clients, limits, the policy of the core."""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from kclrun.aws.changes.stream import admin_of, reader_of, signing_service
from kclrun.aws.fan_out import FanOutReader
from kclrun.aws.http.pool import CONNECTIONS_MAX
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.ipc.board import StartSpec, boottime
from kclrun.lease.policy import LeasePolicy, Pacing, batch_records_max
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.shard import HashRange
from kclrun.model.stream import is_change_stream, shard_id_of
from kclrun.model.wire import WireEndpoint
from kclrun.ports import LeaseTable, ShardReader, ShardSubscriber, StreamAdmin
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.traffic.hot_keys import KeyMeter
from kclrun.worker.delivery_queue import QueueLimits
from kclrun.worker.sharing import SharedLease

# One write of the row may take at most a quarter of the failover: three writes and a read of the
# row fit before the fence.
WRITE_SHARE: Final = 0.25


# At most three threads of each of 64 leases send requests at once.
_SHARED_CONNECTIONS_MAX: Final = 192


class Services(msgspec.Struct, frozen=True):
    """The ports of one lease process."""

    reader: ShardReader
    admin: StreamAdmin
    table: LeaseTable
    credentials: HeldCredentials
    subscriber: ShardSubscriber | None = None


def services(spec: StartSpec, connections_max: int = CONNECTIONS_MAX) -> Services:
    """Clients made in this process, after the fork; no request is made yet."""
    credentials = HeldCredentials(spec.credentials)
    client = functools.partial(WireClient, credentials=credentials, connections_max=connections_max)
    stream = spec.stream_arn or spec.stream_name
    source = client(spec.source or spec.kinesis, service=signing_service(stream))
    dynamodb = client(table_endpoint(spec), service="dynamodb")
    return Services(
        reader=reader_of(source, stream),
        subscriber=FanOutReader(source, spec.consumer_arn) if spec.consumer_arn else None,
        admin=admin_of(source, stream),
        table=DynamoLeaseTable(dynamodb, spec.table_name),
        credentials=credentials,
    )


def shared_services(spec: StartSpec, lease: SharedLease) -> Services:
    """One set of clients for the leases of a process: connections and TLS take most memory."""
    names = (spec.stream_arn or spec.stream_name, spec.consumer_arn, spec.table_name)
    patience_s = table_endpoint(spec).read_timeout_s  # follows the failover of the fleet
    return lease.process.part((*names, patience_s), lambda: services(spec, _SHARED_CONNECTIONS_MAX))


def table_endpoint(spec: StartSpec) -> WireEndpoint:
    """The lease table's endpoint with time-outs that leave room for three writes per failover."""
    patience_s = min(spec.dynamodb.read_timeout_s, spec.failover_s * WRITE_SHARE)
    return msgspec.structs.replace(
        spec.dynamodb,
        read_timeout_s=patience_s,
        connect_timeout_s=min(spec.dynamodb.connect_timeout_s, patience_s),
    )


def lease_policy(spec: StartSpec) -> LeasePolicy:
    return LeasePolicy(
        key=LeaseKey(spec.lease_key),
        me=OwnerId(spec.owner),
        seen_counter=spec.seen_counter,
        expires_instant=spec.expires_instant,
        failover_s=spec.failover_s,
        checkpoint=spec.checkpoint,
        has_waited=spec.has_waited,
        past_pause=spec.past_pause,
        others_in_sight=spec.others_in_sight,
        has_keyed_state=spec.state is not None,
        has_outputs=spec.state is not None or any(not place.grows for place in spec.outputs),
        has_storing_outputs=spec.state is not None
        or any(place.stores_cursor for place in spec.outputs),
        is_bounded=spec.replay is not None,
    )


def pacing(spec: StartSpec) -> Pacing:
    return Pacing(spec.fetch.idle_s, spec.fetch.floor_s, spec.fetch.every_s)


def queue_limits(spec: StartSpec) -> QueueLimits:
    half_the_cap = batch_records_max(spec.checkpoint.uncheckpointed_max)
    return QueueLimits(spec.fetch.buffer_bytes, min(spec.fetch.batch_max, half_the_cap))


def expiry_watch(spec: StartSpec, row: Lease) -> ExpiryWatch:
    """By bare ids, as the service lists them."""
    parents = [shard_id_of(parent) for parent in row.parents]
    return ExpiryWatch(
        spec.shard_id,
        row.hash_range,
        parents,
        apart_s=spec.failover_s,
        may_be_listed=is_change_stream(spec.stream_arn or spec.stream_name),
    )


def hash_range(spec: StartSpec) -> HashRange | None:
    if spec.hash_range_start is None or spec.hash_range_end is None:
        return None
    return HashRange(int(spec.hash_range_start), int(spec.hash_range_end))


def key_meter(spec: StartSpec) -> KeyMeter | None:
    window_s = spec.fetch.hot_window_s
    return KeyMeter(hash_range(spec), window_s, boottime()) if window_s else None
