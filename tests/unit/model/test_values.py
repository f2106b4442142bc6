"""What the nouns say where nothing was said, and what follows from their parts."""

import datetime
from itertools import pairwise

import pytest

from kclrun.errors import InvariantViolation
from kclrun.model.instance import InstanceLook
from kclrun.model.lease import (
    ASK_STALE_AFTER_S,
    FAILOVER_MAX_S,
    FAILOVER_MIN_S,
    WRITTEN_AGAIN_AHEAD,
    DiedOn,
    Halt,
    Lease,
    LeaseKey,
    Owner,
    coordinator_table,
    is_native,
    mode_advice,
)
from kclrun.model.record import PutEntry, Record, RecordBatch, Statistics
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SENTINELS,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.stream import short_name, spelled_out
from kclrun.model.text import escaped, escaped_in_json, sanitize
from kclrun.model.time import backoff_s
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.protocol import writes as changes
from kclrun.protocol.conditions import WRITES
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.support.tables import over_rows

KEY, ME, YOU = LeaseKey("s"), "kclrun::here:a", "kclrun::there:b"
READS_SINCE = 5 * FAILOVER_MAX_S


def at(number, sub=0):
    return ExtendedSequenceNumber(str(number), sub)


# Positions.


def test_sentinels_stand_around_all_numbers_and_sub_sequence_numbers_come_last():
    ordered = [
        *(AT_TIMESTAMP, TRIM_HORIZON, LATEST),
        *(at(0), at(0, 1), at(9), at(9, 2), at(9, 10), at(10), at("9" * 129, 7)),
        SHARD_END,
    ]
    turned = ordered[5:] + ordered[:5]

    assert sorted(turned) == ordered
    assert sorted(turned, key=lambda each: each.sort_key) == ordered
    for low, high in pairwise(ordered):
        assert low < high
        assert low <= high
        assert high > low
        assert high >= low
        assert [high < low, high <= low, low > high, low >= high] == [False] * 4


def test_equal_positions_are_at_most_and_at_least_each_other():
    for one, same in ((at(5, 2), at(5, 2)), (LATEST, ExtendedSequenceNumber("LATEST"))):
        assert one <= same
        assert one >= same
        assert not one < same
        assert not one > same


def test_the_four_sentinels_and_nothing_else_are_sentinels():
    assert all(each.is_sentinel for each in SENTINELS)
    assert len(set(SENTINELS)) == 4
    assert not at(0).is_sentinel


@pytest.mark.parametrize("sentinel", SENTINELS, ids=str)
def test_a_sentinel_with_a_sub_sequence_number_of_others_reads_as_its_name(sentinel):
    assert str(ExtendedSequenceNumber(sentinel.sequence_number, 5)) == sentinel.sequence_number


# Leases.


def test_a_row_of_which_only_the_position_is_known_is_unowned_and_was_never_written():
    row = Lease(key=KEY, checkpoint=TRIM_HORIZON)

    assert (row.counter, row.owner, row.owner_switches) == (0, None, 0)
    assert row.parents == row.children == frozenset()


def test_a_host_failed_a_lease_only_while_the_row_stands_where_its_processes_died():
    died = DiedOn("host-1", at(5))

    assert Lease(key=KEY, checkpoint=at(5), died_on=died).failed_slot == "host-1"
    assert Lease(key=KEY, checkpoint=at(6), died_on=died).failed_slot is None
    assert Lease(key=KEY, checkpoint=at(5)).failed_slot is None


def test_the_slot_of_an_owner_is_its_host_and_that_of_another_is_itself():
    assert Owner.slot_of("kclrun:zone:host:n") == "host"
    assert Owner.slot_of("java-worker") == "java-worker"


def test_the_bounds_of_a_lease_are_those_that_are_documented():
    assert (FAILOVER_MIN_S, FAILOVER_MAX_S) == (1.0, 900.0)
    assert ASK_STALE_AFTER_S == 30.0
    assert WRITTEN_AGAIN_AHEAD == 5_000


def test_a_row_written_again_is_ahead_of_whatever_a_java_worker_can_have_counted():
    assert WRITTEN_AGAIN_AHEAD > READS_SINCE


# Writes.


def test_a_take_is_by_force_and_a_claim_has_waited_only_where_they_say_so():
    take = changes.Take(KEY, ME, YOU, 3, 10.0, "LATEST")

    assert (take.forced, take.latest_pinned_at, take.stream_created_at) == (False, None, None)
    assert not changes.Claim(KEY, ME, 3).has_waited


def test_a_renewal_leaves_an_ask_and_an_offer_is_to_whoever_comes_unless_they_say_else():
    renewal, offer = changes.Renew(KEY, ME, 3), changes.Offer(KEY, ME, 3, at(2), at(1))

    assert (renewal.throughput_kbps, renewal.drops_ask) == (None, False)
    assert (offer.offered_to, offer.died_on) == (None, None)


