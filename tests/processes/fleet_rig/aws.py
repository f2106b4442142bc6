"""The embedded AWS of `ledger_rig`, with servers that note what they are asked."""

import os
from unittest import mock

from kclrun.local import server
from tests.processes.fleet_rig.noting import NOTES_VARIABLE
from tests.processes.ledger_rig.aws import Aws


class WatchedAws(Aws):
    """As `Aws`; `notes_path` grows with each request. `kinesis` is the module of its Kinesis."""

    def __init__(self, notes_path, *, kinesis="tests.processes.fleet_rig.watched_kinesis"):
        self.notes_path = notes_path
        notes_path.touch()
        with (
            mock.patch.object(server, "_KINESIS", kinesis),
            mock.patch.dict(os.environ, {NOTES_VARIABLE: str(notes_path)}),
        ):
            super().__init__(dynamodb="tests.processes.fleet_rig.watched_dynamodb")
