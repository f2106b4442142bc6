"""Which proxy a request goes through: the environment's, but never to this host. Pure but for the
environment.

It holds for the wire client and for botocore's clients. NO_PROXY is read as curl, requests and Go
read it: `*`, a domain with or without a leading `.` or `*.`, an address, a block of addresses
(`10.0.0.0/8`), each with or without a port.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from kclrun.model.stream import is_loopback

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# A host, with a port or not; or an IPv6 address without brackets, which never has a port.
_ENTRY: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?|.*:.*:.*")


def proxies_for(url: str) -> dict[str, str]:
    """The proxy for this URL by its scheme; empty without one. Its URL may hold a password."""
    # Lease processes get their proxies by value, and do without this module.
    from urllib.request import getproxies

    scheme = urlsplit(url).scheme
    configured = getproxies()
    proxy = configured.get(scheme)
    if not proxy or goes_direct(url, configured):
        return {}
    return {scheme: proxy if "://" in proxy else f"http://{proxy.lstrip('/')}"}


def goes_direct(url: str, configured: Mapping[str, str]) -> bool:
    """Whether a URL is of this host, or NO_PROXY (`no` in `configured`) has an entry for it."""
    entries = [entry.strip() for entry in configured.get("no", "").split(",")]
    return is_loopback(url) or _is_named(url, filter(None, entries))


def shown_proxy(proxy: str) -> str:
    """A proxy for a message: scheme, host and port, without a user and a password."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy.lstrip('/')}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_named(url: str, entries: Iterable[str]) -> bool:
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    for entry in entries:
        if entry == "*":
            return True
        matched = _ENTRY.fullmatch(entry.lower())
        if matched is None or (matched[2] is not None and int(matched[2]) != port):
            continue
        if _covers((matched[1] or matched[0]).strip("[]"), host):
            return True
    return False


def _covers(entry: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except (ValueError, TypeError):
        domain = entry.removeprefix("*").strip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))
