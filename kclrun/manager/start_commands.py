"""From settings, world and row to the start command of one lease process.

Rule: everything a lease process needs travels in it; it reads no file and no setting of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kclrun.config.schema import CheckpointSettings, Settings
from kclrun.ipc import spec as ipc
from kclrun.leases.commands import StartProcess
from kclrun.manager.world import World
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.stream_key import (
    ONLY_STREAM,
    StreamKey,
    shard_id_of,
    stream_name_of,
    stream_of,
)
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials

__all__ = ["StartCommands"]


class StartCommands:
    """Makes start commands for one manager. `row_of` gives the row as last confirmed."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        *,
        owner: OwnerId,
        lock_path: Path,
        import_paths: tuple[str, ...],
        start_at_of: Callable[[StreamKey], WallTime | None],
        log_as_json: bool,
        credentials: Callable[[], WireCredentials],
        row_of: Callable[[LeaseKey], Lease | None],
        failover_s: Callable[[], float],
        others_in_sight: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._world = world
        self._owner = owner
        self._lock_path = lock_path
        self._import_paths = import_paths
        self._start_at_of = start_at_of
        self._log_as_json = log_as_json
        self._credentials = credentials
        self._row_of = row_of
        self._failover_s = failover_s
        self._others_in_sight = others_in_sight

    def __call__(self, start: StartProcess, place: int, incarnation: int) -> ipc.StartSpec:
        settings = self._settings
        stream = stream_of(start.key)
        source = self._world.streams[stream]
        row = self._row_of(start.key)
        hash_range = row.hash_range if row is not None else None
        pinned_at = row.latest_pinned_at if row is not None else None
        return ipc.StartSpec(
            application=settings.application,
            stream_name=source.summary.name,
            stream_arn=source.summary.arn or None,
            lease_key=start.key,
            shard_id=shard_id_of(start.key),
            owner=self._owner,
            seen_counter=start.counter,
            place=place,
            incarnation=incarnation,
            expires_instant=start.expires_instant,
            failover_s=self._failover_s(),
            has_waited=start.has_waited,
            others_in_sight=self._others_in_sight(),
            start_timestamp=pinned_at if pinned_at is not None else self._start_at_of(stream),
            hash_range_start=str(hash_range.start) if hash_range is not None else None,
            hash_range_end=str(hash_range.end) if hash_range is not None else None,
            processor=source.settings.processor or "",
            import_paths=self._import_paths,
            options=source.settings.options,
            fetch=_fetch(settings),
            checkpoint=_checkpoint(settings.checkpoint),
            on_error=ipc.OnErrorSpec(
                retries=settings.on_error.retries, backoff_s=float(settings.on_error.backoff)
            ),
            output_path=self._output_path(stream),
            table_name=settings.table,
            kinesis=self._world.kinesis,
            dynamodb=self._world.dynamodb,
            credentials=self._credentials(),
            lock_path=str(self._lock_path),
            log=ipc.LogSpec(level=settings.log.level, json=self._log_as_json),
            nice=source.settings.priority,
        )

    def _output_path(self, stream: StreamKey) -> str | None:
        """A folder for each of several streams: their shards have the same ids."""
        output = self._settings.output
        if output is None or output.path is None or stream == ONLY_STREAM:
            return output.path if output is not None else None
        return str(Path(output.path) / stream_name_of(stream))


def _fetch(settings: Settings) -> ipc.FetchSpec:
    fetch = settings.fetch
    return ipc.FetchSpec(
        mode=fetch.mode,
        idle_s=float(fetch.idle),
        buffer_bytes=int(fetch.buffer),
        batch_max=fetch.batch_max,
        kpl_range=fetch.kpl_range,
    )


def _checkpoint(checkpoint: CheckpointSettings) -> ipc.CheckpointSpec:
    every = checkpoint.every
    return ipc.CheckpointSpec(
        mode=every if isinstance(every, str) else "auto",
        every_s=0.0 if isinstance(every, str) else float(every),
        uncheckpointed_max=checkpoint.uncheckpointed_max,
    )
