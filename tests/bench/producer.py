"""Row `producer`: `kclrun.Producer` over TLS, beside boto3's put_records and `aws_kinesis_agg`.

Cost is by the CPU of this process, all its threads; the service is two others. Then the same
aggregates under the service's limits: what share of what the shards take arrives.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from aws_kinesis_agg.aggregator import RecordAggregator

from bench import hot_shard
from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.measuring import interleaved
from bench.servers import CREDENTIALS, REGION, stock_client
from bench.tls_front import OwnCa, TlsFront
from kclrun import Producer
from kclrun.aws.operations import Operation
from kclrun.local.server import start_embedded

_ROW: Final = "producer"
_STREAM: Final = "bench"
_SHARDS: Final = 4
_RECORDS: Final = 40_000
_KEYS: Final = 5_000
_PAYLOAD: Final = b"x" * 200
# PutRecords takes 500 records at most.
_BATCH: Final = 500
_CREATE: Final = Operation("kinesis", "CreateStream", is_write=True)
# What a shard takes in a second, and has in reserve at the start.
_SHARD_BYTES_PER_S: Final = 2**20
# 40 s of it: enough that the first refusals and what follows them weigh little.
_LIMITED_RECORDS: Final = 160_000
_LIMITED_PAYLOAD: Final = b"x" * 1000


def producer(rounds: int) -> list[Figure]:
    """Records a CPU second, then how close to the limits of the shards aggregates come."""
    with OwnCa() as ca, _environment(ca.bundle):
        return _cost(rounds, ca) + _under_limits()


def _cost(rounds: int, ca: OwnCa) -> list[Figure]:
    with start_embedded() as embedded, TlsFront(embedded.kinesis_endpoint, ca) as url:
        _create(embedded.kinesis_endpoint)
        stock = stock_client("kinesis", url)

        def produced(*, aggregates: bool) -> float:
            with Producer(_STREAM, endpoint_url=url, aggregates=aggregates) as made:
                for number in range(_RECORDS):
                    made.put(_PAYLOAD, f"key-{number % _KEYS}")
            return float(_RECORDS)

        samples = interleaved(
            {
                "aggregates": lambda: produced(aggregates=True),
                "single records": lambda: produced(aggregates=False),
                "boto3 put_records": lambda: _boto3_loop(stock),
                "boto3 + aws_kinesis_agg": lambda: _agg_loop(stock),
            },
            rounds,
        )
        stock.close()
    return _figures(samples)


def _figures(samples: dict[str, list[Sample]]) -> list[Figure]:
    per_core = {name: [each.per_cpu_s for each in taken] for name, taken in samples.items()}
    costs = [
        figure(_ROW, f"{name}, {len(_PAYLOAD)} B", "k records/s/core", [r / 1000 for r in rates])
        for name, rates in per_core.items()
    ]
    ours = per_core["aggregates"]
    return [
        *costs,
        figure(
            *(_ROW, "aggregates / boto3 put_records", "x"),
            paired_ratios(ours, per_core["boto3 put_records"]),
            target=Target(at_least=5.0),
        ),
        figure(
            *(_ROW, "aggregates / boto3 + aws_kinesis_agg", "x"),
            paired_ratios(ours, per_core["boto3 + aws_kinesis_agg"]),
        ),
        figure(
            *(_ROW, "single records / boto3 put_records", "x"),
            paired_ratios(per_core["single records"], per_core["boto3 put_records"]),
        ),
    ]


def _boto3_loop(stock: Any) -> float:
    """What one writes first: fill a batch, put it, put again what was refused."""
    batch: list[dict[str, Any]] = []
    for number in range(_RECORDS):
        batch.append({"Data": _PAYLOAD, "PartitionKey": f"key-{number % _KEYS}"})
        while len(batch) == _BATCH:
            batch = _put(stock, batch)
    return float(_RECORDS)


def _agg_loop(stock: Any) -> float:
    """Its aggregates are of 1 MiB and of any shard; four fill a request."""
    aggregator = RecordAggregator()
    batch: list[dict[str, Any]] = []
    for number in range(_RECORDS):
        full = aggregator.add_user_record(f"key-{number % _KEYS}", _PAYLOAD)
        if full is not None:
            batch.append(_entry(full))
        while len(batch) == _SHARDS:
            batch = _put(stock, batch)
    last = aggregator.clear_and_get()
    while batch or last is not None:
        batch, last = _put(stock, [*batch, *([] if last is None else [_entry(last)])]), None
    return float(_RECORDS)


def _entry(aggregate: Any) -> dict[str, Any]:
    partition_key, _, data = aggregate.get_contents()
    return {"Data": data, "PartitionKey": partition_key}


def _put(stock: Any, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that were refused."""
    answer = stock.put_records(StreamName=_STREAM, Records=batch)
    results = zip(batch, answer["Records"], strict=True)
    return [record for record, result in results if "ErrorCode" in result]


def _under_limits() -> list[Figure]:
    """One run: aggregates as fast as the shards take them, each as many."""
    with start_embedded(limits=True) as embedded:
        _create(embedded.kinesis_endpoint)
        with Producer(_STREAM, endpoint_url=embedded.kinesis_endpoint, aggregates=True) as made:
            began = time.monotonic()
            for number in range(_LIMITED_RECORDS):
                hash_key = str((number % _SHARDS) * (2**128 // _SHARDS))
                made.put(_LIMITED_PAYLOAD, f"key-{number % _KEYS}", hash_key)
            made.flush()
            took_s = time.monotonic() - began
            metrics = made.metrics()
    # One second's worth was in reserve.
    taken = _SHARDS * _SHARD_BYTES_PER_S * (took_s + 1.0)
    refused = metrics.refused_records / (metrics.records + metrics.refused_records)
    return [
        figure(
            *(_ROW, "at the limits: of the bytes that the shards take", "%"),
            [100 * metrics.bytes / taken],
            target=Target(at_least=95.0),
        ),
        figure(
            *(_ROW, "at the limits: refused", "% of the sent"),
            [100 * refused],
            target=Target(at_most=1.0),
        ),
    ]


def _create(url: str) -> None:
    client = hot_shard.wire_client(url)
    client.call(_CREATE, msgspec.json.encode({"StreamName": _STREAM, "ShardCount": _SHARDS}))
    client.close()


@contextmanager
def _environment(ca_bundle: str) -> Iterator[None]:
    """Credentials, region and CA bundle as a user's program finds them."""
    before = dict(os.environ)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": CREDENTIALS.access_key,
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret_key,
        "AWS_SESSION_TOKEN": CREDENTIALS.token or "",
        "AWS_REGION": REGION,
        "AWS_CA_BUNDLE": ca_bundle,
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
