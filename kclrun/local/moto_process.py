"""The process behind the endpoint: moto in our own HTTP server.

Started by `server.py`; not for the command line.
"""

from __future__ import annotations

import os

from kclrun.local.http_face import MotoFace
from kclrun.local.server import ProcessSettings
from kclrun.local.serving import serve_as_child


def _moto_application(settings: ProcessSettings) -> MotoFace:
    # By default moto accepts requests of web pages of any origin. No web page needs access here.
    os.environ["MOTO_DISABLE_GLOBAL_CORS"] = "true"
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    from kclrun.local.changes.tables import ChangeStreams, feed

    changes = ChangeStreams(settings.changes)
    feed(changes)
    moto = DomainDispatcherApplication(create_backend_app)
    return MotoFace(moto, settings.credentials, changes.answer)


if __name__ == "__main__":
    serve_as_child(_moto_application)
