"""The process of the endpoint: the Kinesis model over HTTP.

Started by `server.py`; not for the command line.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kclrun.local.consumers import Subscription
from kclrun.local.forwarding import Forwarder
from kclrun.local.guard import Guard
from kclrun.local.http_server import HttpServer
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.server import ProcessSettings
from kclrun.local.service import Kinesis
from kclrun.local.serving import serve_as_child
from kclrun.local.settings import KinesisSettings

# A change of a stream (a split, a merge, its retention) takes so long, and refuses another one
# meanwhile. The service needs seconds. A stream is created at once: a waiter of an SDK would look
# again only after its pause of seconds.
_UPDATE_S: Final = 0.2
# For tests: a file that gets a line of JSON for each SubscribeToShard that was taken, with its
# `caller` (the User-Agent), `stream` and `shard`.
_SUBSCRIBED: Final = "KCLRUN_LOCAL_SUBSCRIBED"


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _record_of(path: str | None) -> Callable[[str, Subscription], None]:
    """Appends each subscription to the file, whole lines."""

    def note(caller: str, taken: Subscription) -> None:
        if path is not None:
            of = {"caller": caller, "stream": taken.stream_name, "shard": taken.shard_id}
            with Path(path).open("ab") as record:
                record.write(msgspec.json.encode(of) + b"\n")

    return note


def _application(settings: ProcessSettings) -> Guard:
    kinesis = Kinesis(
        KinesisSettings(
            limits=AWS_LIMITS if settings.limits else None,
            settle_s=settings.settle_s,
            update_s=_UPDATE_S,
            stored_bytes_max=settings.stored_bytes_max,
        ),
        secrets.token_bytes(32),
        note=_note,
    )
    elsewhere = None if settings.elsewhere_port is None else Forwarder(settings.elsewhere_port)
    server = HttpServer(
        kinesis, elsewhere, settings.credentials, note=_record_of(os.environ.get(_SUBSCRIBED))
    )
    return Guard(server, names=settings.names, serves_moto_api=settings.serves_moto_api)


if __name__ == "__main__":
    serve_as_child(_application)
