"""A run on the embedded AWS: starts and fills it, runs the application, and ends it.

The embedded AWS and the filler exist as long as the run. For the run itself only the endpoints
differ. `until: caught-up` waits for the filler. If the filler fails, the run ends with the filler's
message, so an incomplete stream is never reported as a success.
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
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kclrun.aws.control import ControlPlane
from kclrun.aws.credentials import LOOPBACK_CREDENTIALS
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.sessions import OwnSession
from kclrun.cli.child_lines import lines_of
from kclrun.cli.config_options import Configuration
from kclrun.cli.terminal import stop_signals
from kclrun.cli.user_code import own_module, with_output_paths
from kclrun.cli.waiting import waiting_for
from kclrun.config.embedded import EmbeddedSettings
from kclrun.config.outputs import output_places
from kclrun.config.schema import AwsSettings, Settings
from kclrun.config.state import state_place
from kclrun.errors import SettingsError, Unavailable
from kclrun.loading import import_paths
from kclrun.local.filling import Filling, FillOrder, FillReport, Reshard, make_stream
from kclrun.local.server import Embedded, start_embedded
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.wire import WireEndpoint

# The filler notices the end of its standard input at once; a put under way takes milliseconds.
_FILLER_END_MAX_S: Final = 5.0
# The filler of a starter project takes half a second.
_FILLED_POLL_S: Final = 0.05


_ON_THIS_HOST: Final = "http://127.0.0.1"
# Two seconds are usual: the import of moto.
_EMBEDDED_QUICK_S: Final = 4.0


class EmbeddedRun(NamedTuple):
    """The settings of the run, with real endpoints, and the state of its filler."""

    settings: Settings
    filler: _Filler | None

    def source_is_done(self) -> bool:
        """Whether every record is in the stream and every reshard done (or the filler failed)."""
        return self.filler is None or self.filler.is_done

    def filling(self) -> Filling | None:
        """The progress of the filler; None without a fill."""
        return self.filler.filling if self.filler is not None else None

    def report(self) -> FillReport | None:
        """The filler's report; None without a fill, or if the run ended before the filler.

        Raises: SettingsError or Unavailable if the filler failed.
        """
        return self.filler.result() if self.filler is not None else None


@contextmanager
def embedded_run(configuration: Configuration) -> Iterator[EmbeddedRun]:
    """Start the embedded AWS with its streams and its filler; end them all afterwards.

    Raises: SettingsError (the extra is not installed), Unavailable.
    """
    settings = configuration.settings
    embedded_settings = settings.embedded or EmbeddedSettings()
    with waiting_for("the embedded AWS to start", _EMBEDDED_QUICK_S):
        started = start_embedded(limits=embedded_settings.limits)
    with started as embedded, _own_places(settings) as placed:
        reached = msgspec.structs.replace(placed, aws=_aws(settings.aws, embedded))
        kinesis = _kinesis(reached, embedded)
        for name, shards in embedded_streams(settings).items():
            make_stream(kinesis, name, shards)
        _make_destinations(reached, kinesis)
        if embedded_settings.fill is None:
            yield EmbeddedRun(reached, None)
            return
        order = _order(configuration, embedded_settings, kinesis)
        with _filled(order) as filler:
            yield EmbeddedRun(reached, filler)


def embedded_streams(settings: Settings) -> dict[str, int]:
    """The names of the application's streams, each with its number of shards on an embedded AWS.

    Raises: SettingsError for an ARN.
    """
    shards = (settings.embedded or EmbeddedSettings()).shards
    if any(source.name.startswith("arn:") for source in settings.sources):
        raise SettingsError("stream: on an embedded AWS, give a name, not an ARN")
    return {source.name: shards for source in settings.sources}


@contextmanager
def furnished(
    configuration: Configuration, embedded: Embedded, asked_to_end: threading.Event
) -> Iterator[None]:
    """Give an embedded AWS that has the streams of an application its destinations and records.

    Entered once they are there; the records of a fill with a rate come while it serves. Raises:
    SettingsError or Unavailable if the filler fails.
    """
    settings = configuration.settings
    reached = msgspec.structs.replace(settings, aws=_aws(settings.aws, embedded))
    kinesis = _kinesis(reached, embedded)
    _make_destinations(reached, kinesis)
    if settings.embedded is None or settings.embedded.fill is None:
        yield
        return
    with _Filler(_order(configuration, settings.embedded, kinesis)) as filler:
        while settings.embedded.fill.rate is None and not filler.is_done:
            if asked_to_end.wait(_FILLED_POLL_S):
                break
        filler.result()
        yield
        filler.result()


def local_region(aws: AwsSettings) -> str:
    """The region of an application's requests to an endpoint on this machine: an embedded AWS has
    its streams there. Raises: SettingsError (the configuration files of AWS)."""
    profile = aws.profile
    if profile is not None and profile not in OwnSession().available_profiles:
        profile = None  # of another machine: the application cannot run here with it
    own = EndpointSettings(region=aws.region, profile=profile, endpoint_url=_ON_THIS_HOST)
    region: str = open_session(own).get_config_variable("region")
    return region


def _kinesis(reached: Settings, embedded: Embedded) -> WireEndpoint:
    region = reached.aws.region
    assert region is not None, "that of an embedded AWS is known"
    return WireEndpoint(embedded.kinesis_endpoint, region, region)


def _make_destinations(settings: Settings, kinesis: WireEndpoint) -> None:
    """The streams, buckets, queues and topics of the outputs, and the bucket or table of the state:
    they exist as long as the run."""
    from kclrun.aws.outputs.state_items import TABLE

    if settings.engine != "fleet":
        return
    own = EndpointSettings(region=settings.aws.region, endpoint_url=settings.aws.endpoint)
    control = ControlPlane(open_session(own), own, LOOPBACK_CREDENTIALS)
    state = state_place(settings)
    places = output_places(settings, ONLY_STREAM)
    urls = [place.s3 for place in places] + ([] if state is None else [state.s3])
    for bucket in sorted({urlsplit(url).netloc for url in urls if url is not None}):
        control.s3().create_bucket(Bucket=bucket)
    if state is not None and state.dynamodb is not None:
        control.dynamodb_writes().create_table(TableName=state.dynamodb, **TABLE)
    for place in places:
        named = place.sqs or place.sns or ""
        is_fifo = named.endswith(".fifo")
        if place.kinesis is not None:
            make_stream(kinesis, place.kinesis, 1)
        elif place.sqs is not None:
            control.sqs().create_queue(
                QueueName=named.rpartition("/")[2],
                Attributes={"FifoQueue": "true"} if is_fifo else {},
            )
        elif place.sns is not None:
            control.sns().create_topic(
                Name=named.rpartition(":")[2],
                Attributes={"FifoTopic": "true"} if is_fifo else {},
            )


@contextmanager
def _filled(order: FillOrder) -> Iterator[_Filler]:
    """A filler. A stop signal ends this process in good order also before the manager has its
    handlers: a filler that fails sends a SIGTERM, and may fail before `_Filler` returns."""

    def stop(*_: object) -> None:
        raise SystemExit(os.EX_OK)

    handled = [number for number in stop_signals() if number is not signal.SIGINT]
    former = {number: signal.signal(number, stop) for number in handled}
    filler = None
    try:
        with _Filler(order) as filler:
            yield filler
    except SystemExit:
        if filler is not None:
            filler.result()  # if the filler failed, its error replaces the exit
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _own_places(settings: Settings) -> Iterator[Settings]:
    """A folder for this run only, and on Spark a checkpoint beside it. The stream is new, so the
    rows and positions of former runs do not belong to it."""
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    settings = with_output_paths(settings, lambda path: f"{path.rstrip('/')}/{started}")
    output = settings.output
    if output is not None and output.path is not None:
        yield _with_checkpoint(settings, f"{output.path}.checkpoint")
        return
    if settings.engine == "fleet":
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="kclrun-checkpoint-") as folder:
        yield _with_checkpoint(settings, folder)


def _with_checkpoint(settings: Settings, place: str) -> Settings:
    if settings.engine == "fleet":
        return settings
    # A local path must be absolute, because Spark runs in a process of its own.
    checkpoint = place if "://" in place else str(Path(place).absolute())
    spark = msgspec.structs.replace(settings.spark, checkpoint=checkpoint)
    return msgspec.structs.replace(settings, spark=spark)


def _aws(aws: AwsSettings, embedded: Embedded) -> AwsSettings:
    """Settings with the endpoints of the embedded AWS, without the profile and the role, which
    belong to the real AWS."""
    return msgspec.structs.replace(
        aws,
        region=local_region(aws),
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
        # With several streams, the fill and its reshards are for the first one.
        stream=configuration.settings.sources[0].name,
        source=embedded.fill.source,
        paths=tuple(str(path) for path in paths),
        aggregate=embedded.fill.aggregate,
        rate=embedded.fill.rate,
        reshard=tuple(Reshard(step.after, step.split, step.merge) for step in embedded.reshard),
    )


class _Filler:
    """The filler's process and its result."""

    def __init__(self, order: FillOrder) -> None:
        self._process = subprocess.Popen(
            own_module("kclrun.local.filling"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal must reach only the run, which ends its filler itself. This is a
            # process group and not a session: a manager reaps an exited child of another session as
            # an adopted one.
            process_group=0,
        )
        self._report: FillReport | None = None
        self.filling = Filling(0)
        # Set before the signal of a failure: a run that it ends finds the failure in `result`.
        self.is_done = False
        self._has_failed = self._is_ending = False
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        self._watch = threading.Thread(target=self._wait, name="filler", daemon=True)
        self._watch.start()

    def result(self) -> FillReport | None:
        """The report; None while the filler runs, or if it was ended first. Raises: SettingsError,
        Unavailable."""
        if not self.is_done:
            return None
        if not self._has_failed:
            return self._report
        away = self._process.returncode == os.EX_UNAVAILABLE
        kind = Unavailable if away else SettingsError
        raise kind("embedded.fill did not put all its records; its message is above")

    def _wait(self) -> None:
        try:
            self._take_in()
        finally:
            # The filler writes the report last: a missing report is the failure, not the exit code.
            self._has_failed = self._report is None and not self._is_ending
            self.is_done = True
        if self._has_failed:
            # As an operator would do: the run drains, and then `result` raises the failure.
            os.kill(os.getpid(), signal.SIGTERM)

    def _take_in(self) -> None:
        """The filler's progress and report, until it has ended."""
        for line in lines_of(self._process):
            try:
                message = msgspec.json.decode(line, type=FillReport | Filling)
            except msgspec.DecodeError:
                continue  # a line that the source printed
            if isinstance(message, Filling):
                self.filling = message
            else:
                self._report = message
                self.filling = Filling(message.user_records, message.user_records)
        self._process.wait()

    def __enter__(self) -> _Filler:
        return self

    def __exit__(self, *_: object) -> None:
        """End the filler if it still runs: it ends when its standard input is closed."""
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
