"""Keeps the web pages that a developer visits away from the embedded AWS.

A page of any site can make a browser send requests to this machine. Such a request has an `Origin`,
or says that it comes from another site, or names a host of that site (DNS rebinding). SDKs, the AWS
CLI and curl send none of these. An ASGI application before each of the embedded AWS's own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from kclrun.local.asgi import App, Receive, Scope, Send, respond
from kclrun.local.operations import Encoding, error_answer
from kclrun.model.stream import is_loopback_host

# moto's own interface: it forgets everything, records requests to files, and sets answers.
_MOTO_API: Final = "moto-api"
# A browser asks by these whether a page of another site may send a request (CORS).
_PREFLIGHT: Final = b"access-control-request-"
# The values of Sec-Fetch-Site of a request that no other site made: typed by the user, or of a page
# of this address.
_OWN_SITES: Final = frozenset({"none", "same-origin"})
_STATUS: Final = 403
_CODE: Final = "AccessDeniedException"
_SHOWN_MAX: Final = 100


class Guard:
    """An ASGI application that gives to `app` only the requests that no page of another site made.

    A request may name this machine by any address, by a name of loopback, and by `names`. Without
    `serves_moto_api` the paths below /moto-api/ are refused, too.
    """

    def __init__(
        self, app: App, *, names: Iterable[str] = (), serves_moto_api: bool = False
    ) -> None:
        self._app = app
        self._names = tuple(name.lower().rstrip(".") for name in names)
        self._serves_moto_api = serves_moto_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        content_type, body = _refused(scope, refusal)
        await respond(send, _STATUS, [(b"content-type", content_type)], body)

    def _refusal(self, scope: Scope) -> str | None:
        """Why the request is refused; None if it is not."""
        hosts = _values(scope, b"host")
        for host in hosts:
            if not self._is_ours(host):
                return (
                    f"The embedded AWS does not serve the host {host[:_SHOWN_MAX]!r}: call it by"
                    " an address or by localhost, or start kclrun local with --host and this name."
                )
        own_origins = {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}
        is_foreign = (
            any(origin not in own_origins for origin in _values(scope, b"origin"))
            or any(site not in _OWN_SITES for site in _values(scope, b"sec-fetch-site"))
            or any(name.lower().startswith(_PREFLIGHT) for name, _ in scope["headers"])
        )
        if is_foreign:
            return "The embedded AWS does not serve web pages of another site."
        path = unquote(scope["raw_path"].decode("latin-1"))
        if path.lstrip("/").startswith(_MOTO_API) and not self._serves_moto_api:
            return "/moto-api/ is not served: start kclrun local with --moto-api."
        return None

    def _is_ours(self, authority: str) -> bool:
        try:
            host = (urlsplit(f"//{authority}").hostname or "").rstrip(".")
        except ValueError:
            return False
        try:
            # A site cannot point an address at this machine, only a name.
            ipaddress.ip_address(host)
        except ValueError:
            # Below a name: a bucket, in the virtual-hosted style of S3.
            ours = any(host == name or host.endswith(f".{name}") for name in self._names)
            return ours or is_loopback_host(host)
        return True


def _values(scope: Scope, name: bytes) -> Sequence[str]:
    """The values of a header, however often it came."""
    return [value.decode("latin-1") for given, value in scope["headers"] if given.lower() == name]


def _refused(scope: Scope, message: str) -> tuple[bytes, bytes]:
    """The content type and the body of a refusal, as an SDK can read it."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if b"x-amz-target" in headers:
        encoding = Encoding.of(headers.get(b"content-type", b""))
        return encoding.value, error_answer(_STATUS, _CODE, message, encoding).body
    text = escape(message)
    error = f"<Error><Code>AccessDenied</Code><Message>{text}</Message></Error>"
    return b"application/xml", f'<?xml version="1.0"?>{error}'.encode()
