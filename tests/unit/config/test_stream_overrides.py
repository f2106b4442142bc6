"""Each setting that a stream may have of its own counts wherever the stream is processed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kclrun.cli.config_options import Configuration
from kclrun.cli.dead_letters.redrive import _job
from kclrun.config.load import settings_of
from kclrun.config.schema import Settings, StreamErrorSettings, StreamSettings
from kclrun.leases.commands import StartProcess
from kclrun.leases.policy import StreamStart
from kclrun.manager.forks import StartCommands
from kclrun.manager.world import FleetServices, SourceStream
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.stream import stream_key
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import StreamSummary

TEXT = """\
application: shop
processor: m:Both
options: {level: 1}
decode: json
start: LATEST
concurrency: {records: 4}
on_error:
  {retries: 9, backoff: 9s, max_age: 9m, then: dead-letter, limit: 99, dead_letter: {path: l}}
streams:
  - name: orders
  - name: audits
    processor: m:Audit
    options: {level: 2}
    decode: m:decode
    start: TRIM_HORIZON
    priority: 7
    concurrency: {records: 8}
    on_error: {retries: 2, backoff: 1s, max_age: 5m, then: skip, limit: 50}
"""
# What the application has, and what `audits` has of its own.
OWN: dict[str, tuple[Any, Any]] = {
    "processor": ("m:Both", "m:Audit"),
    "options": ({"level": 1}, {"level": 2}),
    "decode": ("json", "m:decode"),
    "start": ("LATEST", "TRIM_HORIZON"),
    "priority": (0, 7),
    "concurrency": (4, 8),
    "on_error.retries": (9, 2),
    "on_error.backoff": (9.0, 1.0),
    "on_error.max_age": (540.0, 300.0),
    "on_error.then": ("dead-letter", "skip"),
    "on_error.limit": (99, 50),
}
KEYS = WireCredentials("AKIAEXAMPLEEXAMPLE", "s")
PLACE = WireEndpoint(url="http://127.0.0.1:1", region="x", signing_region="x")


def settings() -> Settings:
    return settings_of(TEXT, environment={}, now=WallTime(1_780_000_000.0))


def source_of(name: str) -> StreamSettings:
    return next(each for each in settings().sources if each.name == name)


def on_fleet(name: str) -> dict[str, Any]:
    """As the start command of a lease process has them."""
    arn = f"arn:aws:kinesis:eu-west-1:123456789012:stream/{name}"
    key = stream_key(arn, 1_700_000_000.0)
    summary = StreamSummary(name, arn, "ACTIVE", 24, 1, 0.0)
    commands = StartCommands(
        settings(),
        FleetServices(
            None, {key: SourceStream(None, summary, source_of(name))}, None, PLACE, PLACE
        ),
        {key: StreamStart("TRIM_HORIZON", TRIM_HORIZON)},
        SimpleNamespace(id="kclrun:g:h:n", lock=SimpleNamespace(path=Path("/run/lock"))),
        SimpleNamespace(
            credentials=lambda: KEYS,
            row_of=lambda _: None,
            failover_s=lambda: 4.0,
            has_others_in_sight=lambda: True,
        ),
        import_paths=(),
        log_as_json=True,
    )
    spec = commands(StartProcess(f"{key}:shardId-000000000001", 9, 55.0), 5, 12)
    on_error = spec.on_error
    return {
        "processor": spec.processor,
        "options": spec.options,
        "decode": spec.decode,
        "priority": spec.nice,
        "concurrency": None if spec.concurrency is None else spec.concurrency.records,
        "on_error.retries": on_error.retries,
        "on_error.backoff": on_error.backoff_s,
        "on_error.max_age": on_error.max_age_s,
        "on_error.then": on_error.then,
        "on_error.limit": on_error.limit,
    }


def of_source(made: Settings, source: StreamSettings) -> dict[str, Any]:
    on_error = made.on_error_of(source)
    concurrency = source.concurrency
    return {
        "processor": source.processor,
        "options": source.options,
        "decode": source.decode,
        "start": source.start,
        "concurrency": None if concurrency is None else concurrency.records,
        "on_error.retries": on_error.retries,
        "on_error.backoff": float(on_error.backoff),
        "on_error.max_age": None if on_error.max_age is None else float(on_error.max_age),
        "on_error.then": on_error.then,
        "on_error.limit": on_error.limit,
    }


def in_manager(name: str) -> dict[str, Any]:
    """As the checks and the manager have them."""
    return of_source(settings(), source_of(name)) | {"priority": source_of(name).priority}


def narrowed(name: str) -> dict[str, Any]:
    """As a verb has them that is for one stream: replay, rebuild."""
    made = settings().of_stream(name)
    return of_source(made, made.sources[0])


def redriven(name: str) -> dict[str, Any]:
    """As the processor of a redrive has them: it is called by itself, and gives nothing up."""
    configuration = Configuration(settings(), Path("/here"), Path("app.yaml"))
    job = _job(configuration, source_of(name), ())
    return {
        "processor": job.processor,
        "options": job.options,
        "decode": job.decode,
        "on_error.retries": job.retries,
    }


@pytest.mark.parametrize("host", [on_fleet, in_manager, narrowed, redriven])
@pytest.mark.parametrize(("at", "name"), [(0, "orders"), (1, "audits")])
def test_a_stream_is_processed_with_its_own_settings_and_else_with_the_applications(host, at, name):
    found = host(name)

    assert found == {setting: OWN[setting][at] for setting in found}
    assert found.keys() >= {"processor", "options", "decode", "on_error.retries"}


def test_all_that_a_stream_may_have_of_its_own_is_looked_at():
    own = set(StreamSettings.__struct_fields__) - {"name", "on_error"}
    own |= {f"on_error.{name}" for name in StreamErrorSettings.__struct_fields__}

    assert OWN.keys() == own
    assert all(common != stated for common, stated in OWN.values())
    assert msgspec.structs.asdict(source_of("audits").on_error).keys() == {
        name.partition(".")[2] for name in OWN if name.startswith("on_error.")
    }


KCLPY = "application: shop\nprocessor: m:C\ncheckpoint: {every: manual}\n"


@pytest.mark.parametrize(
    ("streams", "refused"),
    [
        ("decode: json\nstreams: [{name: a, processor: 'kclpy:p.py'}, {name: b}]", "^decode: is"),
        (
            "streams: [{name: b}, {name: a, processor: 'kclpy:p.py', decode: json}]",
            r"streams\[1\]\.decode: is",
        ),
        ("streams: [{name: a, processor: 'kclpy:p.py'}, {name: b, decode: json}]", None),
    ],
)
def test_records_of_amazon_kclpy_are_decoded_by_its_processor_wherever_decode_is(streams, refused):
    def load() -> Settings:
        return settings_of(KCLPY + streams, environment={}, now=WallTime(1_780_000_000.0))

    if refused is None:
        assert load().sources[1].decode == "json"
    else:
        with pytest.raises(Exception, match=f"{refused} for a RecordProcessor"):
            load()
