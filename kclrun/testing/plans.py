"""What a run of the test kit is made with: the settings of the application, what goes wrong, and
what the lease has at its start. Old keywords of `run_processor` are taken here, with a warning."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypedDict, Unpack

import msgspec

from kclrun.calling.in_memory.life import Mode, Run
from kclrun.codec.values import Decode
from kclrun.config.load import settings_from
from kclrun.config.outputs import named_outputs
from kclrun.config.policies import checkpoint_policy, concurrency_of, error_policy
from kclrun.config.processing import WatermarkSettings
from kclrun.config.schema import Settings, StreamSettings, stream_name
from kclrun.config.yaml_reader import Document, read_yaml
from kclrun.errors import SettingsError
from kclrun.model.output import MAIN_OUTPUT
from kclrun.model.policies import Order, Then
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.testing.traps import known_outputs, warn_at_the_test

SettingsLike = Mapping[str, Any] | str

# What a test leaves out and a run in memory does not need. A call that raises is not repeated: its
# error is the result of the test.
_FILLED: Final[Mapping[str, Any]] = {
    "application": "test",
    "on_error": {"retries": 0},
    "state": {"store": "state"},
}
_PLACES: Final = ("path", "s3", "sql", "dynamodb", "kinesis", "sqs", "sns", "firehose", "use")
_NO_LETTERS: Final = {"dead_letter": {"path": "dead-letters"}}


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong in a run.

    `crash_after` ends the process after so many records (calls, of a `process_record`), when the
    last call has returned and nothing is checkpointed for it. `crash_at_checkpoint=n` ends it in
    the n-th call of `checkpoint()`, before it is written. `seed` says in which order calls return
    that run at the same time (`concurrency`); None: as they do in real time.
    """

    crash_after: int | None = None
    crash_at_checkpoint: int | None = None
    seed: int | None = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What the lease of the shard has when the run claims it.

    Records at or below `position` are dropped. `state` is what `context.state` holds, as key →
    name → value; `after` another run, whose timers and watermark it has. `shard_id` and
    `fencing_token` are those of the context.
    """

    position: ExtendedSequenceNumber = TRIM_HORIZON
    state: Mapping[str, Mapping[str, Any]] | None = None
    after: Run | None = None
    shard_id: str = "shardId-000000000000"
    fencing_token: int = 1


class Replaced(TypedDict, total=False):
    """The keywords that `run_processor` had before 1.0; kclrun 2.0 has them no more."""

    options: Mapping[str, Any] | None
    checkpoint: Mode
    batch_max: int
    uncheckpointed_max: int
    retries: int
    then: Then
    position: ExtendedSequenceNumber
    application: str
    stream: str
    shard_id: str
    fencing_token: int
    crash_after: int | None
    crash_at_checkpoint: int | None
    decode: str | type | Decode | None
    schema: str | Mapping[str, str] | None
    concurrency: int | None
    order: Order
    timeout_s: float | None
    seed: int | None
    state: Mapping[str, Mapping[str, Any]] | None
    after: Run | None
    lateness_s: float
    every_s: float
    idle_s: float | None
    outputs: Iterable[str] | None
    first_arrival_s: float | None


# Each keyword of before, and what a call has instead.
REPLACED: Final[Mapping[str, str]] = {
    "options": "settings={'options': {…}}",
    "checkpoint": "settings={'checkpoint': {'every': …}}",
    "batch_max": "settings={'fetch': {'batch_max': …}}",
    "uncheckpointed_max": "settings={'checkpoint': {'uncheckpointed_max': …}}",
    "retries": "settings={'on_error': {'retries': …}}",
    "then": "settings={'on_error': {'then': …}}",
    "application": "settings={'application': …}",
    "stream": "settings={'stream': …}",
    "decode": "settings={'decode': …}",
    "schema": "settings={'output': {'schema': …}}",
    "outputs": "settings={'outputs': {name: {}, …}}",
    "concurrency": "settings={'concurrency': {'records': …}}",
    "order": "settings={'concurrency': {'order': …}}",
    "timeout_s": "settings={'concurrency': {'timeout': …}}",
    "lateness_s": "settings={'watermark': {'lateness': …}}",
    "every_s": "settings={'watermark': {'every': …}}",
    "idle_s": "settings={'watermark': {'idle': …}}",
    "crash_after": "faults=Faults(crash_after=…)",
    "crash_at_checkpoint": "faults=Faults(crash_at_checkpoint=…)",
    "seed": "faults=Faults(seed=…)",
    "position": "claim=Claim(position=…)",
    "state": "claim=Claim(state=…)",
    "after": "claim=Claim(after=…)",
    "shard_id": "claim=Claim(shard_id=…)",
    "fencing_token": "claim=Claim(fencing_token=…)",
    "first_arrival_s": "make_records(records, first_arrival_s=…)",
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run, resolved: what `run_processor` is called with, whatever its form."""

    options: Mapping[str, Any] | None = None
    checkpoint: Mode = "auto"
    batch_max: int
    uncheckpointed_max: int
    retries: int
    then: Then
    application: str
    stream: str
    decode: str | type | Decode | None = None
    schema: str | Mapping[str, str] | None = None
    outputs: frozenset[str] | None = None
    concurrency: int | None = None
    order: Order = "key"
    timeout_s: float | None = None
    lateness_s: float
    every_s: float
    idle_s: float | None
    crash_after: int | None
    crash_at_checkpoint: int | None
    seed: int | None
    position: ExtendedSequenceNumber
    state: Mapping[str, Mapping[str, Any]] | None
    after: Run | None
    shard_id: str
    fencing_token: int
    end_of_shard: bool
    wall_until: float | None
    first_arrival_s: float | None = None

    def crashing(self, name: str, at: int) -> Plan:
        """The same run with one crash: `name` is a field of `Faults`."""
        return msgspec.structs.replace(self, **{name: at})


