"""Stories of shards as objects in S3: created, never replaced, never removed.

A manager without a story in S3 does not import this module, because it loads botocore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.operations import GET_OBJECT, LIST_OBJECTS_V2, PUT_OBJECT
from kclrun.aws.outputs.s3 import Bucket
from kclrun.model.wire import WireCredentials


class StoryObjects:
    """`s3://bucket/prefix/<application>/<name>`. `put` is a manager's, from one thread; `read` is
    for `kclrun why`."""

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
        bucket = self._bucket
        arguments: dict[str, Any] = {"Bucket": bucket.bucket, "Prefix": self._folder}
        is_more = True
        while is_more:
            with bucket.doing(LIST_OBJECTS_V2, f"list {bucket.url(self._folder)}"):
                page = bucket.client().list_objects_v2(**arguments)
            for found in page.get("Contents", ()):
                with bucket.doing(GET_OBJECT, f"read {bucket.url(found['Key'])}"):
                    answer = bucket.client().get_object(Bucket=bucket.bucket, Key=found["Key"])
                    content: bytes = answer["Body"].read()
                yield content
            arguments["ContinuationToken"] = page.get("NextContinuationToken")
            is_more = bool(page.get("IsTruncated"))
