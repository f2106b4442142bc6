"""Payloads with the header of the AWS Glue Schema Registry into values: `decode: glue`.

    byte 0      3, the header's version
    byte 1      0, or 5: what follows the header is compressed by zlib
    byte 2-17   the id of the schema version, a UUID
    byte 18 …   the data: Avro, JSON, or for Protobuf the index of a message type and the message

It knows neither records nor settings. The extra `glue` has the libraries; they are imported at the
first schema that needs them.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import threading
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from kclrun.aws.control import BOTO_FAILURES, Client, ControlPlane, RenewedClient, from_botocore
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.operations import GET_SCHEMA_VERSION
from kclrun.codec.values import Decode
from kclrun.errors import LimitExceeded, RecordError, RetryLater, ServiceError
from kclrun.model import statuses
from kclrun.model.wire import WireCredentials

_HEADER_BYTES: Final = 18
_HEADER_VERSION: Final = 3
_PLAIN, _ZLIB = 0, 5
# A record has at most 10 MiB; one of zeros would grow to 10 GiB.
DATA_BYTES_MAX: Final = 64 * 2**20
# Producers rarely write with more versions at a time. A schema takes about 100 KB.
VERSIONS_MAX: Final = 256
# The pause before the batch is given again, while the registry is away. Each look lasts at most
# some 30 s: four attempts of 7 s, and their pauses.
PAUSE_S: Final = 5.0
# protoc takes a tenth of a second.
_PROTOC_MAX_S: Final = 30.0
# The registry's code for a schema version that it does not have.
_UNKNOWN: Final = "EntityNotFoundException"


def open_registry(
    region: str, url: str | None, credentials: Callable[[], WireCredentials]
) -> GlueDecoder:
    """Sends nothing. `url` is that of the service, if it is not AWS's own."""
    settings = EndpointSettings(region=region, endpoint_url=url)
    return GlueDecoder(RenewedClient(settings, credentials, ControlPlane.glue))


class GlueDecoder:
    """A `codec.values.Decode`. Each schema version is requested once; at most 256 are kept.

    Raises: RecordError for data that is at fault itself, or whose schema version the registry does
    not have; RetryLater while the registry does not answer, which is not a fault of the record.
    Any thread.
    """

    def __init__(self, client: Callable[[], Client]) -> None:
        self._client = client
        self._readers: dict[bytes, Decode] = {}
        self._lock = threading.Lock()  # one look at a time: the client is for one thread

    def __call__(self, data: bytes) -> Any:
        """The value. See the class."""
        if len(data) < _HEADER_BYTES or data[0] != _HEADER_VERSION:
            raise RecordError("no header of the Glue Schema Registry")
        reader = self._readers.get(data[2:_HEADER_BYTES])
        if reader is None:
            with self._lock:
                reader = self._look_up(data[2:_HEADER_BYTES])
        return reader(_content(data))

    def _look_up(self, version: bytes) -> Decode:
        if version not in self._readers:
            reader = self._reader(str(uuid.UUID(bytes=version)))
            if len(self._readers) >= VERSIONS_MAX:
                del self._readers[next(iter(self._readers))]
            self._readers[version] = reader
        return self._readers[version]

    def _reader(self, version: str) -> Decode:
        try:
            answer = self._client().get_schema_version(SchemaVersionId=version)
            kind, definition = answer["DataFormat"], answer["SchemaDefinition"]
            status = str(answer.get("Status", ""))
        except BOTO_FAILURES as error:
            failure = from_botocore(GET_SCHEMA_VERSION, error)
            if failure.code == _UNKNOWN:
                raise RecordError(f"the registry has no schema version {version}") from None
            raise _away(failure) from None
        except ServiceError as failure:  # of the credentials
            raise _away(failure) from None
        make = _READERS.get(kind)
        if make is None:
            raise RecordError(f"the schema version {version} is of the unknown format {kind[:20]}")
        try:
            return make(definition)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RetryLater(PAUSE_S, f"protoc did not run: {type(error).__name__}") from None
        except RecordError as error:
            remark = statuses.SCHEMA_VERSION.remark(status)
            why = f" ({status}: {remark})" if remark else ""
            raise RecordError(f"the schema version {version}{why} is not usable: {error}") from None