def plan_of(
    processor: object,
    *,
    settings: SettingsLike | None = None,
    faults: Faults | None = None,
    claim: Claim | None = None,
    end_of_shard: bool = True,
    wall_until: float | None = None,
    defaults: Mapping[str, Any] | None = None,
    **replaced: Unpack[Replaced],
) -> Plan:
    """The run that these arguments of `run_processor` mean. `defaults` are values of keywords that
    neither the settings nor a keyword of before has.

    Raises: SettingsError, as `kclrun --config`; TypeError for a keyword that there never was.
    """
    _warn_of(replaced)
    tree, objects = _without_objects(settings)
    read = _settings(tree)
    faults, claim = faults or Faults(), claim or Claim()
    plan = Plan(
        **_of_settings(read, _source(read, processor)),
        **{name: getattr(faults, name) for name in faults.__struct_fields__},
        **{name: getattr(claim, name) for name in claim.__struct_fields__},
        end_of_shard=end_of_shard,
        wall_until=wall_until,
    )
    changed: dict[str, Any] = {
        name: value for name, value in (defaults or {}).items() if not _has(tree, name)
    }
    changed |= objects | replaced
    if "outputs" in replaced:
        changed["outputs"] = known_outputs(replaced["outputs"], replaced.get("schema"))
    return msgspec.structs.replace(plan, **changed)


def _warn_of(replaced: Replaced) -> None:
    """Raises: TypeError for a keyword that there never was."""
    for name in replaced:
        if name not in REPLACED:
            raise TypeError(f"run_processor() has no keyword {name!r}")
        warn_at_the_test(
            f"run_processor({name}=…) is from before kclrun 1.0, and goes in 2.0: write"
            f" {REPLACED[name]}",
            DeprecationWarning,
        )


# Where the settings have what may be left out, by the name in a plan.
_SETTINGS: Final = {"checkpoint": ("checkpoint", "every"), "batch_max": ("fetch", "batch_max")}


