"""Rolls of rows as objects in S3: created with `If-None-Match: *`, never replaced, never deleted.

It implements `outputs.rolls.Rolls` and knows neither rows nor their formats. A process that writes
no object does not import this module, because it loads botocore.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kclrun import __version__
from kclrun.aws import operations
from kclrun.aws.control import Client, ControlPlane, RenewedClient, doing
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.errors import PROBE_OBJECT, ErrorReply, advising, code_in, service_error
from kclrun.aws.wire import MALFORMED
from kclrun.errors import AccessDenied, ServiceError, SettingsError, SinkError, Superseded
from kclrun.model.output import (
    Cursor,
    OutputDestination,
    RollRecord,
    RowsOf,
    roll_folder,
    roll_name,
)
from kclrun.model.quotas import DELETED_OBJECTS_MAX, PART_BYTES_MIN
from kclrun.model.wire import WireCredentials

# The smallest part that S3 takes. An upload has at most 10,000: 48 GiB.
PART_BYTES: Final = PART_BYTES_MIN
_REMOVED_MAX: Final = DELETED_OBJECTS_MAX
# Readers of folders of objects (Athena, Spark, Hive) skip names that begin with an underscore.
_OURS: Final = "_kclrun"
ABSENT: Final = frozenset({"404", "NoSuchKey", "NotFound"})
_REFUSED: Final = "PreconditionFailed"
_NO_UPLOAD: Final = "NoSuchUpload"

# Clients that outlive an output, by their URLs: each takes 100 ms of CPU to make. For one thread.
KeptClients = dict[str | None, Callable[[], Client]]


def open_object_rolls(
    place: OutputDestination,
    of: RowsOf,
    region: str | None,
    credentials: Callable[[], WireCredentials],
    form: tuple[str, str],
    *,
    kept: KeptClients | None = None,
) -> ObjectRolls:
    """The rolls of this shard in the bucket that `place.s3` names; sends nothing. `form` is the
    suffix of their names and their content type. A client in `kept` is used, and left there."""
    assert place.s3 is not None, "the settings name a bucket"
    endpoint = EndpointSettings(region=region, endpoint_url=place.endpoint_url)
    client: Callable[[], Client] = RenewedClient(endpoint, credentials, ControlPlane.s3)
    if kept is not None:
        client = functools.partial(kept.setdefault(place.endpoint_url, client))
    return ObjectRolls(client, place.s3, of, form)


class Bucket:
    """`s3://bucket/prefix`: objects are created, never replaced. `prefix` ends with a slash, or is
    empty."""

    def __init__(self, client: Callable[[], Client], url: str) -> None:
        parts = urlsplit(url)
        self.client = client
        self.bucket, prefix = parts.netloc, parts.path.strip("/")
        self.prefix = f"{prefix}/" if prefix else ""

    def url(self, key: str) -> str:
        """The URL of an object of this bucket."""
        return f"s3://{self.bucket}/{key}"

    def check(self) -> str:
        """The place in words. An object of our own is created twice, and S3 must refuse the second
        time. The empty object stays, so that no permission to delete is needed. Raises:
        SettingsError, a ServiceError leaf."""
        self.probe()
        url, key = self.url(self.prefix + PROBE_OBJECT), self.prefix + PROBE_OBJECT
        if self.probe():
            raise SettingsError(
                f"the service of {url} does not honour If-None-Match: two owners of a lease could"
                " replace each other's objects. S3 itself honours it"
            )
        try:
            with doing(operations.HEAD_OBJECT, f"look for {url}"):
                self.request("head_object", Key=f"{key}-absent")
        except AccessDenied as error:
            raise error.reworded(
                f"{error}; S3 refuses this for an object that does not exist, too, unless"
                " s3:ListBucket is allowed on the bucket"
            ) from None
        except ServiceError as error:
            if error.code not in ABSENT:
                raise
        return self.url(self.prefix)

    def probe(self) -> bool:
        """Create an object of our own; False if it is there. Raises: a ServiceError leaf."""
        with advising(operations.PUT_OBJECT, f"the objects of {self.url(self.prefix)}"):
            return self.create(self.prefix + PROBE_OBJECT, b"")

    def create(self, key: str, content: bytes) -> bool:
        """PutObject that creates; False if the name is taken. Raises: a ServiceError leaf."""
        try:
            with doing(operations.PUT_OBJECT, f"create {self.url(key)}"):
                self.request("put_object", Key=key, IfNoneMatch="*", Body=content)
        except ServiceError as error:
            if error.code == _REFUSED:
                return False
            raise
        return True

    def read(self, key: str) -> bytes:
        """The content of an object. Raises: a ServiceError leaf."""
        with doing(operations.GET_OBJECT, f"read {self.url(key)}"):
            content: bytes = self.request("get_object", Key=key)["Body"].read()
            return content

    def request(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the client that is about one object, within `doing`.

        Each answer of S3 to it has an ETag; a page of a proxy has none. Raises: KeyError for that,
        which `doing` makes a failure of the service."""
        answer: dict[str, Any] = getattr(self.client(), method)(Bucket=self.bucket, **arguments)
        if "ETag" not in answer:
            raise KeyError("ETag")
        return answer

    def delete(self, keys: Sequence[str], what: str) -> None:
        """Delete objects; one that is gone already is not an error. Raises: a ServiceError leaf,
        also if S3 refuses some of them: it answers 200 then."""
        operation = operations.DELETE_OBJECTS
        for at in range(0, len(keys), _REMOVED_MAX):
            named = [{"Key": key} for key in keys[at : at + _REMOVED_MAX]]
            with doing(operation, f"remove {what}"):
                answer = self.client().delete_objects(
                    Bucket=self.bucket, Delete={"Objects": named, "Quiet": True}
                )
                if refused := answer.get("Errors"):
                    code = code_in(str(refused[0].get("Code", "")))
                    text = f"{len(refused)} objects, the first: {refused[0].get('Key')}"
                    # The error of an object has no status: its code decides.
                    raise service_error(operation, ErrorReply(code, text), 400)

    def pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        """A listing of the objects whose keys begin with `prefix`, a thousand a page. Raises: a
        ServiceError leaf."""
        arguments: dict[str, Any] = {"Bucket": self.bucket, "Prefix": prefix, **more}
        is_more = True
        while is_more:
            with doing(operations.LIST_OBJECTS_V2, f"list {self.url(prefix)}"):
                page = self.client().list_objects_v2(**arguments)
                is_more = page["IsTruncated"]
            yield page
            arguments["ContinuationToken"] = page.get("NextContinuationToken")

    def close(self) -> None:
        """Release the connections."""
        close = getattr(self.client, "close", None)
        if close is not None:
            close()


