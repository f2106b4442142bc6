"""Before a lease is asked for, a process of its own copies the state that its row names to this
machine. With `state.local` the lease process then begins with it, and reads the deltas since then.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from kclrun.errors import ServiceError
from kclrun.manager.loop import Loop
from kclrun.manager.world import World
from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.state import PrefetchJob, StatePlace, is_own_version, version_folder
from kclrun.model.stream import shard_id_of, stream_of
from kclrun.model.wire import WireCredentials
from kclrun.observe.logs import EventLog
from kclrun.protocol.writes import Ask, LeaseChange

# The owner works meanwhile, so that nothing stands still. A state that takes longer is read when
# the lease comes. At 15 MB/s into SQLite it is 450 MB.
_WAIT_S: Final = 30.0
# A machine that joins asks for many leases at once: each copy takes its share of disk and network
# from the leases that are here. The others are asked for at once, and read when they come.
_AT_ONCE_MAX: Final = 2
_LOOK_S: Final = 0.1


class Prefetching:
    """`delays` is given each write before it is sent. With `place` None, or without `local`, and
    for all but our own asks it does nothing. `is_stopping`: no copy is of use any more."""

    def __init__(
        self,
        place: StatePlace | None,
        *,
        application: str,
        owner: OwnerId,
        world: World,
        credentials: Callable[[], WireCredentials],
        loop: Loop,
        log: EventLog,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._place = None if place is None or place.local is None else place
        self._application = application
        self._owner = owner
        self._world = world
        self._credentials = credentials
        self._loop = loop
        self._log = log
        self._is_stopping = is_stopping
        self._running: list[threading.Thread] = []

    def delays(self, change: LeaseChange, send: Callable[[], None]) -> bool:
        """Whether a copy is made first. Then `send` is called in the loop's thread, in any case."""
        if self._place is None or not isinstance(change, Ask) or change.owner != self._owner:
            return False
        self._running = [thread for thread in self._running if thread.is_alive()]
        if len(self._running) >= _AT_ONCE_MAX or self._is_stopping():
            return False
        arguments = (self._place, change.key, self._credentials(), send)
        thread = threading.Thread(
            target=self._run, args=arguments, name="kclrun-prefetch", daemon=True
        )
        thread.start()
        self._running.append(thread)
        return True

    def _run(
        self, place: StatePlace, key: LeaseKey, keys: WireCredentials, send: Callable[[], None]
    ) -> None:
        try:
            job = self._job(place, key, keys)
            if job is not None and _is_copied(job, self._is_stopping):
                self._loop.post(lambda: self._log.note("state_prefetched", shard=key))
        except (OSError, ServiceError):
            pass  # the lease process reads it, and says what is wrong
        finally:
            self._loop.post(send)

    def _job(self, place: StatePlace, key: LeaseKey, keys: WireCredentials) -> PrefetchJob | None:
        """Raises: a ServiceError leaf."""
        row = self._world.table.read(key)
        source = self._world.streams.get(stream_of(key))
        if row is None or source is None or not is_own_version(row.state_version):
            return None
        assert row.state_version is not None, "it is one of its own"
        return PrefetchJob(
            place=place,
            folder=version_folder(self._application, source.summary.name),
            shard_id=shard_id_of(key),
            checkpoint=row.checkpoint,
            version=row.state_version,
            kinesis=self._world.kinesis,
            credentials=keys,
        )


def _is_copied(job: PrefetchJob, is_stopping: Callable[[], bool]) -> bool:
    """Wait for the process, which ends with its standard input. Raises: OSError."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kclrun.worker.prefetching"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the manager. Not a session of its own: the manager reaps an exited child of
        # another session as an orphan, and the exit code would be lost.
        process_group=0,
    ) as process:
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + _WAIT_S
            while process.poll() is None and time.monotonic() < deadline and not is_stopping():
                time.sleep(_LOOK_S)
        finally:
            if process.poll() is None:
                process.kill()
        return process.wait() == 0
