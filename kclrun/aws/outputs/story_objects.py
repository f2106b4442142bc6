"""Stories of shards as objects in S3: created, never replaced, never removed.

A manager without a story in S3 does not import this module, because it loads botocore.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.operations import GET_OBJECT, LIST_OBJECTS_V2, PUT_OBJECT
from kclrun.aws.outputs.s3 import Bucket
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials


class StoryObjects:
    """`s3://bucket/prefix/<application>/<name>`. `put` is a manager's, from one thread; `read` is
    for `kclrun why`, `names` and `get` for the page, which reads no object twice."""

    def __init__(
        self,
        url: str,
        application: str,
        endpoint: EndpointSettings,
        credentials: Callable[[], WireCredentials],
    ) -> None:
        self._bucket = Bucket(RenewedClient(endpoint, credentials, ControlPlane.s3), url)
        self._folder = f"{self._bucket.prefix}{application}/"

    def put(self, name: str, content: bytes) -> None:
        """Create the object; one of this name is there already if an answer was lost. Raises: a
        ServiceError leaf."""
        key = f"{self._folder}{name}"
        self._bucket.create(PUT_OBJECT, f"create {self._bucket.url(key)}", key, Body=content)

    def read(self) -> Iterator[bytes]:
        """The contents of all objects, in the order of their times. Raises: a ServiceError leaf."""
        return (self.get(name) for page in self._pages("") for name in page)

    def names(self, since: WallTime, pages_max: int) -> tuple[list[str], bool]:
        """The names of the objects since then, in the order of their times, by so many calls at
        most; and whether these are all of them. Raises: a ServiceError leaf."""
        found: list[str] = []
        pages = self._pages(f"{max(0, int(since * 1000)):013d}")
        for page in itertools.islice(pages, pages_max):
            found += page
        return found, next(pages, None) is None

    def get(self, name: str) -> bytes:
        """The content of one object. Raises: a ServiceError leaf."""
        bucket, key = self._bucket, f"{self._folder}{name}"
        with bucket.doing(GET_OBJECT, f"read {bucket.url(key)}"):
            answer = bucket.client().get_object(Bucket=bucket.bucket, Key=key)
            content: bytes = answer["Body"].read()
            return content

    def _pages(self, after: str) -> Iterator[list[str]]:
        """The names in pages of 1,000, those that sort after this one."""
        bucket = self._bucket
        arguments: dict[str, Any] = {"Bucket": bucket.bucket, "Prefix": self._folder}
        if after:
            arguments["StartAfter"] = f"{self._folder}{after}"
        is_more = True
        while is_more:
            with bucket.doing(LIST_OBJECTS_V2, f"list {bucket.url(self._folder)}"):
                page = bucket.client().list_objects_v2(**arguments)
            yield [found["Key"].removeprefix(self._folder) for found in page.get("Contents", ())]
            arguments["ContinuationToken"] = page.get("NextContinuationToken")
            is_more = bool(page.get("IsTruncated"))
