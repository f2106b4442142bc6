"""Every limit of AWS stands in one place, and every status of a resource of AWS is said."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import botocore.session
import msgspec
import pytest

import kclrun
from kclrun.aws.changes.stream import ChangeStreamAdmin
from kclrun.aws.fan_out import Consumer, registered, require_active, require_room
from kclrun.aws.glue.decoder import GlueDecoder
from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.outputs import item_tables
from kclrun.aws.outputs.messages import DeliveryStreamSender, QueueSender, TopicSender
from kclrun.aws.table_setup import TableReport, inspect_table, require_usable
from kclrun.cli.services import readable
from kclrun.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    RecordError,
    ServiceError,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.model import quotas, statuses
from kclrun.model.quotas import CONSUMERS_ADVANTAGE, CONSUMERS_CREATING_MAX, CONSUMERS_DEFAULT
from kclrun.ports import StreamSummary, record_limit
from kclrun.spark.options import StreamAddress
from kclrun.spark.requests import require_stream
from tests.architecture.sources import files_of_the_package

SOURCES = Path(kclrun.__file__).parent
SESSION = botocore.session.Session()
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
CHANGES_ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"


# Limits: one constant each, equal to the API reference


# Of botocore's copy of the API reference: the shape, and which of its bounds.
REFERENCE = {
    "PUT_RECORDS_MAX": ("kinesis", "PutRecordsRequestEntryList", "max"),
    "RECORD_BYTES_LARGEST": ("kinesis", "Data", "max"),
    "PARTITION_KEY_CHARACTERS_MAX": ("kinesis", "PartitionKey", "max"),
    "NAME_CHARACTERS_MAX": ("kinesis", "ConsumerName", "max"),
    "SHARD_ID_CHARACTERS_MAX": ("kinesis", "ShardId", "max"),
    "ITERATOR_CHARACTERS_MAX": ("kinesis", "ShardIterator", "max"),
    "GET_RECORDS_MAX": ("kinesis", "GetRecordsInputLimit", "max"),
    "BATCH_GET_ITEMS_MAX": ("dynamodb", "BatchGetRequestMap", "max"),
    "DELIVERY_RECORDS_MAX": ("firehose", "PutRecordBatchRequestEntryList", "max"),
    "DELIVERY_RECORD_BYTES_MAX": ("firehose", "Data", "max"),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_a_limit_is_that_of_the_api_reference(name):
    service, shape, bound = REFERENCE[name]

    assert (
        getattr(quotas, name) == SESSION.get_service_model(service).shape_for(shape).metadata[bound]
    )


LIMITS = {
    name: value
    for name, value in vars(quotas).items()
    if name.isupper() and isinstance(value, int | float) and name not in {"KIB", "MIB"}
}
# Numbers that hardly anything else has; and where limits of AWS apply.
COMMON = {512, 900, 1_000, 1_024, 2_048}
TELLING = {value for value in LIMITS.values() if value >= 400} - COMMON

FACING_AWS = (
    *(
        "aws",
        "codec",
        "lease",
        "traffic",
        "local",
        "model",
        "pytest_plugin",
        "reading",
        "outputs",
        "producing",
    ),
    *("spark", "testing", "worker", "ports.py", "producer.py", "cli/put.py", "config"),
)
# Bounds of our own that have the number of a limit of AWS, each with what it bounds.
OF_OUR_OWN = {
    ("config/embedded.py", "SHARDS_MAX"): "shards of a stream on an emulator",
    ("config/yaml_reader.py", "TEXT_BYTES_MAX"): "a file of settings",
    ("traffic/hot_shards.py", "_BEHIND_MS_MIN"): "ten seconds",
    ("model/subscribing.py", "BEHIND_MS_MAX"): "ten seconds",
    ("config/schema.py", "batch_max"): "records of a batch",
    ("local/consumers.py", "EVENT_BYTES_MAX"): "an event of the emulator",
    ("local/hash_ranges.py", "_SHARE"): "a denominator",
    ("local/http2.py", "_WINDOW_BYTES"): "a window of HTTP/2",
    ("local/iterators.py", "_MICROSECONDS"): "microseconds",
    ("local/stream.py", "SCALED_SHARDS_MAX"): "of UpdateShardCount, which only the emulator has",
    ("model/letter.py", "LETTERS_MAX"): "letters of one listing",
    ("outputs/emitted_rows.py", "BUFFER_BYTES_MAX"): "a buffer of a file",
    ("outputs/marks.py", "_FILE_BYTES_MAX"): "a file of marks",
    ("outputs/rolled_files.py", "_SYNC_BYTES"): "bytes between two syncs",
    ("outputs/sql_tables.py", "ROWS_A_STATEMENT"): "rows of a statement",
    ("spark/executor/reading.py", "_FIRST_PAGE_BYTES"): "a guess",
    ("spark/executor/reading.py", "_MICROSECONDS"): "microseconds",
    ("spark/executor/reading.py", "_OPENED_BYTES_MAX"): "opened at a time",
    ("spark/executor/reading.py", "_ROWS_MAX"): "rows of an Arrow batch",
    ("spark/options.py", "_ATTEMPTS_MAX"): "attempts",
    ("spark/options.py", "_INLINE_MAX"): "bytes in a plan",
    ("spark/planning/batch_bounds.py", "_ROWS_BYTES"): "rows in a plan",
    ("spark/planning/offers.py", "_AS_OF_STEP_MS"): "ten seconds",
    ("spark/planning/shard_searches.py", "_ROWS_BYTES_MIN"): "rows in a plan",
    ("spark/planning/batch_target.py", "BATCH_INLINE_BYTES_MAX"): "bytes in a plan",
    ("spark/planning/bound_search.py", "_STEP_BYTES_MIN"): "a step of a search",
    ("spark/planning/shard_cursor.py", "_COUNTED_SAMPLE_BYTES"): "a sample",
    ("spark/planning/read_budget.py", "CALLS_PER_SECOND_MAX"): "calls of one process",
    ("spark/processors/hosting.py", "BATCH_ROWS_MAX"): "rows of an Arrow batch",
    ("codec/record_sizes.py", "REQUEST_BYTES_MAX"): "half of what PutRecords takes, for emulators",
    ("local/requests.py", "Token"): "a token of a listing",
    ("outputs/commits.py", "OFFER_BYTES_MAX"): "rows that an offer leaves",
}


def numbers_of(statement: ast.stmt) -> Iterator[tuple[str, float]]:
    """The name of a constant and its number, where its expression names no other constant; and the
    bounds of an annotation."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    if isinstance(target, ast.Name):
        for node in (statement.value, *(it.value for it in ast.walk(statement) if is_bound(it))):
            if (number := number_of(node)) is not None:
                yield target.id, number


