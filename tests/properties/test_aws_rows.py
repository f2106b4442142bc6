"""Rows of the lease table: any lease comes back, and any item is understood or told."""

from hypothesis import given
from hypothesis import strategies as st

from kclrun.aws.rows import decode_page, decode_row, encode_row
from kclrun.model.lease import Halt, Handoff, Lease, LeaseKey, Load, OwnerId, PendingCheckpoint
from kclrun.model.output import Cursor, StoredCursors, sorted_cursors
from kclrun.model.sequence import SENTINELS, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import WallTime
from tests.unit.aws.test_aws_rows import JAVA_ROW, OWN_ROW

shard_ids = st.frozensets(st.text("abc-0123", min_size=1, max_size=20), max_size=3)


numbers = st.integers(0, 10**56).map(str)


positions = st.one_of(
    st.sampled_from(SENTINELS),
    st.builds(ExtendedSequenceNumber, numbers, st.integers(0, 10**6)),
)


milliseconds = st.integers(0, 2 * 10**12).map(lambda value: WallTime(value / 1000))


texts = st.text(min_size=1, max_size=40)


leases = st.builds(
    Lease,
    key=texts.map(LeaseKey),
    checkpoint=positions,
    counter=st.integers(0, 10**15),
    owner=st.none() | texts.map(OwnerId),
    owner_switches=st.integers(0, 10**6),
    parents=shard_ids,
    children=shard_ids,
    hash_range=st.none() | st.integers(0, HASH_KEY_MAX).map(lambda low: HashRange(low, low)),
    checkpoint_owner=st.none() | texts.map(OwnerId),
    pending=st.none() | st.builds(PendingCheckpoint, positions, st.none() | st.binary()),
    throughput_kbps=st.none() | st.floats(0, 1e9),
    failover_s=st.none() | st.integers(1000, 900_000).map(lambda value: value / 1000),
    start=st.none() | texts,
    latest_pinned_at=st.none() | milliseconds,
    halt=st.none() | st.builds(Halt, texts, milliseconds),
    handoff=st.none() | st.builds(Handoff, texts.map(OwnerId), milliseconds),
    offered_to=st.none() | texts.map(OwnerId),
    offered_by=st.none() | texts.map(OwnerId),
    taken_from=st.none() | texts.map(OwnerId),
    outputs=st.none()
    | st.builds(
        StoredCursors,
        positions,
        st.dictionaries(texts, st.builds(Cursor, positions, st.integers(0, 9))).map(sorted_cursors),
    ),
    generation=st.integers(0, 9),
    state_version=st.none() | texts,
    load=st.none() | st.builds(Load, st.floats(0, 1e9), st.floats(0, 64)),
)


@given(leases)
def test_a_row_reads_back_as_the_lease_it_was_made_from(lease):
    assert decode_row(encode_row(lease)) == lease


@given(leases)
def test_a_row_never_holds_null_or_empty_values(lease):
    for attribute in encode_row(lease).values():
        assert "NULL" not in attribute
        assert attribute not in ({"S": ""}, {"SS": []})


attribute_values = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers() | st.just("9" * 400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


attributes = st.dictionaries(
    st.sampled_from(["S", "N", "SS", "B", "NULL", "M"]), attribute_values, max_size=2
)


@given(st.dictionaries(st.sampled_from(list(JAVA_ROW | OWN_ROW)), attributes, max_size=6))
def test_any_item_is_a_lease_foreign_or_broken_and_never_an_error(item):
    page = decode_page([JAVA_ROW | item])

    assert len(page.leases) + len(page.broken) + page.foreign == 1