def _away(failure: ServiceError) -> RetryLater:
    return RetryLater(PAUSE_S, f"the Glue Schema Registry cannot be asked: {failure}")


def _content(data: bytes) -> bytes:
    if data[1] == _PLAIN:
        return data[_HEADER_BYTES:]
    if data[1] != _ZLIB:
        raise RecordError(f"compression {data[1]} of the Glue header is not known")
    inflating = zlib.decompressobj()
    try:
        content = inflating.decompress(data[_HEADER_BYTES:], DATA_BYTES_MAX)
    except zlib.error:
        raise RecordError("the data behind the Glue header is not zlib's") from None
    if inflating.unconsumed_tail:
        raise LimitExceeded(f"more than {DATA_BYTES_MAX} bytes of data behind the Glue header")
    if not inflating.eof:
        raise RecordError("the data behind the Glue header was cut short")
    return content


def _avro(definition: str) -> Decode:
    """Read with the schema that the data was written with."""
    import fastavro

    try:
        schema = fastavro.parse_schema(json.loads(definition))
    except Exception as error:  # noqa: BLE001 - whatever a library says about a text
        raise RecordError(f"fastavro refuses it ({type(error).__name__})") from None

    def read(content: bytes) -> Any:
        stream = io.BytesIO(content)
        try:
            value = fastavro.schemaless_reader(stream, schema, None)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - anything, and its text may quote the data
            raise RecordError(
                f"the data does not fit its Avro schema ({type(error).__name__})"
            ) from None
        if stream.read(1):
            raise RecordError("the data does not fit its Avro schema: it is longer")
        return value

    return read


def _json(_: str) -> Decode:
    """The producer has validated it."""
    return msgspec.json.Decoder().decode


def _protobuf(definition: str) -> Decode:
    """A message of the type whose index comes before it. All types of the file, nested ones too,
    are counted from 0 in the order of their full names, as in AWS's own serializers."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError

    compiled = descriptor_pb2.FileDescriptorSet.FromString(_compiled(definition))
    pool = descriptor_pool.DescriptorPool()
    for file in compiled.file:  # imported ones come first
        pool.Add(file)
    waiting = [*pool.FindFileByName(compiled.file[-1].name).message_types_by_name.values()]
    types = []
    while waiting:
        found = waiting.pop()
        types.append(found)
        waiting += found.nested_types
    types.sort(key=lambda message_type: message_type.full_name)
    classes = [message_factory.GetMessageClass(message_type) for message_type in types]

    def read(content: bytes) -> Any:
        index, start = _varint(content)
        if index >= len(classes):
            raise RecordError(f"its Protobuf schema has no message type number {index}")
        try:
            return classes[index].FromString(content[start:])
        except DecodeError:
            raise RecordError("the data does not fit its Protobuf schema") from None

    return read


def _compiled(definition: str) -> bytes:
    """The file's descriptors. protoc runs in a process of its own, because it writes to standard
    error, and because it is C++ that reads a text of another program."""
    with tempfile.TemporaryDirectory(prefix="kclrun-") as folder:
        (Path(folder) / "schema.proto").write_text(definition, encoding="utf-8")
        out = Path(folder) / "compiled"
        options = [f"-I{folder}", "--include_imports", f"--descriptor_set_out={out}"]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "grpc_tools.protoc", *options, "schema.proto"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROTOC_MAX_S,
            check=False,
        )
        if done.returncode < 0:  # a signal ended it, such as that of a host without memory
            raise RetryLater(PAUSE_S, f"protoc did not run: signal {-done.returncode}")
        if done.returncode:
            raise RecordError("protoc refuses it; a schema that imports others is not supported")
        return out.read_bytes()


def _varint(content: bytes) -> tuple[int, int]:
    """The number at the beginning, and where it ends."""
    value = 0
    for at, byte in enumerate(content[:5]):
        value |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            return value, at + 1
    raise RecordError("no index of a message type before the Protobuf data")


_READERS: Final[dict[str, Callable[[str], Decode]]] = {
    "AVRO": _avro,
    "JSON": _json,
    "PROTOBUF": _protobuf,
}
