"""The header of the Glue Schema Registry, its formats, the cache, and a registry that is away."""

import io
import json
import signal
import subprocess
import uuid
import zlib
from types import SimpleNamespace
from typing import Any

import fastavro
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.glue import decoder as glue
from kclrun.aws.glue.decoder import GlueDecoder
from kclrun.codec.values import decoding
from kclrun.errors import LimitExceeded, RecordError, RetryLater, Unavailable, UndecodableRecord
from kclrun.model.record import Record, RecordBatch
from kclrun.model.wire import WireCredentials
from tests.support.clients import ONCE, client_of
from tests.support.tables import over_rows

REGION = "eu-west-1"
FLIGHT = {
    "type": "record",
    "name": "Flight",
    "namespace": "air",
    "fields": [
        {"name": "carrier", "type": "string"},
        {"name": "miles", "type": ["null", "long"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    ],
}
# Counted by full name: air.Airport 0, air.Flight 1, air.Flight.Leg 2.
PROTO = """
syntax = "proto3";
package air;
import "google/protobuf/timestamp.proto";
message Flight { message Leg { string to = 1; } string carrier = 1; repeated Leg legs = 2; }
message Airport { string code = 1; google.protobuf.Timestamp opened = 2; }
"""
KEYS = WireCredentials("AKIAEXAMPLEEXAMPLE", "secret")


@pytest.fixture(scope="module")
def versions(moto_url):
    """The ids of schema versions in moto's registry."""
    # A creation is not to be repeated, and the first call of a service in moto imports it.
    client = client_of("glue", moto_url, REGION, config=ONCE)
    schemas = {
        "avro": ("AVRO", json.dumps(FLIGHT)),
        "json": ("JSON", '{"type": "object"}'),
        "proto": ("PROTOBUF", PROTO),
        "bad avro": ("AVRO", '{"type": "nothing"}'),
        "bad proto": ("PROTOBUF", 'syntax = "proto3"; import "other.proto";'),
    }
    made = {
        name: client.create_schema(
            SchemaName=name.replace(" ", "-"),
            DataFormat=kind,
            Compatibility="NONE",
            SchemaDefinition=text,
        )["SchemaVersionId"]
        for name, (kind, text) in schemas.items()
    }
    client.close()
    return made


def registry_client(url: str) -> RenewedClient:
    settings = EndpointSettings(region=REGION, endpoint_url=url)
    return RenewedClient(settings, lambda: KEYS, ControlPlane.glue)


@pytest.fixture
def decode(moto_url):
    client = registry_client(moto_url)
    yield GlueDecoder(client)
    client.close()


def framed(version: str, content: bytes, *, compressed: bool = False) -> bytes:
    body = zlib.compress(content) if compressed else content
    return bytes([3, 5 if compressed else 0]) + uuid.UUID(version).bytes + body


def avro(row: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(FLIGHT), row)
    return out.getvalue()


ROW = {"carrier": "AA", "miles": 1_400, "day": 15_706}


@pytest.mark.parametrize("compressed", [False, True])
def test_avro_is_read_with_the_schema_it_was_written_with(versions, decode, compressed):
    value = decode(framed(versions["avro"], avro(ROW), compressed=compressed))
    assert (value["carrier"], value["miles"], value["day"].isoformat()) == (
        *("AA", 1_400, "2013-01-01"),
    )


def test_json_is_taken_as_its_producer_validated_it(versions, decode):
    assert decode(framed(versions["json"], b'{"a": 1}')) == {"a": 1}


def test_protobuf_is_a_message_of_the_type_that_its_index_names(versions, decode):
    leg = decode(framed(versions["proto"], b"\x02\x0a\x03LGA"))
    flight = decode(framed(versions["proto"], b"\x01\x0a\x02AA\x12\x05\x0a\x03LGA"))
    airport = decode(framed(versions["proto"], b"\x00\x0a\x03JFK\x12\x02\x08\x07"))

    assert (leg.DESCRIPTOR.full_name, leg.to) == ("air.Flight.Leg", "LGA")
    assert (flight.carrier, [each.to for each in flight.legs]) == ("AA", ["LGA"])
    assert (airport.code, airport.opened.seconds) == ("JFK", 7)


NOTHING = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda _: b"", "no header of the Glue Schema Registry"),
        (lambda _: b"SECRET" * 9, "no header of the Glue Schema Registry"),
        (lambda v: framed(v["avro"], b"")[:17], "no header of the Glue Schema Registry"),
        (lambda v: b"\x03\x01" + framed(v["avro"], b"")[2:], "compression 1 of the Glue header"),
        (lambda v: b"\x03\x05" + framed(v["avro"], b"SECRET")[2:], "is not zlib's"),
        (lambda v: framed(v["json"], b"{}" * 99, compressed=True)[:-4], "was cut short"),
        (lambda _: framed(NOTHING, b"SECRET"), f"has no schema version {NOTHING}"),
        (lambda v: framed(v["avro"], b"\x0cSECRET"), "does not fit its Avro schema ("),
        (lambda v: framed(v["avro"], avro(ROW) + b"S"), "its Avro schema: it is longer"),
        (lambda v: framed(v["json"], b"SECRET"), "JSON is malformed: invalid character (byte 0)"),
        (lambda v: framed(v["proto"], b""), "no index of a message type"),
        (lambda v: framed(v["proto"], b"\xff\xff\xff\xff\xff\x01"), "no index of a message type"),
        (lambda v: framed(v["proto"], b"\x09SECRET"), "has no message type number 9"),
        (lambda v: framed(v["proto"], b"\x00\x0a\x09SECRET"), "does not fit its Protobuf schema"),
        (lambda v: framed(v["bad avro"], b"SECRET"), "is not usable: fastavro refuses it ("),
        (lambda v: framed(v["bad proto"], b"SECRET"), "is not usable: protoc refuses it; a schema"),
    ],
)
def test_data_at_fault_is_a_record_that_cannot_be_decoded(versions, decode, data, reason):
    found = Record(data(versions), "k", "1")
    batch = RecordBatch([found], _decoding=decoding(decode))
    with pytest.raises(UndecodableRecord) as caught:
        _ = batch[0].value
    assert reason in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_small_record_does_not_grow_without_bound(versions, decode, monkeypatch):
    monkeypatch.setattr(glue, "DATA_BYTES_MAX", 1_000)
    assert decode(framed(versions["json"], b" " * 999 + b"7", compressed=True)) == 7
    with pytest.raises(LimitExceeded, match="more than 1000 bytes"):
        decode(framed(versions["json"], b" " * 1_000 + b"7", compressed=True))


