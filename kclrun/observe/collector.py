"""The HTTP session of the exporters of OpenTelemetry: no proxy for a collector on this machine."""

from __future__ import annotations

import os
from typing import Final

import requests

from kclrun.model.stream import is_loopback

# As the exporters look for the address, from the most special to the default.
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_DEFAULT: Final = "http://localhost:4318"


def session_for(url: str | None, signal: str) -> requests.Session:
    """A session for the collector at `url`, or at the address that the environment names for the
    `signal` (TRACES or METRICS)."""
    named = (os.environ.get(variable.format(signal=signal)) for variable in _VARIABLES)
    address = url or next(filter(None, named), _DEFAULT)
    session = requests.Session()
    # Proxies and the like: requests would send 127.0.0.1 through HTTP_PROXY.
    session.trust_env = not is_loopback(address)
    return session