def test_a_change_writes_its_own_row_or_those_that_it_creates():
    rows = tuple(Lease(key=LeaseKey(key), checkpoint=TRIM_HORIZON) for key in "ab")

    assert changes.keys_of(changes.CreateLease(rows[1])) == ("b",)
    assert changes.keys_of(changes.CreateChildren(rows, (changes.EndedParent(KEY),))) == ("a", "b")
    assert changes.keys_of(changes.Claim(KEY, ME, 3)) == (KEY,)


DIED = DiedOn("host", at(1))


def reset_to(position, children=frozenset()):
    halt = Halt("a reset", 1.0)
    return changes.ResetLease(KEY, ME, 3, at(1), position, 2, halt, children=frozenset(children))


@over_rows(
    ("change", "mistake"),
    [
        (changes.Take(KEY, ME, "java", 3, 10.0, "LATEST", forced=True), None),
        (changes.Take(KEY, ME, YOU, 3, 10.0, "LATEST"), None),
        (changes.Take(KEY, ME, YOU, 3, 10.0, "LATEST", forced=True), "by force, not kclrun::there"),
        (changes.Take(KEY, ME, None, 3, 10.0, "LATEST", forced=True), "by force, not None"),
        (changes.Offer(KEY, ME, 3, at(1), at(1), died_on=DIED), None),
        (changes.Offer(KEY, ME, 3, at(2), at(1), YOU), None),
        (changes.Offer(KEY, ME, 3, at(2), at(1), died_on=DIED), "has no position or receiver"),
        (changes.Offer(KEY, ME, 3, at(1), at(1), YOU, DIED), "has no position or receiver"),
        (changes.LateCheckpoint(KEY, ME, at(1), at(2)), None),
        (changes.LateCheckpoint(KEY, ME, at(1), SHARD_END), "never SHARD_END"),
        (changes.LateCheckpoint(KEY, ME, TRIM_HORIZON, LATEST), "never LATEST"),
        (reset_to(at(2)), None),
        (reset_to(TRIM_HORIZON), None),
        (reset_to(SHARD_END, {"c"}), None),
        (reset_to(SHARD_END), "a reset is never to SHARD_END"),
        (reset_to(at(2).at_tick(1)), "a reset is never to 2"),
        (changes.NameChildren(KEY, ME, 3, frozenset({"c"})), None),
        (changes.NameChildren(KEY, ME, 3, frozenset()), "children"),
        (changes.Renew(KEY, ME, 3), None),
    ],
)
def test_a_write_that_no_condition_could_stop_is_not_sent(change, mistake):
    write = WRITES[type(change)]
    if mistake is None:
        write.refuse_mistake(change)
        return
    with pytest.raises(InvariantViolation, match=mistake):
        write.refuse_mistake(change)


def test_the_status_of_a_process_says_nothing_that_it_was_not_given_and_its_states_are_stored():
    status = LeaseStatus(pid=1, incarnation=1, state=WorkerState.STARTING)

    said = {name: getattr(status, name) for name in status.__struct_fields__[3:]}
    assert {name: value for name, value in said.items() if value} == {"millis_behind_latest": -1}
    assert " ".join(state.name for state in sorted(WorkerState)) == (
        "STARTING CLAIMING PROCESSING ENDING OFFERING HALTED LOST FINISHED"
    )
    assert sorted(WorkerState) == [*range(1, 9)]


# Records.


def test_a_record_of_no_aggregate_has_a_position_of_its_own_number():
    record = Record(b"a", "k", "7")

    assert record.position == at(7)
    assert (record.aggregated, record.malformed, record.explicit_hash_key) == (False, False, None)
    assert record.approximate_arrival_timestamp == 0.0


def test_a_record_of_an_aggregate_has_its_index_in_its_position_and_its_time_in_utc():
    record = Record(b"abc", "k", "7", 1_700_000_000.5, sub_sequence_number=3)

    assert record.position == at(7, 3)
    assert repr(record) == "Record(7/3, 3 bytes)"
    assert record.arrived_at == datetime.datetime(
        2023, 11, 14, 22, 13, 20, 500_000, tzinfo=datetime.UTC
    )


def test_a_batch_without_a_claim_has_the_smallest_token_and_no_lag():
    batch = RecordBatch([])

    assert (batch.fencing_token, batch.millis_behind_latest) == (0, None)


def test_a_record_to_be_put_is_as_large_as_its_data_and_the_bytes_of_its_key():
    assert PutEntry(b"abc", "ké").size_bytes == 6
    assert PutEntry(b"abc", "k").user_records == 1
    assert repr(PutEntry(b"abc", "canary")) == "PutEntry(3 bytes)"