class Registry:
    """A client that answers with `answers`, then with JSON, and remembers what it is asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def get_schema_version(self, *, SchemaVersionId: str) -> dict[str, str]:  # noqa: N803
        self.asked.append(SchemaVersionId)
        answer = self.answers.pop(0) if self.answers else {"DataFormat": "JSON"}
        if isinstance(answer, Exception):
            raise answer
        return {"SchemaDefinition": "{}", **answer}


def refused(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, "GetSchemaVersion")


def of_number(number: int) -> bytes:
    return framed(str(uuid.UUID(int=number)), b"7")


@over_rows(
    "failure",
    [
        EndpointConnectionError(endpoint_url="http://x"),
        *map(refused, ["ThrottlingException", "AccessDeniedException", "InternalServiceException"]),
        refused("InvalidInputException"),
        Unavailable("credentials cannot be had"),
        KeyError("DataFormat"),
    ],
)
def test_a_registry_that_cannot_be_asked_is_an_outage_and_no_fault_of_the_record(failure):
    registry = Registry(failure)
    decode = GlueDecoder(lambda: registry)

    batch = RecordBatch([Record(of_number(1), "k", "1")], _decoding=decoding(decode))
    with pytest.raises(RetryLater, match="the Glue Schema Registry cannot be asked: ") as caught:
        _ = batch[0].value
    assert caught.value.after_s == glue.PAUSE_S

    assert batch[0].value == 7


def test_protoc_that_does_not_run_is_no_fault_of_the_record(monkeypatch):
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("protoc", 30)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RetryLater, match="protoc did not run: TimeoutExpired"):
        GlueDecoder(lambda: Registry({"DataFormat": "PROTOBUF"}))(of_number(1))


def test_protoc_that_a_signal_ends_is_no_fault_of_the_record(monkeypatch):
    killed = subprocess.CompletedProcess("protoc", -signal.SIGKILL)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(RetryLater, match="protoc did not run: signal 9"):
        GlueDecoder(lambda: Registry({"DataFormat": "PROTOBUF"}))(of_number(1))


def test_a_version_is_asked_for_once_and_a_bounded_number_is_kept(monkeypatch):
    monkeypatch.setattr(glue, "VERSIONS_MAX", 3)
    registry = Registry()
    decode = GlueDecoder(lambda: registry)

    for number in (1, 2, 3, 1, 2, 3, 4, 1, 3, 4):
        assert decode(of_number(number)) == 7

    assert [uuid.UUID(each).int for each in registry.asked] == [1, 2, 3, 4, 1]


def test_a_version_that_the_registry_lacks_is_asked_for_again():
    registry = Registry(refused("EntityNotFoundException"))
    decode = GlueDecoder(lambda: registry)
    with pytest.raises(RecordError, match="the registry has no schema version"):
        decode(of_number(1))
    assert decode(of_number(1)) == 7


def test_a_format_of_the_future_is_refused_in_words():
    decode = GlueDecoder(lambda: Registry({"DataFormat": "THRIFT"}))
    with pytest.raises(RecordError, match="is of the unknown format THRIFT"):
        decode(of_number(1))


@pytest.mark.seconds
def test_calls_have_bounded_attempts_and_times(moto_url):
    client = registry_client(moto_url)()
    config: SimpleNamespace = client.meta.config
    assert (config.connect_timeout, config.read_timeout) == (2.0, 5.0)
    assert config.retries["total_max_attempts"] == 4
    client.close()
