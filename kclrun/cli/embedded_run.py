"""A run on the embedded AWS: started, filled, resharded, consumed, summed up, ended.

Holds the embedded AWS and the filler for as long as the run lasts; the run itself sees nothing but
other endpoints. Rule: `until: caught-up` waits for the filler, and a filler that fails ends the
run with its own message: half a stream is never reported as a success.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.operations import Operation
from kclrun.aws.wire import WireClient
from kclrun.cli.config_options import Configuration
from kclrun.cli.user_code import own_module
from kclrun.config.embedded_schema import EmbeddedSettings
from kclrun.config.schema import AwsSettings, Settings
from kclrun.errors import SettingsError, Unavailable
from kclrun.loading import import_paths
from kclrun.local.filling import (
    LOCAL_CREDENTIALS,
    FillOrder,
    FillReport,
    Reshard,
    wait_until_active,
)
from kclrun.model.wire import WireEndpoint

if TYPE_CHECKING:
    from kclrun.local.server import Embedded

__all__ = ["EmbeddedRun", "embedded_run"]

# The embedded AWS is in no region; boto3 and the ARNs want one.
_REGION: Final = "us-east-1"
_CREATE_STREAM: Final = Operation("kinesis", "CreateStream", is_write=True)
# The filler notices the end of its standard input at once; a put under way takes milliseconds.
_FILLER_END_MAX_S: Final = 5.0


class EmbeddedRun:
    """What the run is given: settings with real endpoints, and when its source is complete."""

    def __init__(self, settings: Settings, filler: _Filler | None) -> None:
        self.settings = settings
        self._filler = filler

    def source_is_done(self) -> bool:
        """Whether every record is in the stream and every reshard done (or the filler failed)."""
        return self._filler is None or self._filler.is_done

    def report(self) -> FillReport | None:
        """What the filler put; None without a fill, or when the run ended before it.

        Raises: SettingsError, Unavailable where it failed.
        """
        return self._filler.result() if self._filler is not None else None


@contextmanager
def embedded_run(configuration: Configuration) -> Iterator[EmbeddedRun]:
    """Start the embedded AWS with its streams and its filler; end them all afterwards.

    Raises: SettingsError (the extra is not installed), Unavailable.
    """
    from kclrun.local.server import start_embedded

    settings = configuration.settings
    embedded_settings = settings.embedded or EmbeddedSettings()
    with (
        start_embedded(limits=embedded_settings.limits) as embedded,
        _own_places(settings) as placed,
    ):
        kinesis = WireEndpoint(embedded.kinesis_endpoint, _REGION, _REGION)
        for source in settings.sources:
            _create_stream(kinesis, source.name, embedded_settings.shards)
        reached = msgspec.structs.replace(placed, aws=_aws(settings.aws, embedded))
        if embedded_settings.fill is None:
            yield EmbeddedRun(reached, None)
            return
        order = _order(configuration, embedded_settings, kinesis)
        with _Filler(order) as filler, _stopping_early(filler):
            yield EmbeddedRun(reached, filler)


@contextmanager
def _stopping_early(filler: _Filler) -> Iterator[None]:
    """Let a SIGTERM end us in good order before the manager has its own handler."""

    def stop(*_: object) -> None:
        raise SystemExit(os.EX_OK)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit:
        filler.result()  # if it is what failed, that is the story to tell
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _create_stream(kinesis: WireEndpoint, stream: str, shards: int) -> None:
    if stream.startswith("arn:"):
        raise SettingsError("stream: with aws.endpoint: embedded, give a name, not an ARN")
    client = WireClient(kinesis, lambda: LOCAL_CREDENTIALS, service="kinesis")
    request = {"StreamName": stream, "ShardCount": shards}
    client.call(_CREATE_STREAM, msgspec.json.encode(request))
    wait_until_active(WireStreamAdmin(client, stream))
    client.close()


@contextmanager
def _own_places(settings: Settings) -> Iterator[Settings]:
    """A folder, and on Spark a checkpoint beside it, for this run alone: its stream is new, so rows
    and positions of former runs are not its own."""
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    output = settings.output
    if output is not None and output.path is not None:
        path = f"{output.path.rstrip('/')}/{started}"
        output = msgspec.structs.replace(output, path=path)
        settings = msgspec.structs.replace(settings, output=output)
        yield _with_checkpoint(settings, f"{path}.checkpoint")
        return
    if settings.engine == "fleet":
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="kclrun-checkpoint-") as folder:
        yield _with_checkpoint(settings, folder)


def _with_checkpoint(settings: Settings, place: str) -> Settings:
    if settings.engine == "fleet":
        return settings
    # A local place as an absolute one: Spark runs in a process of its own.
    checkpoint = place if "://" in place else str(Path(place).absolute())
    spark = msgspec.structs.replace(settings.spark, checkpoint=checkpoint)
    return msgspec.structs.replace(settings, spark=spark)


def _aws(aws: AwsSettings, embedded: Embedded) -> AwsSettings:
    """Straight to each of the two processes; no profile and no role, which are for the real one."""
    return msgspec.structs.replace(
        aws,
        region=_REGION,
        endpoint=embedded.endpoint,
        endpoints={"kinesis": embedded.kinesis_endpoint, "dynamodb": embedded.dynamodb_endpoint},
        profile=None,
        role_arn=None,
    )


def _order(
    configuration: Configuration, embedded: EmbeddedSettings, kinesis: WireEndpoint
) -> FillOrder:
    assert embedded.fill is not None
    paths = import_paths(configuration.settings.path, configuration.folder)
    return FillOrder(
        endpoint=kinesis,
        # The fill and its reshards are of the first stream, where there are several.
        stream=configuration.settings.sources[0].name,
        source=embedded.fill.source,
        paths=tuple(str(path) for path in paths),
        aggregate=embedded.fill.aggregate,
        rate=embedded.fill.rate,
        reshard=tuple(Reshard(step.after, step.split, step.merge) for step in embedded.reshard),
    )


class _Filler:
    """The filler's process, and what became of it."""

    def __init__(self, order: FillOrder) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no user input
            own_module("kclrun.local.filling"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal is for the run; it ends its filler itself. A group of its own,
            # not a session: a manager reaps dead children of other sessions as adopted ones.
            process_group=0,
        )
        self._output = b""
        self._is_ending = False
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        self._watch = threading.Thread(target=self._wait, name="filler", daemon=True)
        self._watch.start()

    @property
    def is_done(self) -> bool:
        return not self._watch.is_alive()

    def result(self) -> FillReport | None:
        """Its report; None while it runs. Raises: SettingsError, Unavailable."""
        if not self.is_done:
            return None
        if self._output:
            return msgspec.json.decode(self._output, type=FillReport)
        away = self._process.returncode == os.EX_UNAVAILABLE
        kind = Unavailable if away else SettingsError
        raise kind("embedded.fill did not put all its records; its message is above")

    def _wait(self) -> None:
        assert self._process.stdout is not None
        self._output = self._process.stdout.read()
        self._process.wait()
        # The report is the last thing it writes: its absence, not an exit code, is the failure.
        if not self._output and not self._is_ending:
            # As an operator would: the run drains, and then `result` tells what happened.
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> _Filler:
        return self

    def __exit__(self, *_: object) -> None:
        """End it if it still runs: closing its standard input is what it waits for."""
        self._is_ending = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_FILLER_END_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watch.join()
        self._process.stdout.close()
