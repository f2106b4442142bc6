"""Calls a WSGI application with a request that came in by ASGI (PEP 3333).

Holds the translation and nothing else. Rule: body and answer are held in memory as a whole, so
whoever calls bounds the body.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from kclrun.local.asgi import Scope

__all__ = ["WsgiAnswer", "WsgiApp", "call_wsgi", "wsgi_environ"]

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
# Status, headers, body.
WsgiAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]


def wsgi_environ(scope: Scope, body: bytes) -> dict[str, Any]:
    """The request as WSGI describes it (PEP 3333)."""
    path = scope["raw_path"].decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    host, port = scope["server"]
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "RAW_URI": f"{path}?{query}" if query else path,
        "REQUEST_URI": f"{path}?{query}" if query else path,
        "SERVER_NAME": host,
        "SERVER_PORT": str(port),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").upper().replace("-", "_")
        if name in ("CONTENT_LENGTH", "TRANSFER_ENCODING"):
            continue
        key = name if name == "CONTENT_TYPE" else f"HTTP_{name}"
        value = raw_value.decode("latin-1")
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    return environ


def call_wsgi(moto: WsgiApp, environ: dict[str, Any]) -> WsgiAnswer:
    """One request through a WSGI application; its answer as a whole."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], _exc_info: object = None
    ) -> Callable[[bytes], None]:
        started.append((status, headers))
        return written.append

    pieces = moto(environ, start_response)
    try:
        content = b"".join((*written, *pieces))
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    status, headers = started[-1]
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    if environ["REQUEST_METHOD"] != "HEAD" and not any(
        name == b"content-length" for name, _ in encoded
    ):
        encoded.append((b"content-length", str(len(content)).encode()))
    return int(status.split(" ", 1)[0]), encoded, content
