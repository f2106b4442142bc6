"""The process of the endpoint: the Kinesis model over HTTP.

Started by `server.py`; not for the command line.
"""

from __future__ import annotations

import secrets
import sys
from typing import Final

from kclrun.local.guard import Guard
from kclrun.local.http_face import Forwarder, HttpFace
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.server import ProcessSettings
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.serving import serve_as_child

# A change of a stream (a split, a merge, its retention) takes so long, and refuses another one
# meanwhile. The service needs seconds. A stream is created at once: a waiter of an SDK would look
# again only after its pause of seconds.
_UPDATE_S: Final = 0.2


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


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
    face = HttpFace(kinesis, elsewhere, settings.credentials)
    return Guard(face, names=settings.names, serves_moto_api=settings.serves_moto_api)


if __name__ == "__main__":
    serve_as_child(_application)
