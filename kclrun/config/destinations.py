"""The settings of the places where rows and dead letters go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kclrun.config.names import (
    BucketUrl,
    DeliveryStreamName,
    OutputRef,
    QueueName,
    StreamName,
    TableReference,
    TopicArn,
    documented,
)
from kclrun.config.units import ByteSize, Duration

# Spark's options are texts, but people write numbers and switches, too.
SparkOptions = dict[str, str | int | float | bool]


class DeadLetterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where records go that are given up."""

    path: Annotated[
        str | None, documented("folder for dead letters, relative to where kclrun is started")
    ] = None
    s3: Annotated[
        BucketUrl | None,
        documented("s3://bucket/prefix; beside `sqs` or `stream`, for what is too large for them"),
    ] = None
    sqs: Annotated[QueueName | None, documented("a queue's name or URL")] = None
    stream: Annotated[StreamName | None, documented("a stream's name or ARN")] = None


class RollSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a file or an object of rows ends; whichever comes first."""

    every: Annotated[Duration, documented("age of its first row")] = Duration(60)
    size: Annotated[ByteSize, documented("bytes before compression")] = ByteSize(64 * 2**20)


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where emitted rows, or on Spark the rows of the pipeline's DataFrame, go."""

    path: Annotated[
        str | None, documented("folder for emitted rows, relative to where kclrun is started")
    ] = None
    s3: Annotated[BucketUrl | None, documented("objects of rows under s3://bucket/prefix")] = None
    sql: Annotated[
        str | None, documented("rows of a table; SQLAlchemy's URL, such as postgresql+psycopg://…")
    ] = None
    dynamodb: Annotated[
        TableReference | None,
        documented("items of a table, by its name or ARN; a row is a whole item"),
    ] = None
    kinesis: Annotated[StreamName | None, documented("records of a stream; name or ARN")] = None
    sqs: Annotated[QueueName | None, documented("messages of a queue; name or URL")] = None
    sns: Annotated[TopicArn | None, documented("messages of a topic; its ARN")] = None
    firehose: Annotated[
        DeliveryStreamName | None, documented("records of a delivery stream; its name")
    ] = None
    use: Annotated[
        OutputRef | None, documented("an output of your own: module:Class, a kclrun.Output")
    ] = None
    format: Annotated[
        str | None,
        documented(
            "`json` (lines), or with `s3` or `roll` also `parquet`, with `roll` also `csv`;"
            " spark: json, parquet, any Spark format, or kclrun for a stream"
        ),
    ] = None
    roll: Annotated[
        RollSettings | None,
        documented("ends files and objects; left out: `path` has a file a shard, `s3` rolls"),
    ] = None
    table: Annotated[str | None, documented("sql: table, or schema.table")] = None
    write: Annotated[
        Literal["insert", "upsert"], documented("sql: upsert replaces rows with the same `key`")
    ] = "insert"
    create: Annotated[bool, documented("sql: create the table from `schema` if it is missing")] = (
        False
    )
    key: Annotated[
        tuple[str, ...],
        documented(
            "columns: key of an upsert; one column that orders messages (partition key of a"
            " stream, group of a FIFO queue or topic)"
        ),
    ] = ()
    aggregate: Annotated[
        bool,
        documented("kinesis: rows of a shard share a record, as of the KPL; readers must open it"),
    ] = False
    buffer: Annotated[
        ByteSize, documented("bytes of rows that wait for the destination before the lease waits")
    ] = ByteSize(64 * 2**20)
    options: Annotated[
        dict[str, Any],
        documented("use: what your class reads as context.options; spark: options of that format"),
    ] = {}
    mode: Annotated[
        Literal["append", "update", "complete"], documented("spark: which rows a batch writes")
    ] = "append"
    partition_by: Annotated[
        tuple[str, ...], documented("spark: columns that folders are named by")
    ] = ()
    schema: Annotated[
        str | None,
        documented(
            "columns that each emitted row must fit, such as `carrier string NOT NULL, miles long`"
        ),
    ] = None