def _has(given: SettingsLike | None, name: str) -> bool:
    """Whether the settings of the test have this value themselves."""
    section, setting = _SETTINGS[name]
    inside = (_read(given).value or {}).get(section)
    return isinstance(inside, Mapping) and setting in inside


def _without_objects(
    settings: SettingsLike | None,
) -> tuple[SettingsLike | None, dict[str, Any]]:
    """The settings as YAML may have them, and apart from them what only a test has: a type or a
    function as `decode`, and objects among the `options`."""
    if not isinstance(settings, Mapping):
        return settings, {}
    objects = {}
    decode, options = settings.get("decode"), settings.get("options")
    if decode is not None and not isinstance(decode, str):
        objects["decode"] = decode
    if options is not None and not _is_plain(options):
        objects["options"] = options
    return {name: value for name, value in settings.items() if name not in objects}, objects


def _is_plain(options: object) -> bool:
    try:
        msgspec.msgpack.encode(options)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _settings(given: SettingsLike | None) -> Settings:
    document = _read(given)
    if not isinstance(document.value, dict):
        raise SettingsError("settings: expected settings, such as `checkpoint: {every: batch}`")
    return settings_from(
        _filled(document.value),
        environment=os.environ,
        now=WallTime(time.time()),
        name="settings",
        lines=dict(document.lines),
    )


def _read(given: Mapping[str, Any] | str | None) -> Document:
    """Raises: SettingsError for a text that is not YAML."""
    if isinstance(given, str):
        return read_yaml(given)
    return Document(dict(given or {}), {})


def _filled(tree: dict[str, Any]) -> dict[str, Any]:
    filled = _merged(_FILLED, tree)
    on_error = filled["on_error"]
    if isinstance(on_error, Mapping) and on_error.get("then") == "dead-letter":
        filled["on_error"] = {**_NO_LETTERS, **on_error}
    if not tree.get("streams"):
        filled.setdefault("stream", "test")
    for name, output in tree.get("outputs", {}).items():
        filled["outputs"] = filled["outputs"] | {name: _placed(output, name)}
    if isinstance(tree.get("output"), Mapping):
        filled["output"] = _placed(tree["output"], MAIN_OUTPUT)
    return filled


def _placed(output: Any, name: str) -> Any:
    """The output with a destination: what counts for a test is its name, and the schema of its
    rows."""
    if not isinstance(output, Mapping) or any(name in output for name in _PLACES):
        return output
    return {"path": f"rows/{name}", "roll": {}, **output}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        is_deeper = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(merged[name], value) if is_deeper else value
    return merged


def _source(settings: Settings, processor: object) -> StreamSettings:
    """The stream of the processor: the one that names its class, else the first."""
    kind = processor if isinstance(processor, type) else type(processor)
    named = [
        source
        for source in settings.sources
        if source.processor is not None and source.processor.endswith(f":{kind.__name__}")
    ]
    return (named or settings.sources)[0]


def _of_settings(settings: Settings, source: StreamSettings) -> dict[str, Any]:
    policy = error_policy(settings.on_error_of(source))
    checkpoint = checkpoint_policy(settings)
    concurrency = concurrency_of(source.concurrency, settings)
    watermark = settings.watermark or WatermarkSettings()
    named = dict(named_outputs(settings))
    return {
        "options": source.options,
        "checkpoint": checkpoint.mode,
        "batch_max": settings.fetch.batch_max,
        "uncheckpointed_max": checkpoint.uncheckpointed_max,
        "retries": policy.retries,
        "then": policy.then,
        "application": settings.application,
        "stream": stream_name(source.name),
        "decode": source.decode,
        "schema": {name: output.schema for name, output in named.items() if output.schema},
        "outputs": frozenset(named) if named else None,
        "concurrency": None if concurrency is None else concurrency.records,
        "order": "key" if concurrency is None else concurrency.order,
        "timeout_s": None if concurrency is None else concurrency.timeout_s,
        "lateness_s": float(watermark.lateness),
        "every_s": float(watermark.every),
        "idle_s": None if watermark.idle is None else float(watermark.idle),
    }
