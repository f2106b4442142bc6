"""Versions of the keyed state as objects in S3: created, never replaced [K14].

A process without state in S3 does not import this module, because it loads botocore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kclrun.aws.control import ControlPlane, RenewedClient, keeping
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.errors import advising
from kclrun.aws.operations import DELETE_OBJECTS, GET_OBJECT, LIST_OBJECTS_V2, PUT_OBJECT, Operation
from kclrun.aws.outputs.s3 import ABSENT, Bucket
from kclrun.errors import ServiceError, SinkError
from kclrun.model.state import StateDestination
from kclrun.model.wire import WireCredentials

_SUFFIX: Final = ".state"


def open_state_objects(
    place: StateDestination,
    region: str | None,
    credentials: Callable[[], WireCredentials],
    folder: str,
) -> StateObjects:
    """The versions below `folder` in the bucket of `place`; sends nothing."""
    assert place.s3 is not None, "the settings name a bucket"
    endpoint = EndpointSettings(region=region, endpoint_url=place.endpoint_url)
    return StateObjects(
        Bucket(RenewedClient(endpoint, credentials, ControlPlane.s3), place.s3), folder
    )


class StateObjects:
    """Implements `ClaimStore`: `s3://bucket/prefix/<folder>/<shard>/<name>.state`."""

    def __init__(self, bucket: Bucket, folder: str) -> None:
        self._bucket = bucket
        self._folder = f"{bucket.prefix}{folder}"

    def create(self, shard: str, name: str, content: bytes) -> None:
        """As `VersionStore`. If the name is taken, an earlier attempt of ours was applied."""
        with self._keeping(PUT_OBJECT):
            self._bucket.create(self._key(shard, name), content)

    def claim(self, shard: str, name: str, content: bytes) -> bytes:
        key = self._key(shard, name)
        with self._keeping(PUT_OBJECT):
            if self._bucket.create(key, content):
                return content
        there = self.read(shard, name)
        if there is None:
            raise SinkError(
                f"cannot create {self._bucket.url(key)}: it existed, and was removed meanwhile"
            )
        return there

    def read(self, shard: str, name: str) -> bytes | None:
        with self._keeping(GET_OBJECT):
            try:
                return self._bucket.read(self._key(shard, name))
            except ServiceError as error:
                if error.code in ABSENT:
                    return None
                raise

    def list(self, shard: str) -> Iterator[tuple[str, float]]:
        prefix = self._key(shard, "").removesuffix(_SUFFIX)
        for page in self._pages(prefix):
            now = datetime.now(UTC)
            for found in page.get("Contents", ()):
                name = found["Key"].removeprefix(prefix)
                if name.endswith(_SUFFIX):
                    age_s = (now - found["LastModified"]).total_seconds()
                    yield name.removesuffix(_SUFFIX), age_s

    def shards(self) -> Iterator[str]:
        prefix = f"{self._folder}/"
        for page in self._pages(prefix, Delimiter="/"):
            for found in page.get("CommonPrefixes", ()):
                yield found["Prefix"].removeprefix(prefix).removesuffix("/")

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        with self._keeping(LIST_OBJECTS_V2):
            yield from self._bucket.pages(prefix, **more)

    def delete(self, shard: str, names: Sequence[str]) -> None:
        with self._keeping(DELETE_OBJECTS):
            keys = [self._key(shard, name) for name in names]
            self._bucket.delete(keys, f"versions of {shard}")

    def check(self) -> str:
        return self._bucket.check()

    def close(self) -> None:
        self._bucket.close()

    def _key(self, shard: str, name: str) -> str:
        return f"{self._folder}/{shard}/{name}{_SUFFIX}"

    @contextlib.contextmanager
    def _keeping(self, operation: Operation) -> Iterator[None]:
        """Raises: SinkError for any failure of the service, with the permission that is missing."""
        objects = f"the objects of {self._bucket.url(self._bucket.prefix)}"
        with keeping(), advising(operation, objects):
            yield