# Measurements, instances, pauses.


def test_statistics_hold_the_number_the_sum_and_both_ends_of_all_values():
    reported = Statistics.of(5.0).with_value(2.0).with_value(9.0)

    assert Statistics.of(5.0) == Statistics(count=1, total=5.0, minimum=5.0, maximum=5.0)
    assert reported == Statistics(count=3, total=16.0, minimum=2.0, maximum=9.0)


def test_a_look_that_found_nothing_awaits_nothing():
    look = InstanceLook()

    assert (look.interruption, look.is_rebalance_recommended, look.target_state) == (
        *(None, False, None),
    )


def test_pauses_begin_below_a_tenth_of_a_second_and_end_at_three_seconds():
    assert backoff_s(1, 0.0) == 0.05
    assert backoff_s(2, 0.0) == 0.1
    assert backoff_s(20, 1.0) == 3.0


def test_no_pause_is_above_its_bound_however_often_it_was_asked():
    pauses = [backoff_s(attempt, 1.0, max_s=60.0) for attempt in (1, 5, 10, 16, 17, 10_000)]

    assert pauses == sorted(pauses)
    assert pauses[-1] == 60.0


# KCL 3.


@over_rows(
    ("mode", "native"),
    [
        ("CLIENT_VERSION_3X", True),
        ("CLIENT_VERSION_3X_WITH_ROLLBACK", True),
        ("CLIENT_VERSION_UPGRADE_FROM_2X", False),
        ("CLIENT_VERSION_2X", False),
        ("CLIENT_VERSION_INIT", False),
        ("CLIENT_VERSION_4X", False),
        (None, False),
    ],
)
def test_a_leader_assigns_the_leases_in_the_two_modes_of_kcl_3_only(mode, native):
    assert is_native(mode) == native


def test_each_mode_has_an_advice_of_its_own_and_an_unknown_one_says_so():
    known = (
        *("CLIENT_VERSION_3X", "CLIENT_VERSION_3X_WITH_ROLLBACK"),
        *("CLIENT_VERSION_UPGRADE_FROM_2X", "CLIENT_VERSION_2X", "CLIENT_VERSION_INIT"),
    )

    assert len({mode_advice(mode) for mode in known}) == 5
    assert not any("not known" in mode_advice(mode) for mode in known)
    assert "not known" in mode_advice("CLIENT_VERSION_4X")
    assert coordinator_table("shop", "leases") == "shop-CoordinatorState"
    arn = "arn:aws:dynamodb:eu-west-1:123456789012:table"
    assert coordinator_table("shop", f"{arn}/leases") == f"{arn}/shop-CoordinatorState"


# Endpoints and keys.


def test_an_endpoint_is_verified_and_reached_without_a_proxy_unless_it_says_else():
    endpoint = WireEndpoint("https://kinesis.example", "eu-west-1", "eu-west-1")
    assert (endpoint.connect_timeout_s, endpoint.read_timeout_s) == (5.0, 10.0)

    assert (endpoint.verify, endpoint.ca_bundle, endpoint.proxies) == (True, None, {})


def test_no_proxy_password_and_no_key_is_shown():
    endpoint = WireEndpoint("u", "r", "r", proxies={"https": "http://me:canary@proxy"})
    credentials = WireCredentials("canary", "canary", "canary")

    for shown in (endpoint, credentials):
        assert "canary" not in f"{shown} {shown!r} {shown.__rich_repr__()}"
    assert "https" in repr(endpoint)


# Names and text.


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("0", "shardId-000000000000"),
        ("2", "shardId-000000000002"),
        ("999999999999", "shardId-999999999999"),
        ("orders:120", "orders:shardId-000000000120"),
    ],
)
def test_a_shard_has_a_short_name_and_is_spelled_out_from_it(short, long):
    assert spelled_out(short) == long
    assert short_name(long) == short


@over_rows("name", ["", "1234567890123", "-1", "٣", "x", "shard-2"])
def test_what_is_no_number_of_a_shard_is_left_as_it_is(name):
    assert spelled_out(name) == short_name(name) == name


@over_rows("name", ["007", "shardId-", "shardId-0x2", "shardId-٣", "orders:shardId-a"])
def test_what_is_no_shard_id_is_not_made_shorter(name):
    assert short_name(name) == name


def test_text_of_others_moves_no_cursor_and_stays_on_its_line_unless_lines_are_kept():
    text = "a\tb\n\x1b[2J\u202e"

    assert escaped(text) == "a\\tb\\n\\x1b[2J\\u202e"
    assert escaped(text, keeps_lines=True) == "a\tb\n\\x1b[2J\\u202e"
    assert sanitize(text) == "a\tb\n\ufffd[2J\ufffd"
    assert escaped_in_json('"\u202e"') == '"\\u202e"'
