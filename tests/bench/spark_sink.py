"""Row `spark-sink`: rows of Spark into a stream."""

from typing import Final

import msgspec

from bench import hot_shard
from bench.figures import Figure, Sample, figure, paired_ratios
from bench.measuring import timed
from bench.servers import REGION
from bench.spark_prebuilt import BATCH_ROWS
from bench.spark_rig import SparkRig, sample_of
from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.operations import Operation
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.local.server import start_embedded
from kclrun.model.record import PutEntry
from kclrun.producing.kinesis_producer import KinesisProducer

_ROW: Final = "spark-sink"
_SHARDS: Final = 4
_TASKS: Final = 2
_PAYLOAD: Final = b"x" * 200
# The embedded Kinesis takes some 20,000 records a second: a batch is a second or two.
_ROWS_A_TASK: Final = 20_000
_SKIPPED: Final = 1
_BATCHES_MIN: Final = 3
_CREATE: Final = Operation("kinesis", "CreateStream", is_write=True)
_DELETE: Final = Operation("kinesis", "DeleteStream", is_write=True)


def sink(rounds: int) -> list[Figure]:
    """Prebuilt rows of 200 B, 10,000 keys, to four shards without limits: default settings.

    Rows a second of CPU of the JVM and its Python; the embedded Kinesis is not in it, but bounds
    the rate by the wall clock. Against the producer by itself in this process, in turn, with the
    same rows (`bench sink` compares that one with boto3).
    """
    ours: list[Sample] = []
    bare: list[Sample] = []
    with start_embedded() as embedded, SparkRig() as rig:
        client = hot_shard.wire_client(embedded.kinesis_endpoint)
        for number in range(rounds):
            stream = f"bench-{number}"
            client.call(_CREATE, msgspec.json.encode({"StreamName": stream, "ShardCount": _SHARDS}))
            ours.append(_through_spark(rig, embedded.kinesis_endpoint, stream))
            bare.append(_producer_alone(client, stream))
            client.call(_DELETE, msgspec.json.encode({"StreamName": stream}))
        client.close()
    per_core = [sample.per_cpu_s for sample in ours]
    alone = [sample.per_cpu_s for sample in bare]
    return [
        figure(_ROW, "200 B: Spark to the stream", "k rows/s/core", [r / 1_000 for r in per_core]),
        figure(
            *(_ROW, "200 B: … by the wall clock", "k rows/s"),
            [sample.per_wall_s / 1_000 for sample in ours],
        ),
        figure(_ROW, "200 B: the producer alone", "k rows/s/core", [r / 1_000 for r in alone]),
        figure(_ROW, "200 B: rows/CPU-s ÷ the producer's", "x", paired_ratios(per_core, alone)),
    ]


def _through_spark(rig: SparkRig, endpoint: str, stream: str) -> Sample:
    frame = rig.frame(
        "bench-prebuilt",
        rowsPerPartition=_ROWS_A_TASK,
        partitions=_TASKS,
        payloadBytes=len(_PAYLOAD),
    )
    options = {"streamName": stream, "endpointUrl": endpoint, "region": REGION}
    writer = frame.select("partitionKey", "data").writeStream.format("kclrun").options(**options)
    with rig.running(writer) as query:
        return sample_of(rig.batches(query, skipped=_SKIPPED, at_least=_BATCHES_MIN, window_s=0.0))


def _producer_alone(client: WireClient, stream: str) -> Sample:
    shards = WireStreamAdmin(client, stream).list_shards()

    def produce() -> float:
        producer = KinesisProducer(WirePutter(client, stream), shards)
        for number in range(_ROWS_A_TASK):
            producer.add(PutEntry(_PAYLOAD, f"key-{number % BATCH_ROWS:08d}"))
        producer.flush()
        producer.close()
        return float(_ROWS_A_TASK)

    return timed(produce)
