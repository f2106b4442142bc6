"""Rows into an HTTP API, each at least once: one POST with a JSON array for up to 200 rows.

output: {use: "processors.http_rows:HttpRows", options: {url: "https://example.com/rows"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import urllib3

from kclrun import HaltShard, Output, OutputContext
from kclrun.errors import RowsRefused

__all__ = ["HttpOptions", "HttpRows"]

# The API may take the same request later: it is slow, or has too much to do.
_LATER: Final = frozenset({408, 425, 429})
_REFUSED: Final = frozenset({400, 413, 422})


class HttpOptions(msgspec.Struct, frozen=True):
    """The address that takes the rows, and how long one request may take."""

    url: str
    timeout_s: float = 10.0


class HttpRows(Output):
    """Sends rows to an HTTP API. After a crash it sends some rows again: let the API know a row by
    one of its columns."""

    options_as = HttpOptions
    rows_max = 200

    def open(self, context: OutputContext[HttpOptions]) -> None:
        self._url = context.options.url
        # A request must end by itself: kclrun ends no call. And kclrun repeats it.
        self._http = urllib3.PoolManager(timeout=context.options.timeout_s, retries=False)

    def check_row(self, row: Mapping[str, Any]) -> None:
        msgspec.json.encode(row)

    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        headers = {"Content-Type": "application/json"}
        body = msgspec.json.encode(rows)
        self._require_taken(self._http.request("POST", self._url, body=body, headers=headers))

    def check(self) -> str:
        answer = self._http.request("OPTIONS", self._url)
        if answer.status not in {404, 405, 501}:  # many servers do not know OPTIONS
            self._require_taken(answer)
        return f"{self._url} answers {answer.status}"

    def close(self) -> None:
        self._http.clear()

    def _require_taken(self, answer: urllib3.BaseHTTPResponse) -> None:
        words = f"{self._url} answers {answer.status}"
        if answer.status in _REFUSED:
            raise RowsRefused(words)
        if answer.status >= 500 or answer.status in _LATER:
            raise OSError(words)  # again later
        if answer.status >= 300:
            raise HaltShard(words)  # a wrong address, or no permission: for a person
