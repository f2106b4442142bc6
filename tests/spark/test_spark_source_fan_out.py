"""The source by enhanced fan-out: rows as by polling, through reshards, restarts and a consumer
that is removed."""

import json

import pytest

from tests.patience import HUNG_S
from tests.spark.source_rig import as_put, in_order_of_each_key, until

pytestmark = pytest.mark.slow


def reported(query):
    """What the source says in the query's last progress."""
    progress = query.lastProgress
    if progress is None or not progress["sources"]:
        return {}
    shown = progress["sources"][0]["latestOffset"]
    return json.loads(shown) if isinstance(shown, str) else shown


def is_subscribed(query, shards):
    return lambda: reported(query).get("shardsSubscribed") == shards


def by_fan_out(collected, stream, **options):
    return collected(
        stream, consumerMode="fan-out", consumerName="spark", pollInterval="1s", **options
    )


def consumers(stream):
    arn = stream.kinesis.describe_stream_summary(StreamName=stream.name)[
        "StreamDescriptionSummary"
    ]["StreamARN"]
    return stream.kinesis.list_stream_consumers(StreamARN=arn)["Consumers"]


def test_rows_are_those_put_through_a_split_a_merge_and_a_restart(collected, stream):
    stream.put(30)
    run = by_fan_out(collected, stream)

    query = run.start()
    until(is_subscribed(query, 1), "the shard is subscribed", query)
    stream.put(30)
    until(lambda: len(run.rows) >= 60, "the pushed rows", query)
    stream.split(stream.open_shards()[0])
    stream.put(30)
    until(lambda: len(run.rows) >= 90, "the rows of the children", query)
    until(is_subscribed(query, 2), "both children are subscribed", query)
    stream.put(30)
    until(lambda: len(run.rows) >= 120, "the pushed rows of the children", query)
    query.stop()
    stream.put(30)
    query = run.start()
    until(lambda: len(run.rows) >= 150, "the rows from between", query)
    stream.merge(*stream.open_shards())
    stream.put(30)
    until(lambda: len(run.rows) >= 180, "the rows of the merged shard", query)
    until(is_subscribed(query, 1), "the merged shard is subscribed", query)
    stream.put(30)
    until(lambda: len(run.rows) >= 210, "its pushed rows", query)
    query.stop()

    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)
    assert len(run.rows) == 210
    [consumer] = consumers(stream)
    assert consumer["ConsumerName"] == "spark"


def test_without_its_consumer_the_query_polls_and_says_so(collected, stream):
    stream.put(10)
    run = by_fan_out(collected, stream)
    query = run.start()
    until(is_subscribed(query, 1), "the shard is subscribed", query)
    [consumer] = consumers(stream)

    stream.kinesis.deregister_stream_consumer(ConsumerARN=consumer["ConsumerARN"])
    stream.put(10)
    until(lambda: len(run.rows) >= 20, "rows without the consumer", query)
    until(is_subscribed(query, 0), "it is told", query)
    until(lambda: reported(query)["subscriptionTrouble"], "the reason is told", query)
    stream.put(10)
    until(lambda: len(run.rows) >= 30, "more rows", query)
    query.stop()

    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)
    assert len(run.rows) == 30
    assert consumers(stream) == []


def test_available_now_polls_and_registers_nothing(collected, stream):
    stream.put(20)
    run = by_fan_out(collected, stream)

    query = run.start(availableNow=True)
    assert query.awaitTermination(HUNG_S)

    assert len(run.rows) == 20
    assert consumers(stream) == []


def test_the_consumer_of_another_stream_ends_the_query_with_words(collected, stream):
    arn = "arn:aws:kinesis:us-east-1:123456789012:stream/another/consumer/c:1"
    run = collected(stream, consumerMode="fan-out", consumerName=arn)
    query = run.start()

    with pytest.raises(Exception, match="is not a consumer of stream"):
        query.awaitTermination(HUNG_S)
