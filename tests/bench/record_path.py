"""Rows `fetch` and `aggregates`: from an HTTP answer to records, on one thread of one process."""

import base64
from collections.abc import Callable
from typing import Any, Final

import msgspec
import urllib3

from bench.canned_pages import SHAPES, iterator_of
from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.measuring import Variant, interleaved
from bench.servers import CREDENTIALS, CannedServer, endpoint_at, stock_client
from kclrun.aws.kinesis import PollingReader
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import open_aggregates

_LIMIT: Final = 10_000
# Pages a run: a run of ours takes some 50 ms of CPU, which is a thousand times the clock's grain.
_SHARE_OF_STOCK: Final = 10
_EMPTY_POLLS: Final = 100


def our_reader(url: str) -> PollingReader:
    """The reader of a lease process, signing included."""
    client = WireClient(endpoint_at(url), lambda: CREDENTIALS, service="kinesis")
    return PollingReader(client, "bench")


def fetch(rounds: int) -> list[Figure]:
    """GetRecords answered, signed for, received and decoded into records.

    Ours is the path of a lease process: `PollingReader.fetch` (sign, send, receive, decode, check
    the order). Against stock boto3's `get_records`, and against a floor: the same bytes over an
    unsigned urllib3 pool, decoded by msgspec into bare structs. Fair because all three ask the
    same server for the same pages in turn, end with one Python object a record with its data as
    bytes, and are charged their own CPU only. Plain HTTP: TLS would cost each of them the same.
    """
    with CannedServer() as server:
        small = interleaved(_readers(server, "small", pages=1), rounds)
        large = interleaved(_readers(server, "large", pages=2), rounds)
        polls = interleaved(_pollers(server), rounds)
    rate = _per_cpu_s(small)
    return [
        figure("fetch", "10k x 200 B: ours", "k records/s/core", _thousands(rate["ours"])),
        figure("fetch", "10k x 200 B: stock boto3", "k records/s/core", _thousands(rate["stock"])),
        figure(
            *("fetch", "10k x 200 B: ours ÷ stock boto3", "x"),
            paired_ratios(rate["ours"], rate["stock"]),
            target=Target(at_least=20.0),
        ),
        figure(
            *("fetch", "10k x 200 B: CPU ÷ unsigned urllib3 + msgspec", "x"),
            paired_ratios(rate["floor"], rate["ours"]),
            target=Target(at_most=1.25),
        ),
        *_informational("1k x 1 kB", _per_cpu_s(large)),
        *_informational("empty polls", _per_cpu_s(polls)),
        figure(
            *("fetch", "an empty poll: ours", "ms CPU"),
            [1000 / value for value in _per_cpu_s(polls)["ours"]],
        ),
    ]


def aggregates(rounds: int) -> list[Figure]:
    """40 aggregates of 240 user records of 200 bytes (50 kB each): from HTTP to a list of them.

    Ours is `PollingReader.fetch` and `open_aggregates`, its MD5 checks included; against stock
    boto3 and `aws_kinesis_agg`, which checks the same MD5s. That library takes records as Lambda
    shapes them only, so its run includes making that shape (base64); it also returns base64,
    which a user would decode: that is left out, in its favour.
    """
    with CannedServer() as server:
        samples = interleaved(_openers(server), rounds)
    rate = _per_cpu_s(samples)
    what = "40 x 50 kB"
    return [
        figure("aggregates", f"{what}: ours", "k user records/s/core", _thousands(rate["ours"])),
        figure(
            *("aggregates", f"{what}: boto3 + aws_kinesis_agg", "k user records/s/core"),
            _thousands(rate["stock"]),
        ),
        figure(
            *("aggregates", f"{what}: ours ÷ boto3 + aws_kinesis_agg", "x"),
            paired_ratios(rate["ours"], rate["stock"]),
            target=Target(at_least=4.5),
        ),
    ]


def _informational(what: str, rate: dict[str, list[float]]) -> list[Figure]:
    return [
        figure(
            *("fetch", f"{what}: ours ÷ stock boto3", "x"),
            paired_ratios(rate["ours"], rate["stock"]),
        ),
        figure(
            *("fetch", f"{what}: CPU ÷ unsigned urllib3 + msgspec", "x"),
            paired_ratios(rate["floor"], rate["ours"]),
        ),
    ]


