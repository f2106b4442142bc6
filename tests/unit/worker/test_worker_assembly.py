"""What a start command becomes: clients, limits, the policy of the core."""

import msgspec
import pytest

from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.wire import WireEndpoint
from kclrun.worker import main
from kclrun.worker.assembly import (
    expiry_watch,
    hash_range,
    pacing,
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


def test_a_hash_range_travels_in_decimal():
    spec = msgspec.structs.replace(SPEC, hash_range_start="0", hash_range_end=str(HASH_KEY_MAX))

    assert hash_range(spec) == HashRange(0, HASH_KEY_MAX)
