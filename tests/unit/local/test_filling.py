"""The filler on the embedded AWS: what a source gives arrives, and arrives when it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import msgspec
import pytest

from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.operations import Operation
from kclrun.aws.wire import WireClient
from kclrun.errors import SettingsError
from kclrun.local.filling import (
    LOCAL_CREDENTIALS,
    Filler,
    Filling,
    FillOrder,
    FillReport,
    Reshard,
    wait_until_active,
)
from kclrun.local.server import start_embedded
from kclrun.model.record import IteratorType, Record
from kclrun.model.wire import WireEndpoint

pytestmark = pytest.mark.slow
PAUSE = timedelta(milliseconds=300)
CREATE = Operation("kinesis", "CreateStream", is_write=True)


@pytest.fixture
def stream() -> Iterator[tuple[WireEndpoint, WireClient]]:
    with start_embedded() as running:
        endpoint = WireEndpoint(running.kinesis_endpoint, "eu-west-1", "eu-west-1")
        client = WireClient(endpoint, lambda: LOCAL_CREDENTIALS, service="kinesis")
        client.call(CREATE, msgspec.json.encode({"StreamName": "flights", "ShardCount": 1}))
        wait_until_active(WireStreamAdmin(client, "flights"))
        yield endpoint, client
        client.close()


# Fewer records than a packer holds back for a shard, and than a request waits for.
def test_what_comes_before_a_pause_of_the_source_arrives_before_it(
    stream: tuple[WireEndpoint, WireClient],
):
    endpoint, client = stream
    filler = Filler(FillOrder(endpoint, "flights", "module:function", ()))

    report = filler.fill(lambda: [("k", b"1"), ("k", b"2"), PAUSE, ("k", b"3")])

    assert report == FillReport(user_records=3, records=3, reshards=0)
    before, also_before, after = _records(client)
    assert [before.data, also_before.data, after.data] == [b"1", b"2", b"3"]
    # Arrivals are told in milliseconds.
    assert after.arrived_at - also_before.arrived_at >= PAUSE - timedelta(milliseconds=1)


def test_what_is_neither_a_record_nor_a_pause_is_refused(stream: tuple[WireEndpoint, WireClient]):
    filler = Filler(FillOrder(stream[0], "flights", "module:function", ()))

    with pytest.raises(
        SettingsError, match=r"item 2 is not a \(key: str, data: bytes\) pair but a float"
    ):
        filler.fill(lambda: [PAUSE, 0.3])


def _records(client: WireClient) -> Sequence[Record]:
    reader = PollingReader(client, "flights")
    iterator = reader.iterator("shardId-000000000000", IteratorType.TRIM_HORIZON)
    return reader.fetch(iterator, 100).records


def test_a_fill_tells_how_far_it_is_and_its_total_where_its_source_was_counted(
    stream: tuple[WireEndpoint, WireClient], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kclrun.local.filling._REPORT_EVERY_S", 0.0)
    records = [("k", b"x")] * 1_200
    counted: list[Filling] = []
    uncounted: list[Filling] = []
    order = FillOrder(stream[0], "flights", "module:function", ())
    resharding = msgspec.structs.replace(order, reshard=(Reshard(1.0, split=0),))

    Filler(order, uncounted.append).fill(lambda: [*records, PAUSE / 100])
    Filler(resharding, counted.append).fill(lambda: [*records, PAUSE / 100])

    for told in (counted, uncounted):
        assert list(dict.fromkeys(each.done for each in told)) == [500, 1_000, 1_200]
    assert {each.total for each in counted} == {1_200}
    assert {each.total for each in uncounted} == {None}
