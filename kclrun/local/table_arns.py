"""Tables that requests name by their ARN, for moto.

DynamoDB takes the ARN of a table wherever it takes a name. moto knows it for some operations only,
and undoes a transaction by names. So an ARN of the own account and of the region of the request
becomes the name; any other names a table that moto does not have, as it stands.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from kclrun.model.stream import LOOPBACK_REGION
from kclrun.model.table import TABLE

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

# moto's own.
_ACCOUNT: Final = "123456789012"
_REGION: Final = re.compile(r"Credential=[^/,]*/\d{8}/([A-Za-z0-9-]{1,64})/dynamodb/")
# The member of a request. In a text of an item, its quotes have backslashes before them.
_MEMBER: Final = (
    rb'("TableName"\s*:\s*")arn:[a-z0-9-]+:dynamodb:%s:%s:table/(' + TABLE.encode() + rb')"'
)


def naming_tables(moto: WsgiApp) -> WsgiApp:
    """The application, with requests that name each table of this account by its name."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("HTTP_X_AMZ_TARGET", "").startswith("DynamoDB_"):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = by_names(environ["wsgi.input"].read(length), _region(environ))
            environ = {
                **environ,
                "wsgi.input": io.BytesIO(body),
                "CONTENT_LENGTH": str(len(body)),
            }
        return moto(environ, start_response)

    return answer


def by_names(body: bytes, region: str) -> bytes:
    """The body of a request, with names in place of the ARNs of its tables."""
    if b":table/" not in body:
        return body
    member = _MEMBER % (re.escape(region).encode(), _ACCOUNT.encode())
    return re.sub(member, rb'\1\2"', body)


def _region(environ: dict[str, Any]) -> str:
    found = _REGION.search(environ.get("HTTP_AUTHORIZATION", ""))
    return LOOPBACK_REGION if found is None else found[1]