class ObjectRolls(Bucket):
    """`s3://bucket/prefix/<application>/<stream>/<created>/<shard>/<generation>/<begin>.<suffix>`.

    An object of one PUT has its record in its metadata. The metadata of a larger one are fixed with
    its first part, when its end is not known: its record is an object of its own, whose name
    contains the random `commit`, below `_kclrun/`; it is there before the rows appear.
    """

    def __init__(
        self, client: Callable[[], Client], url: str, of: RowsOf, form: tuple[str, str]
    ) -> None:
        super().__init__(client, url)
        self._folder = roll_folder(of)
        self._suffix, self.content_type = form

    def key(self, begin: Cursor) -> str:
        """The key of the roll that begins there [K8]."""
        return f"{self.prefix}{self._folder}/{roll_name(begin)}.{self._suffix}"

    def record_key(self, begin: Cursor, commit: str) -> str:
        """The key of the record of a roll of several parts."""
        return f"{self.prefix}{_OURS}/{self._folder}/{roll_name(begin)}.{commit}.json"

    def where(self, begin: Cursor) -> str:
        """The URL of the roll."""
        return self.url(self.key(begin))

    def find(self, begin: Cursor) -> RollRecord | None:
        key = self.key(begin)
        try:
            with doing(operations.HEAD_OBJECT, f"look for {self.url(key)}"):
                found = self.request("head_object", Key=key)
        except ServiceError as error:
            if error.code in ABSENT:
                return None
            raise _sink_error(error) from None
        known = found.get("Metadata", {})
        if "kclrun-commit" in known and "kclrun-end" not in known:
            return self._record(self.record_key(begin, known["kclrun-commit"]))
        try:
            return _record_of(known)
        except (KeyError, ValueError):
            raise SettingsError(
                f"{self.url(key)} is not an object of kclrun, and has its name"
            ) from None

    def _record(self, key: str) -> RollRecord:
        try:
            return msgspec.json.decode(self.read(key), type=RollRecord)
        except MALFORMED:
            raise SettingsError(f"{self.url(key)} is not the record of an object of rows") from None
        except ServiceError as error:
            if error.code in ABSENT:
                raise SettingsError(
                    f"{self.url(key)} is gone: it says where the rows end of the object that it"
                    " names, and a lease begins there. Restore it"
                ) from None
            raise _sink_error(error) from None

    def new(self, begin: Cursor, commit: str) -> ObjectUpload:
        return ObjectUpload(self, begin, commit)


