"""The making of aggregates: exact sizes, limits, and the keys that route them."""

import pytest

from kclrun.codec import kpl
from kclrun.codec.aggregator import Aggregator, build_aggregate
from kclrun.codec.kpl import open_aggregates
from kclrun.errors import LimitExceeded, MalformedAggregate
from kclrun.model.quotas import RECORD_BYTES_LARGEST
from kclrun.model.record import Record


def test_an_aggregate_is_routed_by_its_first_user_record():
    aggregator = Aggregator()
    aggregator.add("first", b"1", "42")
    aggregator.add("second", b"2", "43")

    partition_key, explicit_hash_key, _ = aggregator.finish()

    assert (partition_key, explicit_hash_key) == ("first", "42")


def test_a_later_explicit_hash_key_does_not_route_the_aggregate():
    aggregator = Aggregator()
    aggregator.add("first", b"1")
    aggregator.add("second", b"2", "43")

    assert aggregator.finish().explicit_hash_key is None


def test_a_key_is_written_once_however_often_it_is_used():
    once = build_aggregate([("key" * 50, b"", "12345678")])
    twice = build_aggregate([("key" * 50, b"", "12345678")] * 2)

    assert len(twice) - len(once) == 8  # A user record of 6 bytes, its tag and its length.


@pytest.mark.parametrize("short_by", [0, 1])
def test_the_last_byte_is_used_and_not_one_more(short_by):
    exact = len(build_aggregate([("kéy", bytes(300), "7")])) + len("kéy".encode())
    aggregator = Aggregator(size_max=exact - short_by)

    fits = aggregator.add("kéy", bytes(300), "7")

    assert fits is not bool(short_by)
    assert len(aggregator) == int(fits)


def test_by_default_an_aggregate_and_its_key_fill_one_mebibyte_at_most():
    aggregator = Aggregator()
    while aggregator.add("k" * 100, bytes(1000)):
        pass

    size = aggregator.size_bytes
    finished = aggregator.finish()

    assert size == len(finished.data) + 100
    assert 1024 * 1024 - 1100 < size <= 1024 * 1024


def test_what_did_not_fit_leaves_no_trace():
    aggregator = Aggregator(size_max=100)
    aggregator.add("a", b"1")
    size = aggregator.size_bytes

    assert not aggregator.add("b", bytes(100), "9")

    assert aggregator.size_bytes == size
    assert aggregator.finish().data == build_aggregate([("a", b"1", None)])


def test_a_finished_aggregator_starts_anew():
    aggregator = Aggregator()
    aggregator.add("a", b"1", "1")
    first = aggregator.finish()
    aggregator.add("a", b"1", "1")

    assert len(aggregator) == 1
    assert aggregator.finish() == first


def test_there_is_no_aggregate_of_nothing():
    with pytest.raises(MalformedAggregate):
        Aggregator().finish()


def test_it_takes_no_more_user_records_than_can_be_opened(monkeypatch):
    monkeypatch.setattr(kpl, "USER_RECORDS_MAX", 2)
    aggregator = Aggregator()

    assert [aggregator.add("a", b"") for _ in range(3)] == [True, True, False]
    with pytest.raises(LimitExceeded):
        build_aggregate([("a", b"", None)] * 3)


@pytest.mark.parametrize("key", ["", "k" * 257, "\ud800"])
def test_a_key_the_service_would_refuse_is_refused(key):
    with pytest.raises(LimitExceeded):
        Aggregator().add(key, b"")


def test_an_explicit_hash_key_the_service_would_refuse_is_refused():
    with pytest.raises(LimitExceeded):
        Aggregator().add("a", b"", str(2**128))


@pytest.mark.parametrize("size_max", [0, -1, RECORD_BYTES_LARGEST + 1])
def test_a_size_no_record_can_have_is_refused(size_max):
    with pytest.raises(LimitExceeded):
        Aggregator(size_max=size_max)


def test_an_aggregate_of_ten_mebibytes_can_be_made_and_opened():
    aggregator = Aggregator(size_max=RECORD_BYTES_LARGEST)
    while aggregator.add("k", bytes(100_000)):
        pass
    count, (key, _, data) = len(aggregator), aggregator.finish()

    assert RECORD_BYTES_LARGEST - 100_100 < len(data) + len(key) <= RECORD_BYTES_LARGEST
    assert len(open_aggregates([Record(data, key, "1")])) == count


def test_its_representation_holds_no_key_and_no_payload():
    aggregator = Aggregator()
    aggregator.add("SECRET", b"SECRET")

    assert "SECRET" not in repr(aggregator.finish())