def is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg in {"le", "max_length"}


def number_of(node: ast.expr) -> float | None:
    """The number of an expression of numbers alone (and of KIB and MIB)."""
    names = {it.id for it in ast.walk(node) if isinstance(it, ast.Name)}
    if names - {"KIB", "MIB"} or any(isinstance(it, ast.Call) for it in ast.walk(node)):
        return None
    source = ast.unparse(node)
    try:
        number = eval(source, {"__builtins__": {}, "KIB": quotas.KIB, "MIB": quotas.MIB})
    except (TypeError, NameError):
        return None
    return number if type(number) in (int, float) else None


def stated() -> set[tuple[str, str]]:
    """The constants and bounds, by file, that have the number of a limit of AWS."""
    found = set()
    for source in files_of_the_package():
        name = source.name.removeprefix("kclrun/")
        if name.startswith(FACING_AWS) and name != "model/quotas.py":
            body = source.tree.body
            inside = [it for it in body if isinstance(it, ast.ClassDef)]
            statements = (*body, *(it for of in inside for it in of.body))
            found |= {
                (name, constant)
                for statement in statements
                for constant, number in numbers_of(statement)
                if number in TELLING
            }
    return found


def test_a_limit_of_aws_is_a_constant_in_one_place():
    """A number of the table that stands elsewhere is either a second place for the limit, which has
    to import it, or a bound of our own, which has to be named here."""
    found = stated()

    assert found - OF_OUR_OWN.keys() == set()
    assert OF_OUR_OWN.keys() - found == set(), "named here, and not there any more"


