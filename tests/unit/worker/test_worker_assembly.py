"""What a start command becomes: clients, limits, the policy of the core."""

import msgspec
import pytest

from kclrun.model.lease import Lease
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.wire import WireEndpoint
from kclrun.worker import main
from kclrun.worker.delivery_queue import QueueLimits
from kclrun.worker.main import (
    expiry_watch,
    hash_range,
    lease_policy,
    pacing,
    queue_limits,
    services,
    table_endpoint,
)
from tests.support import start_specs

ENDPOINT = WireEndpoint("http://127.0.0.1:9", "x", "x", connect_timeout_s=2.0, read_timeout_s=8.0)
SPEC = msgspec.structs.replace(start_specs.SPEC, kinesis=ENDPOINT, dynamodb=ENDPOINT, options={})


@pytest.mark.parametrize(
    ("failover_s", "connect_timeout_s", "read_timeout_s"),
    [(4.0, 1.0, 1.0), (10.0, 2.0, 2.5), (20.0, 2.0, 5.0), (60.0, 2.0, 8.0)],
)
def test_no_wait_for_the_table_is_longer_than_a_quarter_of_the_failover_nor_than_was_set(
    failover_s, connect_timeout_s, read_timeout_s
):
    endpoint = table_endpoint(msgspec.structs.replace(SPEC, failover_s=failover_s))

    assert endpoint.connect_timeout_s == connect_timeout_s
    assert endpoint.read_timeout_s == read_timeout_s


@pytest.mark.parametrize(
    ("arn", "reference"),
    [
        (None, {"StreamName": "s"}),
        ("arn:aws:kinesis:x:1:stream/t", {"StreamARN": "arn:aws:kinesis:x:1:stream/t"}),
    ],
)
def test_the_clients_ask_for_the_stream_by_its_arn_where_that_is_known(arn, reference):
    made = services(msgspec.structs.replace(SPEC, stream_arn=arn))

    assert made.reader._reference == made.admin._reference == reference


def test_waits_of_a_lease_process_that_no_setting_changes():
    # A failover of the default, in which the manager's take holds; and a moment for user code.
    assert (main.BEGIN_WAIT_S, main.USER_CODE_WAIT_S) == (10.0, 1.0)


def test_reading_follows_the_start_command():
    spec = msgspec.structs.replace(
        SPEC,
        fetch=msgspec.structs.replace(SPEC.fetch, idle_s=3.0, floor_s=0.5),
        failover_s=7.0,
    )
    row = Lease(key="s0", checkpoint=TRIM_HORIZON, parents=("s9",), hash_range=HashRange(0, 9))
    watch = expiry_watch(spec, row)

    assert (pacing(spec).after_page(0, 0), pacing(spec).after_page(1, 0)) == (3.0, 0.5)
    assert watch.is_listing_due(100.0)
    watch.listing_failed(100.0)
    assert [watch.is_listing_due(now) for now in (106.9, 107.0)] == [False, True]


@pytest.mark.parametrize(("start", "end"), [(None, None), ("0", None), (None, "9")])
def test_a_shard_whose_hash_range_is_not_known_whole_has_none(start, end):
    spec = msgspec.structs.replace(SPEC, hash_range_start=start, hash_range_end=end)

    assert hash_range(spec) is None


def test_a_hash_range_travels_in_decimal():
    spec = msgspec.structs.replace(SPEC, hash_range_start="0", hash_range_end=str(HASH_KEY_MAX))

    assert hash_range(spec) == HashRange(0, HASH_KEY_MAX)


@pytest.mark.parametrize(("batch_max", "cap", "expected"), [(10, 1000, 10), (1000, 10, 5)])
def test_two_batches_fit_below_the_cap_of_uncheckpointed_records(batch_max, cap, expected):
    spec = msgspec.structs.replace(
        SPEC,
        fetch=msgspec.structs.replace(SPEC.fetch, batch_max=batch_max, buffer_bytes=7),
        checkpoint=msgspec.structs.replace(SPEC.checkpoint, uncheckpointed_max=cap),
    )

    assert queue_limits(spec) == QueueLimits(buffer_bytes=7, batch_max=expected)


@pytest.mark.parametrize("flag", [False, True])
def test_the_core_is_told_what_the_start_command_says(flag):
    spec = msgspec.structs.replace(
        SPEC,
        seen_counter=7,
        expires_instant=8.0,
        has_waited=flag,
        others_in_sight=not flag,
        checkpoint=CheckpointPolicy(mode="manual", every_s=3.0, uncheckpointed_max=50),
    )

    policy = lease_policy(spec)

    assert (policy.key, policy.me, policy.seen_counter) == ("s0", "kclrun::h:n", 7)
    assert (policy.expires_instant, policy.failover_s) == (8.0, 10.0)
    assert (policy.has_waited, policy.others_in_sight) == (flag, not flag)
    assert policy.checkpoint is spec.checkpoint


def test_the_keys_of_a_shard_are_measured_unless_the_window_is_nothing():
    without = msgspec.structs.replace(SPEC.fetch, hot_window_s=0.0)
    meter = main.key_meter(SPEC)

    assert main.key_meter(msgspec.structs.replace(SPEC, fetch=without)) is None
    assert meter is not None
    assert (meter._window_s, meter._hash_range) == (60.0, main.hash_range(SPEC))
