"""The process that answers at the one endpoint: the Kinesis model under its HTTP face.

Started by `server.py`; not for the command line. Look next: `http_face.py`.
"""

from __future__ import annotations

import secrets

from kclrun.local.forwarding import Forwarder
from kclrun.local.http_face import HttpFace
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.process_settings import ProcessSettings
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.serving import serve_as_child

__all__: list[str] = []


def _application(settings: ProcessSettings) -> HttpFace:
    kinesis = Kinesis(
        KinesisSettings(
            limits=AWS_LIMITS if settings.limits else None,
            settle_s=settings.settle_s,
            stored_bytes_max=settings.stored_bytes_max,
        ),
        secrets.token_bytes(32),
    )
    elsewhere = None if settings.elsewhere_port is None else Forwarder(settings.elsewhere_port)
    return HttpFace(kinesis, elsewhere, settings.credentials)


if __name__ == "__main__":
    serve_as_child(_application)
