"""The process behind the one endpoint: moto under an HTTP server of our own.

Started by `server.py`; not for the command line. Look next: `moto_face.py`.
"""

from __future__ import annotations

import os

from kclrun.local.moto_face import MotoFace
from kclrun.local.process_settings import ProcessSettings
from kclrun.local.serving import serve_as_child

__all__: list[str] = []


def _moto_application(settings: ProcessSettings) -> MotoFace:
    # moto answers every origin by default; nothing in a browser has business here.
    os.environ["MOTO_DISABLE_GLOBAL_CORS"] = "true"
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    return MotoFace(DomainDispatcherApplication(create_backend_app), settings.credentials)


if __name__ == "__main__":
    serve_as_child(_moto_application)
