"""While a lease is asked for, a process of its own copies the state that the row names to this
machine. With `state.local` the lease process then begins with it, and reads the deltas since then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kclrun.leases.events import Event, WriteResolved
from kclrun.manager.world import World
from kclrun.model.lease import Lease, OwnerId
from kclrun.model.state import PrefetchJob, StatePlace, is_own_version, version_folder
from kclrun.model.stream import shard_id_of, stream_of
from kclrun.model.wire import WireCredentials
from kclrun.observe.logs import EventLog
from kclrun.protocol.writes import Applied, Ask

# An ask without an answer is void after 30 s; a copy that takes longer is of use all the same.
_WAIT_S: Final = 120.0
# A machine that joins asks for many leases at once: each copy takes its share of disk and network
# from the leases that are here. The others are read when they come.
_AT_ONCE_MAX: Final = 2


class Prefetching:
    """`look` is given each event of the core. `place` None, or without `local`: does nothing."""

    def __init__(
        self,
        place: StatePlace | None,
        *,
        application: str,
        owner: OwnerId,
        world: World,
        credentials: Callable[[], WireCredentials],
        log: EventLog,
    ) -> None:
        self._place = None if place is None or place.local is None else place
        self._application = application
        self._owner = owner
        self._world = world
        self._credentials = credentials
        self._log = log
        self._running: list[threading.Thread] = []

    def look(self, event: Event) -> None:
        """Begin, if it says that our ask for a lease with a state is on its row."""
        match event:
            case WriteResolved(Ask(owner=owner), Applied(Lease() as row)) if owner == self._owner:
                if self._place is not None and is_own_version(row.state_version):
                    self._begin(self._place, row)

    def _begin(self, place: StatePlace, row: Lease) -> None:
        self._running = [thread for thread in self._running if thread.is_alive()]
        source = self._world.streams.get(stream_of(row.key))
        if source is None or len(self._running) >= _AT_ONCE_MAX:
            return
        assert row.state_version is not None, "the caller looked"
        job = PrefetchJob(
            place=place,
            folder=version_folder(self._application, source.summary.name),
            shard_id=shard_id_of(row.key),
            checkpoint=row.checkpoint,
            version=row.state_version,
            kinesis=self._world.kinesis,
            credentials=self._credentials(),
        )
        thread = threading.Thread(target=_run, args=(job,), name="kclrun-prefetch", daemon=True)
        thread.start()
        self._running.append(thread)
        self._log.note("state_prefetched", shard=row.key)


def _run(job: PrefetchJob) -> None:
    """Wait for the process; the job stays between the two, and never in a file."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kclrun.worker.prefetching"],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None, "it is a pipe"
    with process, process.stdin:
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            process.wait(_WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
