"""Stories of shards as objects in S3: created, never replaced, never removed.

A manager without a story in S3 does not import this module, because it loads botocore.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.outputs.s3 import Bucket
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials


class StoryObjects:
    """`s3://bucket/prefix/<application>/<name>`. A manager calls `put`, from one thread; `kclrun
    why` calls `read`; the page calls `names` and `get`, because it reads no object twice."""

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
        """Create the object. If an answer was lost, the object exists already. Raises: a
        ServiceError leaf."""
        self._bucket.create(f"{self._folder}{name}", content)

    def read(self) -> Iterator[bytes]:
        """The contents of all objects, in the order of their times. Raises: a ServiceError leaf."""
        return (self.get(name) for page in self._pages("") for name in page)

    def names(self, since: WallTime, pages_max: int) -> tuple[list[str], bool]:
        """The names of the objects since then, in the order of their times, by `pages_max` calls
        and one more; and whether these are all of them. Raises: a ServiceError leaf."""
        found: list[str] = []
        pages = self._pages(f"{max(0, int(since * 1000)):013d}")
        for page in itertools.islice(pages, pages_max):
            found += page
        return found, next(pages, None) is None

    def get(self, name: str) -> bytes:
        """The content of one object. Raises: a ServiceError leaf."""
        return self._bucket.read(f"{self._folder}{name}")

    def _pages(self, after: str) -> Iterator[list[str]]:
        """The names that sort after `after`, in pages of 1,000."""
        start = {"StartAfter": f"{self._folder}{after}"} if after else {}
        for page in self._bucket.pages(self._folder, **start):
            yield [found["Key"].removeprefix(self._folder) for found in page.get("Contents", ())]