def _readers(server: CannedServer, shape: str, pages: int) -> dict[str, Variant]:
    """One run of each reads so many pages, ours and the floor more, being faster."""
    stock, ours, floor = _fetchers(server)
    more = pages * _SHARE_OF_STOCK
    return {
        "stock": lambda: _read(stock, shape, pages),
        "ours": lambda: _read(ours, shape, more),
        "floor": lambda: _read(floor, shape, more),
    }


def _pollers(server: CannedServer) -> dict[str, Variant]:
    stock, ours, floor = _fetchers(server)
    return {
        "stock": lambda: _polled(stock),
        "ours": lambda: _polled(ours),
        "floor": lambda: _polled(floor),
    }


def _polled(poll: Callable[[str], int]) -> float:
    for _ in range(_EMPTY_POLLS):
        poll(iterator_of("empty-1", 0))
    return _EMPTY_POLLS


def _read(fetch_page: Callable[[str], int], shape: str, pages: int) -> float:
    """Read pages one after the other; as many records as the server sends, or it is no reader."""
    total = sum(fetch_page(iterator_of(f"{shape}-1", page)) for page in range(pages))
    expected = pages * SHAPES[shape].records
    assert total == expected, f"{total} records of {expected}"
    return total


def _fetchers(server: CannedServer) -> tuple[Callable[[str], int], ...]:
    """Stock, ours, floor: each takes an iterator and returns how many records came."""
    boto = stock_client("kinesis", server.url)
    reader = our_reader(server.url)
    return (
        lambda iterator: len(boto.get_records(ShardIterator=iterator, Limit=_LIMIT)["Records"]),
        lambda iterator: len(reader.fetch(iterator, _LIMIT).records),
        _floor(server.url),
    )


class _BareRecord(msgspec.Struct, gc=False):
    Data: bytes
    PartitionKey: str
    SequenceNumber: str
    ApproximateArrivalTimestamp: float


class _BareBody(msgspec.Struct):
    Records: list[_BareRecord]
    NextShardIterator: str | None = None
    MillisBehindLatest: int = 0


def _floor(url: str) -> Callable[[str], int]:
    """The least that urllib3 and msgspec can do: no signature, no check, no error handling."""
    pool = urllib3.connection_from_url(url)
    decode = msgspec.json.Decoder(_BareBody).decode
    encode = msgspec.json.Encoder().encode
    headers = {
        "Content-Type": "application/x-amz-json-1.1",
        "X-Amz-Target": "Kinesis_20131202.GetRecords",
    }

    def fetch_page(iterator: str) -> int:
        body = encode({"ShardIterator": iterator, "Limit": _LIMIT})
        return len(decode(pool.urlopen("POST", "/", body, headers).data).Records)

    return fetch_page


def _openers(server: CannedServer) -> dict[str, Variant]:
    from aws_kinesis_agg.deaggregator import deaggregate_records

    boto = stock_client("kinesis", server.url)
    reader = our_reader(server.url)
    pages = 3
    expected = SHAPES["aggregated"].records_a_page

    def ours() -> float:
        return _opened(lambda at: open_aggregates(reader.fetch(at, _LIMIT).records))

    def stock() -> float:
        return _opened(lambda at: deaggregate_records(_as_lambda(_stock_records(at))))

    def _stock_records(iterator: str) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = boto.get_records(ShardIterator=iterator)["Records"]
        return records

    def _opened(opened: Callable[[str], list[Any]]) -> float:
        total = sum(len(opened(iterator_of("aggregated-1", page))) for page in range(pages))
        assert total == pages * expected, f"{total} user records of {pages * expected}"
        return total

    return {"stock": stock, "ours": ours}


def _as_lambda(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "kinesis": {
                "kinesisSchemaVersion": "1.0",
                "partitionKey": record["PartitionKey"],
                "sequenceNumber": record["SequenceNumber"],
                "approximateArrivalTimestamp": record["ApproximateArrivalTimestamp"],
                "data": base64.b64encode(record["Data"]),
            }
        }
        for record in records
    ]


def _per_cpu_s(samples: dict[str, list[Sample]]) -> dict[str, list[float]]:
    return {name: [sample.per_cpu_s for sample in each] for name, each in samples.items()}


def _thousands(values: list[float]) -> list[float]:
    return [value / 1000 for value in values]
