"""Lines of what was asked of a service, appended to the file that the environment names."""

import json
import os
import time

NOTES_VARIABLE = "KCLRUN_FLEET_RIG_NOTES"


class Noter:
    """One write a line, with O_APPEND: the lines of both services stand in one file, whole."""

    def __init__(self):
        self._file = os.open(
            os.environ[NOTES_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )

    def note(self, what, **fields):
        line = json.dumps({"at": time.monotonic(), "what": what, **fields})
        os.write(self._file, line.encode() + b"\n")
