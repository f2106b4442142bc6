"""The process that copies the state of a lease to this machine before the lease comes, so that the
lease process reads only the deltas since then.

The manager starts it with a job on standard input. It does not know the lease table, and owns no
lease: it makes a copy in `state.local`. The copy is used if the row names its version, or a version
that rests on it.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading

import msgspec

from kclrun.destinations import open_kept, open_versions
from kclrun.errors import KclrunError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.state import PrefetchJob
from kclrun.state.stores.state_versions import StateVersions


def prefetch(job: PrefetchJob) -> None:
    """Make the copy, unless it is there already. Raises: SinkError, SettingsError."""
    store = open_versions(job.place, job.folder, job.kinesis, lambda: job.credentials)
    kept = open_kept(job.place, job.folder, job.shard_id, _end)
    versions = StateVersions(store, job.shard_id, 0, secrets.token_hex(4), kept)
    row = Lease(key=LeaseKey(job.shard_id), checkpoint=job.checkpoint, state_version=job.version)
    try:
        versions.restore(row, dict.fromkeys, None)
    finally:
        versions.close()


def _end(_: BaseException) -> None:
    os._exit(1)


def main() -> None:
    """Do one job. The process ends with its manager, whose end closes standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=PrefetchJob)

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.nice(5)  # behind the leases of this machine
    try:
        prefetch(job)
    except KclrunError:
        os._exit(1)  # the lease process reads the version itself, and reports the error
    os._exit(0)


if __name__ == "__main__":
    main()