def test_each_limit_is_used_and_has_its_source():
    text = (SOURCES / "model/quotas.py").read_text("utf-8")
    others = "\n".join(
        path.read_text("utf-8") for path in SOURCES.rglob("*.py") if path.name != "quotas.py"
    )
    unused = [name for name in LIMITS if name not in others]

    assert unused in ([], ["SHARD_READ_CALLS_MAX"])
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if ": Final = " in line and line.partition(":")[0] in LIMITS:
            above = lines[number - 1]
            assert above.startswith("#") or ": Final = " in above, f"{line} has no source"


# Limits that the service tells: its answer counts


class Answering:
    """A client of ours that gives one answer."""

    def __init__(self, answer: object) -> None:
        self._reply = SimpleNamespace(body=msgspec.json.encode(answer), date_at=None)

    def call(self, *_: object, **__: object) -> object:
        return self._reply


class Boto:
    """A client of botocore that answers each operation with one mapping."""

    def __init__(self, **answers: object) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> object:
        return lambda **_: self._answers[name]


def summary(status: str = "ACTIVE", **more: object) -> dict[str, object]:
    told = {
        "StreamName": "orders",
        "StreamARN": ARN,
        "StreamStatus": status,
        "RetentionPeriodHours": 24,
        "OpenShardCount": 1,
        "StreamCreationTimestamp": 1.0,
    }
    return {"StreamDescriptionSummary": told | more}


def admin(**more: object) -> WireStreamAdmin:
    return WireStreamAdmin(Answering(summary(**more)), "orders")


def queue(size: int) -> QueueSender:
    answer = {"Attributes": {"MaximumMessageSize": str(size), "QueueArn": "arn"}}
    client = Boto(get_queue_url={"QueueUrl": "http://q"}, get_queue_attributes=answer)
    return QueueSender(lambda: client, "letters")


def topic(size: int) -> TopicSender:
    answer = {"Attributes": {"MaximumMessageSize": str(size)}}
    return TopicSender(lambda: Boto(get_topic_attributes=answer), "arn:aws:sns:eu-west-1:1:rows")


def looked(sender: QueueSender | TopicSender) -> int:
    sender.look()
    return sender.limits.message_bytes_max


TOLD = {
    "the record of a stream": (
        lambda: record_limit(admin(MaxRecordSizeInKiB=3_000)).covering(2**21),
        3_000 * 1024,
    ),
    "the record of a stream that does not say it": (
        lambda: record_limit(admin()).covering(2**21),
        quotas.RECORD_BYTES_DEFAULT,
    ),
    "the retention of a stream": (
        lambda: admin(RetentionPeriodHours=8_760).summary().retention_hours,
        8_760,
    ),
    "the message of a queue": (lambda: looked(queue(4_096)), 4_096),
    "the message of a topic": (lambda: looked(topic(700_000)), 700_000),
}


@pytest.mark.parametrize("limit", TOLD)
def test_a_limit_that_the_service_tells_is_taken_from_its_answer(limit):
    read, expected = TOLD[limit]

    assert read() == expected


class Registry:
    """The consumers of a stream, which can have no more: `made` of them are being made."""

    def __init__(self, count: int, made: int = 0) -> None:
        states = ["CREATING"] * made + ["ACTIVE"] * (count - made)
        self._found = [Consumer(f"c{number}", "arn", it) for number, it in enumerate(states)]

    def find(self, name: str) -> None:
        return None

    def register(self, name: str) -> Consumer:
        raise Throttled("too many", code="LimitExceededException")

    def listed(self) -> list[Consumer]:
        return self._found


@pytest.mark.parametrize(
    ("count", "made", "failure"),
    [
        (CONSUMERS_DEFAULT - 1, 0, Throttled),
        (CONSUMERS_DEFAULT, 0, SettingsError),
        (CONSUMERS_ADVANTAGE, 1, SettingsError),
        (CONSUMERS_DEFAULT, CONSUMERS_CREATING_MAX, Throttled),
    ],
)
def test_a_stream_is_full_when_the_service_says_so_and_not_while_five_are_being_made(
    count, made, failure
):
    with pytest.raises(failure):
        registered(Registry(count, made), admin().summary(), "shop", to_poll="polling")