class ObjectUpload:
    """Implements `RollUpload`: one PUT, or an upload in parts once there are bytes for two.

    Parts are sent as they fill. Only the last request creates the object, under the condition that
    the name is free. An upload that is not completed leaves parts. A lifecycle rule of the bucket
    removes them; kclrun does not, because a request of their owner may be under way.
    """

    def __init__(self, rolls: ObjectRolls, begin: Cursor, commit: str) -> None:
        self._rolls = rolls
        self._begin = begin
        self._key = rolls.key(begin)
        self._commit = commit
        self._bytes = bytearray()
        self._upload: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._has_record = False

    @property
    def unsent_bytes(self) -> int:
        return len(self._bytes)

    def send(self) -> None:
        """As `RollUpload`: the parts that are full."""
        try:
            while len(self._bytes) > PART_BYTES:
                self._send_part(PART_BYTES)
        except ServiceError as error:
            raise _sink_error(error) from None

    def write(self, data: bytes) -> None:
        self._bytes += data

    def finish(self, record: RollRecord) -> bool:
        """As `RollUpload`. After a failure the object itself shows whose it is: an earlier attempt
        may have been applied [K6]."""
        try:
            if self._upload is None and len(self._bytes) <= PART_BYTES:
                failure = self._put(record)
            else:
                failure = self._complete(record)
        except ServiceError as error:
            raise _sink_error(error) from None
        if failure is None:
            return True
        found = self._rolls.find(self._begin)
        if found is not None:
            return found.commit == self._commit
        if failure.code == _NO_UPLOAD:
            raise Superseded(f"{failure}. The parts are gone: the rows are emitted again")
        raise _sink_error(failure) from None

    def drop(self) -> None:
        self._bytes.clear()

    def _put(self, record: RollRecord) -> ServiceError | None:
        """The failure of an attempt, which may have been applied nevertheless."""
        with self._attempt(operations.PUT_OBJECT) as failures:
            self._rolls.request(
                "put_object",
                Key=self._key,
                Body=bytes(self._bytes),
                IfNoneMatch="*",
                ContentType=self._rolls.content_type,
                Metadata=_metadata(record),
            )
        return failures[0] if failures else None

    def _complete(self, record: RollRecord) -> ServiceError | None:
        """Send the other parts, then the record, then the request that creates the object; the
        failure of the last one. Raises: a ServiceError leaf of the others, which create nothing."""
        while self._bytes:
            self._send_part(min(len(self._bytes), PART_BYTES))
        if not self._has_record:
            key = self._rolls.record_key(self._begin, self._commit)
            with doing(operations.PUT_OBJECT, f"write {self._rolls.url(key)}"):
                self._rolls.request("put_object", Key=key, Body=msgspec.json.encode(record))
            self._has_record = True
        with self._attempt(operations.COMPLETE_MULTIPART_UPLOAD) as failures:
            self._rolls.request(
                "complete_multipart_upload",
                Key=self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": self._parts},
                IfNoneMatch="*",
            )
        return failures[0] if failures else None

    def _send_part(self, size: int) -> None:
        rolls, url = self._rolls, self._rolls.url(self._key)
        if self._upload is None:
            with doing(operations.CREATE_MULTIPART_UPLOAD, f"begin the upload of {url}"):
                self._upload = rolls.client().create_multipart_upload(
                    Bucket=rolls.bucket,
                    Key=self._key,
                    ContentType=rolls.content_type,
                    Metadata={"kclrun-commit": self._commit, "kclrun-version": __version__},
                )["UploadId"]
        number = len(self._parts) + 1
        with doing(operations.UPLOAD_PART, f"upload part {number} of {url}"):
            answer = rolls.request(
                "upload_part",
                Key=self._key,
                UploadId=self._upload,
                PartNumber=number,
                Body=bytes(memoryview(self._bytes)[:size]),
            )
            self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        del self._bytes[:size]

    @contextlib.contextmanager
    def _attempt(self, operation: operations.Operation) -> Iterator[list[ServiceError]]:
        """Collects the failure of the request that creates the object."""
        failures: list[ServiceError] = []
        try:
            with doing(operation, f"create {self._rolls.url(self._key)}"):
                yield failures
        except ServiceError as error:
            failures.append(error)


def _sink_error(error: ServiceError) -> SinkError:
    return SinkError(str(error))


def _metadata(record: RollRecord) -> dict[str, str]:
    return {
        "kclrun-end": record.end,
        "kclrun-commit": record.commit,
        "kclrun-token": str(record.token),
        "kclrun-format": str(record.version),
        "kclrun-version": __version__,
        **({"kclrun-state": record.state} if record.state else {}),
    }


def _record_of(known: Mapping[str, str]) -> RollRecord:
    return RollRecord(
        end=known["kclrun-end"],
        commit=known["kclrun-commit"],
        token=int(known["kclrun-token"]),
        version=int(known["kclrun-format"]),
        state=known.get("kclrun-state", ""),
    )
