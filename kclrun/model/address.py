"""Which URLs may be an endpoint: https anywhere, plain http on this host only. Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["is_loopback_host", "why_no_endpoint"]


def why_no_endpoint(url: str) -> str:
    """Why a URL is no endpoint, or nothing. Credentials in a URL are not repeated."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "this is no URL"
    if parts.scheme not in {"http", "https"} or not host:
        return "this is no URL that starts with https://"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "a user, a password or a query has no place in it"
    if parts.scheme == "http" and not is_loopback_host(host):
        return "plain http is for this machine only (localhost, 127.0.0.1)"
    return ""


def is_loopback_host(host: str) -> bool:
    """Whether a host is this one, by its address or the name localhost. Looks nothing up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