@pytest.mark.parametrize(
    ("mode", "count", "expected"),
    [
        ("PROVISIONED", CONSUMERS_DEFAULT - 1, ""),
        ("PROVISIONED", CONSUMERS_DEFAULT, None),
        ("ON_DEMAND", CONSUMERS_DEFAULT - 1, ""),
        ("ON_DEMAND", CONSUMERS_DEFAULT, "if the stream takes more than its 20"),
        ("ON_DEMAND", CONSUMERS_ADVANTAGE, None),
    ],
)
def test_a_check_refuses_no_consumer_that_the_service_may_take(mode, count, expected):
    of_stream = admin(StreamModeDetails={"StreamMode": mode}).summary()

    def look() -> str:
        return require_room(Registry(count), of_stream, to_poll="polling")

    if expected is None:
        with pytest.raises(SettingsError, match=f"has {count} registered consumers"):
            look()
    else:
        assert (expected in look()) if expected else not look()


# Statuses: each that the service can answer


KINDS = {
    "stream": (statuses.STREAM, "kinesis", "StreamStatus"),
    "stream of a table": (statuses.CHANGE_STREAM, "dynamodbstreams", "StreamStatus"),
    "consumer": (statuses.CONSUMER, "kinesis", "ConsumerStatus"),
    "table": (statuses.TABLE, "dynamodb", "TableStatus"),
    "index": (statuses.INDEX, "dynamodb", "IndexStatus"),
    "delivery stream": (statuses.DELIVERY_STREAM, "firehose", "DeliveryStreamStatus"),
    "encryption": (statuses.DELIVERY_ENCRYPTION, "firehose", "DeliveryStreamEncryptionStatus"),
    "schema version": (statuses.SCHEMA_VERSION, "glue", "SchemaVersionStatus"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_statuses_are_those_of_the_api_reference(kind):
    known, service, shape = KINDS[kind]
    listed = SESSION.get_service_model(service).shape_for(shape).enum

    of_kinesis = {"ACTIVE"} if kind == "stream of a table" else set()
    assert {*listed, *of_kinesis} == known.usable.keys() | known.troubles.keys()


def test_no_other_module_decides_by_the_name_of_a_status():
    rooms = ("aws", "cli", "spark", "reading", "outputs", "producing", "worker", "manager")
    facing = tuple(f"kclrun/{room}/" for room in rooms)
    named = {it for known, _, _ in KINDS.values() for it in (*known.usable, *known.troubles)}
    taken_for = {
        (f"aws/{it}.py", "ACTIVE")
        for it in ("outputs/item_tables", "outputs/messages", "table_setup", "changes/stream")
    } | {("aws/changes/stream.py", "ENABLED")}
    found = {
        (source.name.removeprefix("kclrun/"), node.value)
        for source in files_of_the_package()
        if source.name.startswith(facing)
        for node in source.nodes
        if isinstance(node, ast.Constant) and node.value in named
    }

    assert found <= taken_for, "but for an answer without a status"


def of_stream(status: str) -> StreamSummary:
    return readable(admin(status=status).summary())


def of_spark(status: str) -> StreamSummary:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    reached = StreamAddress(stream="orders", region="eu-west-1")
    return require_stream(admin(status=status), reached, clock=lambda: now[0], wait=wait)


def of_changes(status: str) -> StreamSummary:
    described = {"StreamArn": CHANGES_ARN, "StreamStatus": status, "Shards": []}
    client = Answering({"StreamDescription": described})
    return readable(ChangeStreamAdmin(client, CHANGES_ARN).summary())


def of_consumer(status: str) -> None:
    require_active(Consumer("shop", "arn", status), admin().summary())


def of_lease_table(status: str) -> None:
    require_usable(TableReport("leases", status, created=False, has_owner_index=True))


def of_item_table(status: str) -> object:
    key = {"AttributeName": "id"}
    table = {
        "TableStatus": status,
        "KeySchema": [key | {"KeyType": "HASH"}],
        "AttributeDefinitions": [key | {"AttributeType": "S"}],
    }
    return item_tables.describe(Answering({"Table": table}), "items")


def of_delivery_stream(status: str, encryption: str = "DISABLED") -> DeliveryStreamSender:
    failure = {"Type": "KMS_KEY_NOT_FOUND", "Details": "the key is gone"}
    has_failed = status.endswith("FAILED")
    described = {
        "DeliveryStreamType": "DirectPut",
        "DeliveryStreamStatus": status,
        "DeliveryStreamEncryptionConfiguration": {"Status": encryption},
    }
    if has_failed:
        described["FailureDescription"] = failure
    answer = {"DeliveryStreamDescription": described}
    sender = DeliveryStreamSender(lambda: Boto(describe_delivery_stream=answer), "rows")
    sender.look()
    return sender


PLACES = {
    "the start of a fleet and its check": ("stream", of_stream),
    "a query of Spark": ("stream", of_spark),
    "the start with the stream of a table": ("stream of a table", of_changes),
    "the consumer of fan-out": ("consumer", of_consumer),
    "the lease table": ("table", of_lease_table),
    "a table of items or of the state": ("table", of_item_table),
    "a delivery stream": ("delivery stream", of_delivery_stream),
}
ANSWERS = [
    (place, status)
    for place, (kind, _) in PLACES.items()
    for status in (*KINDS[kind][0].usable, *KINDS[kind][0].troubles, "OF_THE_FUTURE")
]


@pytest.mark.parametrize(("place", "status"), ANSWERS)
def test_a_status_with_which_a_resource_cannot_be_used_is_named(place, status):
    kind, look = PLACES[place]
    trouble = KINDS[kind][0].trouble(status)

    if trouble is None:
        look(status)
        return
    with pytest.raises((ServiceError, ConfigError)) as raised:
        look(status)
    words = str(raised.value)
    assert status in words
    assert trouble.meaning.removeprefix("it ") in words
    assert "network" not in words


@pytest.mark.parametrize(
    ("status", "failure"),
    [("DELETING", NotFound), ("CREATING", Unavailable), ("ARCHIVED", InvalidRequest)],
)
def test_what_ends_by_itself_is_waited_for_and_nothing_else(status, failure):
    with pytest.raises(failure):
        of_item_table(status)


def test_firehose_says_why_it_failed():
    with pytest.raises(InvalidRequest, match=r"CREATING_FAILED(?s:.)*the key is gone"):
        of_delivery_stream("CREATING_FAILED")


@pytest.mark.parametrize("status", statuses.DELIVERY_ENCRYPTION.usable)
def test_the_encryption_of_a_delivery_stream_is_named_where_it_failed(status, monkeypatch):
    monkeypatch.setattr("kclrun.aws.outputs.write_probes.may_write", lambda *_: "may write")
    proof = of_delivery_stream("ACTIVE", status).prove()

    assert (status in proof) == status.endswith("FAILED")


@pytest.mark.parametrize("status", [*statuses.INDEX.usable, *statuses.INDEX.troubles])
def test_only_an_index_that_can_be_queried_counts(status):
    key = {"AttributeName": "leaseKey"}
    table = {
        "TableStatus": "ACTIVE",
        "KeySchema": [key | {"KeyType": "HASH"}],
        "AttributeDefinitions": [key | {"AttributeType": "S"}],
        "GlobalSecondaryIndexes": [
            {"IndexName": "LeaseOwnerToLeaseKeyIndex", "IndexStatus": status}
        ],
    }
    report = inspect_table(Boto(describe_table={"Table": table}), "leases")

    assert report is not None
    assert report.has_owner_index == (status in statuses.INDEX.usable)


@pytest.mark.parametrize("status", statuses.SCHEMA_VERSION.usable)
def test_the_status_of_a_schema_version_that_is_not_usable_is_named(status):
    answer = {"DataFormat": "AVRO", "SchemaDefinition": "not a schema", "Status": status}
    decode = GlueDecoder(lambda: Boto(get_schema_version=answer))
    framed = bytes([3, 0]) + bytes(16) + b"data"

    with pytest.raises(RecordError) as raised:
        decode(framed)
    assert (status in str(raised.value)) == (status != "AVAILABLE")


def test_a_check_names_the_stream_of_a_table_that_was_switched_off():
    for status in ("DISABLING", "DISABLED"):
        found = of_changes(status)
        assert found.status == status
        assert "switched off" in statuses.of_stream(found.arn).remark(found.status)
