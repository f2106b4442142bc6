"""The process behind the endpoint: moto in our own HTTP server.

Started by `server.py`; not for the command line.
"""

from __future__ import annotations

import functools
import os
from typing import Final

from kclrun.local.guard import Guard
from kclrun.local.moto_server import MotoServer, WsgiApp
from kclrun.local.server import ProcessSettings
from kclrun.local.serving import serve_as_child
from kclrun.local.table_arns import naming_tables

# A client chooses the region in the name of a host. The demo and a test have a few.
_HOSTS_MAX: Final = 256


def dispatcher() -> WsgiApp:
    """moto's application for all services, which remembers the service of each host.

    moto lists its own folder for that, twice a request: a third of the CPU time of one of DynamoDB.
    """
    # By default moto accepts requests of web pages of any origin. No web page needs access here.
    os.environ["MOTO_DISABLE_GLOBAL_CORS"] = "true"
    # The region is the client's to choose, as for Kinesis.
    os.environ["MOTO_ALLOW_NONEXISTENT_REGION"] = "true"
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    moto = DomainDispatcherApplication(create_backend_app)
    remembered = functools.lru_cache(_HOSTS_MAX)(moto.get_backend_for_host)
    moto.get_backend_for_host = remembered  # type: ignore[method-assign]
    return naming_tables(moto)


def _moto_application(settings: ProcessSettings) -> Guard:
    from kclrun.local.changes.tables import ChangeStreams, feed

    changes = ChangeStreams(settings.changes)
    feed(changes)
    server = MotoServer(dispatcher(), settings.credentials, changes.answer)
    return Guard(server, names=settings.names, serves_moto_api=settings.serves_moto_api)


if __name__ == "__main__":
    serve_as_child(_moto_application)
