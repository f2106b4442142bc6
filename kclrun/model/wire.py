"""Address and credentials of a service: the plain values that a lease process needs to call it.

The parent resolves them (`aws/endpoints.py`) and passes them over the control channel, so that a
lease process loads none of botocore's service models. Rule: a repr holds no secret. These values
cross a socket; they never reach a log or a message.
"""

from __future__ import annotations

import msgspec


class WireEndpoint(msgspec.Struct, frozen=True):
    """One service, as reached from this host: address, signing scope, trust, proxy and patience.

    `region` is the service's, `signing_region` the one in the credential scope (they differ for a
    few partitions only). `verify` False switches certificate checks off; `ca_bundle` is a path, or
    None for the host's own store. `proxies` maps a URL scheme to a proxy URL, empty where NO_PROXY
    names the host; a proxy URL may carry a password, so the repr shows schemes only.
    """

    url: str
    region: str
    signing_region: str
    ca_bundle: str | None = None
    verify: bool = True
    proxies: dict[str, str] = {}
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0

    def __repr__(self) -> str:
        proxied = ",".join(sorted(self.proxies)) or "none"
        return f"WireEndpoint({self.url}, signing_region={self.signing_region}, proxied={proxied})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        """The fields for a pretty-printer: without proxy URLs."""
        return [("url", self.url), ("signing_region", self.signing_region)]


class WireCredentials(msgspec.Struct, frozen=True):
    """Keys to sign with; `token` if they are temporary."""

    access_key: str
    secret_key: str
    token: str | None = None

    def __repr__(self) -> str:
        return "WireCredentials(…)"

    __str__ = __repr__

    def __rich_repr__(self) -> list[tuple[str, str]]:
        """The fields for a pretty-printer: none."""
        return []
