"""The nouns refuse what they cannot mean, and show no payload."""

import pytest

from kclrun.errors import LimitExceeded
from kclrun.model.lease import Lease, LeaseKey, Owner, are_children_lost
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from tests.support.tables import over_rows


@over_rows("text", ["", "00", "01", "-1", "1.0", "1 ", "½", "trim_horizon", "9" * 130, "SHARD-END"])
def test_what_is_no_sequence_number_is_refused(text):
    with pytest.raises(LimitExceeded, match="is not a sequence number"):
        ExtendedSequenceNumber(text)


def test_the_longest_sequence_number_has_129_digits():
    assert ExtendedSequenceNumber("9" * 129).sort_key[1] == 129


def test_a_negative_sub_sequence_number_is_refused():
    with pytest.raises(LimitExceeded, match="negative"):
        ExtendedSequenceNumber("1", -1)


def test_a_position_reads_as_people_write_it():
    assert str(ExtendedSequenceNumber("495", 3)) == "495/3"
    assert str(ExtendedSequenceNumber("495")) == "495"
    assert str(SHARD_END) == "SHARD_END"


def test_an_owner_id_is_its_parts_and_back():
    owner = Owner("eu-west-1a", "ip-10-0-3-7", "5f2c")

    assert owner.id == "kclrun:eu-west-1a:ip-10-0-3-7:5f2c"
    assert Owner.parse(owner.id) == owner


@pytest.mark.parametrize("theirs", ["a-java-worker", "kclrun:offered", "kclrun:a:b:c:d", ""])
def test_an_id_that_is_not_ours_has_no_parts(theirs):
    assert Owner.parse(theirs) is None


def test_an_owner_part_with_a_colon_is_refused():
    with pytest.raises(LimitExceeded, match="colon"):
        Owner("a:b", "host", "nonce")


def test_a_lease_is_ended_at_shard_end_only():
    assert Lease(key=LeaseKey("s"), checkpoint=SHARD_END).is_ended
    assert not Lease(key=LeaseKey("s"), checkpoint=TRIM_HORIZON).is_ended


@pytest.mark.parametrize(("switches", "is_hopping"), [(4, False), (5, True)])
def test_a_lease_hops_from_five_switches_without_a_checkpoint(switches, is_hopping):
    lease = Lease(key=LeaseKey("s"), checkpoint=TRIM_HORIZON, owner_switches=switches)

    assert lease.is_hopping == is_hopping


def test_hash_ranges_hold_both_their_ends():
    low, high = HashRange(0, 9), HashRange(10, 19)

    assert 0 in low
    assert 9 in low
    assert 10 not in low
    assert not low.overlaps(high)
    assert low.overlaps(HashRange(9, 10))


def test_representations_show_no_payload_and_no_key():
    record = Record(b"canary-payload", "canary-key", "7")

    assert "canary" not in repr(record)
    assert "canary" not in repr(RecordBatch([record]))
    assert record.arrived_at.tzinfo is not None


def test_a_batch_is_a_sequence_of_its_records():
    records = [Record(b"a", "k", "1"), Record(b"b", "k", "2"), Record(b"c", "k", "3")]
    batch = RecordBatch(records, millis_behind_latest=5, fencing_token=9)

    assert list(batch) == records
    assert batch[1] is records[1]
    assert batch[1:] == records[1:]
    assert (len(batch), batch.millis_behind_latest, batch.fencing_token) == (3, 5, 9)


@pytest.mark.parametrize(
    ("children", "are_lost"),
    [
        pytest.param([], True, id="none is there"),
        pytest.param([(0, 49)], True, id="the high one is gone"),
        pytest.param([(50, 99)], True, id="the low one is gone"),
        pytest.param([(0, 29), (60, 99)], True, id="the middle one is gone"),
        pytest.param([(0, 98)], True, id="its last key is gone"),
        pytest.param([(1, 99)], True, id="its first key is gone"),
        pytest.param([(0, 49), (51, 99)], True, id="one key between them is gone"),
        pytest.param([(50, 99), (0, 49)], False, id="both are there"),
        pytest.param([(0, 500)], False, id="a merge with a neighbour"),
        pytest.param([(0, 60), (40, 200)], False, id="they overlap"),
    ],
)
def test_children_of_a_trimmed_shard_are_lost_where_its_keys_went_to_none_that_is_listed(
    children, are_lost
):
    ranges = [HashRange(*each) for each in children]

    assert are_children_lost(HashRange(0, 99), ranges) == are_lost
    assert not are_children_lost(None, ranges)
