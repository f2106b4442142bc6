"""The embedded AWS of `ledger_rig`, with servers that note what they are asked."""

import os
from unittest import mock

from kclrun.local import server
from tests.processes.fleet_rig.noting import NOTES_VARIABLE
from tests.processes.ledger_rig.aws import Aws

__all__ = ["WatchedAws"]


class WatchedAws(Aws):
    """As `Aws`; `notes_path` grows with each request."""

    def __init__(self, notes_path):
        self.notes_path = notes_path
        notes_path.touch()
        with (
            mock.patch.object(server, "_KINESIS", "tests.processes.fleet_rig.watched_kinesis"),
            mock.patch.object(server, "_MOTO", "tests.processes.fleet_rig.watched_dynamodb"),
            mock.patch.dict(os.environ, {NOTES_VARIABLE: str(notes_path)}),
        ):
            super().__init__()
