"""Reads a stream by another library and only counts its records: a peer of the row `peers`.

A script, `peer_reader.py LIBRARY [URL STREAM]`, because the library is in an environment of its
own. Counts go to the file $KCLRUN_RIG_LEDGER, a line each.
"""

import asyncio
import os
import sys

# Of one line; the row reads a multiple of it.
EACH = 1_000
REGION = "us-east-1"


def boto3(url, stream):
    """The loop of the tutorials, without a pause."""
    import boto3

    client = boto3.client("kinesis", endpoint_url=url, region_name=REGION)
    iterators = {
        shard["ShardId"]: client.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        for shard in client.list_shards(StreamName=stream)["Shards"]
    }
    while True:
        for shard_id, iterator in iterators.items():
            answer = client.get_records(ShardIterator=iterator, Limit=10_000)
            iterators[shard_id] = answer["NextShardIterator"]
            _count(len(answer["Records"]))


def async_kinesis(url, stream):
    """One consumer with its defaults; it gives the data as text."""
    from kinesis import Consumer
    from kinesis.processors import StringProcessor

    async def read():
        reader = Consumer(stream, endpoint_url=url, region_name=REGION, processor=StringProcessor())
        async with reader as consumer:
            count = 0
            # Its iteration ends whenever nothing has come for two seconds.
            while True:
                async for _ in consumer:
                    count += 1
                    if count % EACH == 0:
                        _count(EACH)

    asyncio.run(read())


def kclpy():
    """Below the MultiLangDaemon; checkpoints every batch, as the sample of amazon_kclpy does."""
    from amazon_kclpy import kcl
    from amazon_kclpy.v3 import processor

    class Counts(processor.RecordProcessorBase):
        def initialize(self, given):
            pass

        def process_records(self, given):
            _count(len(given.records))
            given.checkpointer.checkpoint()

        def lease_lost(self, given):
            pass

        def shard_ended(self, given):
            given.checkpointer.checkpoint()

        def shutdown_requested(self, given):
            given.checkpointer.checkpoint()

    kcl.KCLProcess(Counts()).run()


def _count(records):
    if records:
        os.write(_FILE, f"{records}\n".encode())


if __name__ == "__main__":
    _FILE = os.open(os.environ["KCLRUN_RIG_LEDGER"], os.O_WRONLY | os.O_APPEND)
    {"boto3": boto3, "async-kinesis": async_kinesis, "kclpy": kclpy}[sys.argv[1]](*sys.argv[2:])
