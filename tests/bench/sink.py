"""Row `sink`: what the Kinesis producer costs, and what it does when one shard becomes hot."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from bench import hot_shard
from bench.figures import Figure, Target, figure, paired_ratios
from bench.measuring import Variant, interleaved
from bench.servers import stock_client
from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.operations import Operation
from kclrun.aws.put_records import WirePutter
from kclrun.local.server import start_embedded
from kclrun.model.record import PutEntry
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer

_ROW: Final = "sink"
_STREAM: Final = "bench"
_SHARDS: Final = 4
_RECORDS: Final = 20_000
_KEYS: Final = 5_000
_PAYLOAD: Final = b"x" * 200
# PutRecords takes 500 records at most.
_BATCH: Final = 500
_CREATE: Final = Operation("kinesis", "CreateStream", is_write=True)


def sink(rounds: int) -> list[Figure]:
    """Rows/s/core without limits against stock boto3, then the hot shard under limits.

    Cost is by the CPU of this process, all its threads; the server is another one. The hot shard
    is one run however many rounds: half a minute, 150,000 records, all read back.
    """
    return _cost(rounds) + _behaviour(hot_shard.run())


def _cost(rounds: int) -> list[Figure]:
    with start_embedded() as embedded:
        client = hot_shard.wire_client(embedded.kinesis_endpoint)
        client.call(_CREATE, msgspec.json.encode({"StreamName": _STREAM, "ShardCount": _SHARDS}))
        shards = WireStreamAdmin(client, _STREAM).list_shards()
        putter = WirePutter(client, _STREAM)

        def produced(settings: ProducerSettings, keys: int = _KEYS) -> Variant:
            def produce() -> float:
                producer = KinesisProducer(putter, shards, settings, relist=lambda: shards)
                for entry in _entries(keys):
                    producer.add(entry)
                producer.flush()
                producer.close()
                return float(_RECORDS)

            return produce

        stock = stock_client("kinesis", embedded.kinesis_endpoint)
        samples = interleaved(
            {
                "ordered": produced(ProducerSettings()),
                "unordered": produced(ProducerSettings(keeps_order=False)),
                "aggregates of 50 keys": produced(ProducerSettings(aggregates=True), keys=50),
                "boto3": lambda: _boto3_loop(stock),
            },
            rounds,
        )
        client.close()
        stock.close()
    per_core = {name: [each.per_cpu_s for each in taken] for name, taken in samples.items()}
    return [
        figure(_ROW, f"{name}, {len(_PAYLOAD)} B", "k rows/s/core", [r / 1000 for r in rates])
        for name, rates in per_core.items()
    ] + [
        figure(
            *(_ROW, "ordered / stock boto3 put_records", "x"),
            paired_ratios(per_core["ordered"], per_core["boto3"]),
        )
    ]


def _entries(keys: int) -> Iterator[PutEntry]:
    return (PutEntry(_PAYLOAD, f"key-{number % keys}") for number in range(_RECORDS))


def _boto3_loop(stock: Any) -> float:
    """What one writes first: fill a batch, put it, put again what was refused."""
    batch: list[dict[str, Any]] = []
    for number in range(_RECORDS):
        batch.append({"Data": _PAYLOAD, "PartitionKey": f"key-{number % _KEYS}"})
        while len(batch) == _BATCH:
            answer = stock.put_records(StreamName=_STREAM, Records=batch)
            results = zip(batch, answer["Records"], strict=True)
            batch = [record for record, result in results if "ErrorCode" in result]
    return float(_RECORDS)


def _behaviour(outcome: hot_shard.Outcome) -> list[Figure]:
    def one(what: str, unit: str, value: float, target: Target | None = None) -> Figure:
        return figure(_ROW, what, unit, [value], target=target)

    none = Target(at_most=0)
    return [
        one("hot shard: records written and read back", "records", outcome.sent),
        one("hot shard: records lost", "records", outcome.lost, none),
        one("hot shard: records out of their key's order", "records", outcome.out_of_order, none),
        one("hot shard: records there twice", "records", outcome.twice, none),
        one(
            *("hot shard: least healthy shard, hot / alone", "x", outcome.least_healthy_share),
            Target(at_least=0.9),
        ),
        one("hot shard: largest pause", "s", outcome.metrics.pause_max_s),
        one("hot shard: time at full batch, all shards", "%", 100 * outcome.full_batch_time_share),
        one(
            *("hot shard: time at full batch, the hot one", "%"),
            100 * outcome.hot_full_batch_time_share,
        ),
        one("hot shard: last refusal to full speed", "s", outcome.metrics.recovery_max_s),
        one("hot shard: cooled down to full speed", "s", outcome.recovered_after_s),
    ]
