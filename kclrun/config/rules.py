"""Rules between settings, and bounds that types cannot express.

Pure: `now` is an argument. Each rule yields its problems; `load.py` reports them all together. A
setting that would mislead with the chosen `engine:` is refused. A setting that merely has no effect
there is named at the start (`unused_settings`), so that one file serves both engines.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from kclrun.config.changes import change_rules
from kclrun.config.convert import Problem
from kclrun.config.destinations import OutputSettings
from kclrun.config.embedded import EmbeddedSettings
from kclrun.config.log import log_rules
from kclrun.config.observing import ObserveSettings
from kclrun.config.outputs import (
    URL,
    named_outputs,
    output_rules,
    schema_rule,
    sent_of_outputs,
    spark_output_rules,
    unused_output_settings,
)
from kclrun.config.schema import (
    Settings,
    StartAtLeases,
    StreamErrorSettings,
    stream_name,
)
from kclrun.config.state import spark_state_rules, state_rules
from kclrun.config.tables import table_rules
from kclrun.config.units import parse_listen, parse_start
from kclrun.errors import SettingsError
from kclrun.model.lease import FAILOVER_MAX_S, FAILOVER_MIN_S
from kclrun.model.names import nearest
from kclrun.model.output import setting_of
from kclrun.model.quotas import NAME_CHARACTERS_MAX, SHARD_READ_PAUSE_S
from kclrun.model.stream import is_aws_region, is_loopback, why_no_endpoint
from kclrun.model.time import WallTime


def missing_stream(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """The problem that no stream is named, found in the plain values together with all others."""
    if tree.get("stream") is None and not tree.get("streams"):
        yield Problem(
            ("stream",),
            "is missing; a text that is a stream's name or ARN; several go to `streams:`",
        )


def stream_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of one stream or several."""
    if not settings.streams:
        return
    if settings.stream is not None:
        yield Problem(
            ("streams",), "and stream exclude each other: name every stream under streams"
        )
    if settings.engine == "spark":
        yield Problem(
            ("streams",),
            "is for engine: fleet; with engine: spark a file has one stream: give each a file of"
            " its own, with stream:",
        )
    if settings.pipeline is not None:
        return
    seen: dict[str, int] = {}
    for index, stream in enumerate(settings.streams):
        # People, logs and output folders know a stream by its name. So the same name in another
        # account is refused, too, although its leases would be distinct.
        first = seen.setdefault(stream_name(stream.name), index)
        if first != index:
            yield Problem(
                ("streams", index, "name"),
                f"is named twice: streams[{first}] has that name already",
            )
        if stream.processor is None and settings.processor is None:
            yield Problem(
                ("streams", index, "processor"),
                "is missing, and there is no processor for all streams",
            )


_OWN_DIMENSIONS: Final = frozenset({"Application", "Shard"})
_DIMENSIONS_MAX: Final = 30 - len(_OWN_DIMENSIONS)
_NAME_CHARACTERS_MAX: Final = 255
_VALUE_CHARACTERS_MAX: Final = 1024
# A window holds some pages at least; a key is forgotten after two windows.
_HOT_WINDOW_MIN_S: Final = 2.0
_HOT_WINDOW_MAX_S: Final = 3600.0


def observe_rules(observe: ObserveSettings) -> Iterator[Problem]:
    """The problems of these settings."""
    for name in ("listen", "page"):
        if (place := getattr(observe, name)) is not None:
            try:
                parse_listen(place)
            except ValueError as error:
                yield Problem(("observe", name), str(error))
    for text in observe.members:
        try:
            ipaddress.ip_network(text)
        except ValueError:
            yield Problem(("observe", "members"), "expected networks like 100.64.0.0/10")
    if observe.hot_window and not _HOT_WINDOW_MIN_S <= observe.hot_window <= _HOT_WINDOW_MAX_S:
        yield Problem(("observe", "hot_window"), "expected 2s to 1h, or 0s to measure nothing")
    if observe.cloudwatch is not None:
        yield from _dimensions(observe.cloudwatch.dimensions)


def _dimensions(dimensions: Mapping[str, str]) -> Iterator[Problem]:
    path = ("observe", "cloudwatch", "dimensions")
    if len(dimensions) > _DIMENSIONS_MAX:
        yield Problem(path, f"expected at most {_DIMENSIONS_MAX}: CloudWatch takes no more")
    for name, value in dimensions.items():
        if name in _OWN_DIMENSIONS:
            yield Problem((*path, name), "is set by kclrun; choose another name")
        elif name.startswith(":") or not _is_text(name, _NAME_CHARACTERS_MAX):
            yield Problem(
                (*path, name), "is not the name of a dimension: plain text, no colon in front"
            )
        elif not _is_text(value, _VALUE_CHARACTERS_MAX):
            yield Problem((*path, name), "expected a value of plain text that is not empty")


def _is_text(text: str, characters_max: int) -> bool:
    is_plain = text.isascii() and text.isprintable()
    return bool(text.strip()) and is_plain and len(text) <= characters_max


_KCLPY: Final = "kclpy:"


def processor_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of a processor that a program runs on Spark: of user code, failures, letters and
    rows. The query itself is the program's."""
    yield from _folders(settings)
    yield from _dead_letters(settings)
    yield from kclpy_rules(settings)
    yield from concurrency_rules(settings)
    if settings.output is not None:
        yield from schema_rule(("output",), settings.output)


def kclpy_rules(settings: Settings) -> Iterator[Problem]:
    """Such a processor checkpoints by itself and may hold records back until it does. If a runtime
    checkpointed beside it, a crash would lose those records."""
    named = (settings.processor, *(stream.processor for stream in settings.streams))
    if not any(processor is not None and processor.startswith(_KCLPY) for processor in named):
        return
    if settings.engine == "spark":
        yield Problem(
            ("processor",),
            "kclpy: is for engine: fleet: a processor of amazon_kclpy checkpoints by itself, and"
            " Spark commits whole batches",
        )
        return
    for path in _decodes_for_kclpy(settings):
        yield Problem(
            path, "is for a RecordProcessor; one of amazon_kclpy decodes its records itself"
        )
    if settings.leases.per_process > 1:
        yield Problem(
            ("leases", "per_process"),
            "is 1 for a processor of amazon_kclpy, which is written for a process of its own",
        )
    if settings.checkpoint.every != "manual":
        yield Problem(
            ("checkpoint", "every"),
            "is manual for a processor of amazon_kclpy, which checkpoints by itself; write"
            " checkpoint: {every: manual, uncheckpointed_max: 10000000}",
        )


def _decodes_for_kclpy(settings: Settings) -> Iterable[tuple[str | int, ...]]:
    """The places of each `decode` that is for a processor of amazon_kclpy."""
    if not settings.streams:
        return [("decode",)] if settings.decode is not None else []
    found: dict[tuple[str | int, ...], None] = {}
    for index, source in enumerate(settings.sources):
        if (source.processor or "").startswith(_KCLPY) and source.decode is not None:
            is_own = settings.streams[index].decode is not None
            found[("streams", index, "decode") if is_own else ("decode",)] = None
    return found


def concurrency_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of records at the same time, as far as the file shows them."""
    own = [
        (("streams", index, "concurrency"), stream.concurrency)
        for index, stream in enumerate(settings.streams)
    ]
    for path, concurrency in ((("concurrency",), settings.concurrency), *own):
        if concurrency is None:
            continue
        if settings.pipeline is not None:
            yield Problem(path, "is for a processor; Spark runs a pipeline's DataFrame")
        elif settings.leases.per_process > 1:
            yield Problem(
                path,
                "and leases.per_process exclude each other: leases that share a process take turns",
            )
        if concurrency.timeout is not None and concurrency.timeout <= 0:
            yield Problem((*path, "timeout"), "expected more than 0s; left out, there is none")


EMBEDDED: Final = "embedded"


def refuse_embedded(settings: Settings, how_to_use: str) -> None:
    """Raises: SettingsError for the embedded AWS, which only a run has. `how_to_use` is how the
    address of a lasting one is given."""
    if settings.aws.endpoint == EMBEDDED:
        raise SettingsError(
            "aws.endpoint: embedded is an AWS that lives only while `kclrun run` does\n"
            "To keep one:  kclrun local --port 4567\n"
            f"and use it:   {how_to_use}"
        )


# The output formats of Spark that write files and therefore need a folder.
_FILE_FORMATS: Final = frozenset({"avro", "csv", "json", "orc", "parquet", "text", "xml"})
# The formats that take a processor's rows as they are.
_UNTYPED: Final = frozenset({None, "console", "json", "memory", "noop", "text"})
# Options that the runner sets from other places of the file: one fact, one place.
_SET_ELSEWHERE: Final[Mapping[str, str]] = {
    "streamname": "stream",
    "streamarn": "stream",
    "region": "aws.region",
    "endpointurl": "aws.endpoint",
    "rolearn": "aws.role_arn",
    "startingoffsets": "start",
    "startingposition": "start",
    "initialposition": "start",
    "startingtimestamp": "start",
    "startingleases": "start",
    "startingleasesendpointurl": "aws.endpoints.dynamodb",
    "pollinterval": "fetch.idle",
    "consumermode": "fetch.mode",
    "consumername": "fetch.consumer",
}


def engine_rules(settings: Settings) -> Iterator[Problem]:
    """The problems between the engine and the rest."""
    if settings.engine == "fleet":
        yield from _fleet(settings)
    else:
        yield from _spark(settings)


def unused_settings(settings: Settings) -> tuple[str, ...]:
    """The settings that were set and have no effect with this engine."""
    plain = Settings(application=settings.application)
    if settings.engine == "fleet":
        return () if settings.spark == plain.spark else ("spark",)
    sections = ("instance", "leases", "observe", "stall")
    changed = [name for name in sections if getattr(settings, name) != getattr(plain, name)]
    if settings.checkpoint.every not in {None, "batch"}:
        changed.append("checkpoint.every")
    if settings.output is not None:
        changed += unused_output_settings(settings.output)
    return tuple(sorted(changed))


def _fleet(settings: Settings) -> Iterator[Problem]:
    if isinstance(settings.start, StartAtLeases):
        yield Problem(
            ("start",),
            "leases is for engine: spark; the fleet goes on from its own lease table by itself",
        )
    if settings.pipeline is not None:
        yield Problem(("pipeline",), "is for engine: spark; the fleet runs a processor")
    yield from _sent_at_each_start(settings)
    yield from _dead_letters(settings)
    yield from output_rules(settings)
    yield from state_rules(settings)


# A start command has at most 64 KiB (`ipc/channel.py`). A quarter of it is left to its names,
# addresses, credentials, paths and the keys of a replay, which take a few.
_SENT_BYTES_MAX: Final = 48 * 1024


def _sent_at_each_start(settings: Settings) -> Iterator[Problem]:
    """The options, and the columns and options of the outputs, which may be large."""
    outputs_bytes, outputs_words = sent_of_outputs(settings)
    for index, source in enumerate(settings.sources):
        path = ("streams", index, "options") if settings.streams else ("options",)
        try:
            size = len(msgspec.msgpack.encode(source.options))
        except UnicodeEncodeError:
            yield Problem(path, "a text in it is not Unicode, and cannot be sent")
            continue
        if size > _SENT_BYTES_MAX:
            yield Problem(
                path,
                f"{size:,} bytes, at most {_SENT_BYTES_MAX:,}: each start of a lease process"
                " sends them. Put large values in a file, and give its path",
            )
        elif size + outputs_bytes > _SENT_BYTES_MAX:
            yield Problem(
                ("outputs",) if settings.outputs else ("output",),
                f"{outputs_bytes:,} bytes of {outputs_words} and {size:,} bytes of `options`, at"
                f" most {_SENT_BYTES_MAX:,} together: each start of a lease process sends them",
            )


def _dead_letters(settings: Settings) -> Iterator[Problem]:
    on_error = settings.on_error
    place, where = on_error.dead_letter, ("on_error", "dead_letter")
    named = [name for name in ("path", "sqs", "stream") if getattr(place, name) is not None]
    named = named or (["s3"] if place.s3 is not None else [])
    if on_error.then == "dead-letter" and not named:
        yield Problem(
            where, "is missing: `then: dead-letter` needs a place; path, s3, sqs or stream"
        )
    elif on_error.then != "dead-letter" and named:
        yield Problem((*where, named[0]), f"has no meaning with `then: {on_error.then}`")
    elif len(named) > 1 or (place.path is not None and place.s3 is not None):
        other = named[1] if len(named) > 1 else "s3"
        yield Problem((*where, other), f"and {named[0]} exclude each other: name one of them")
    elif place.path is not None and (scheme := URL.match(place.path)) is not None:
        yield Problem(
            (*where, "path"), f"expected a folder of this machine, not a URL ({scheme[0]}…)"
        )
    elif place.stream is not None and stream_name(place.stream) in {
        stream_name(source.name) for source in settings.sources
    }:
        yield Problem(
            (*where, "stream"), "is read by this application: it would fail at its own dead letters"
        )


def _errors_of_streams(settings: Settings) -> Iterator[Problem]:
    for index, stream in enumerate(settings.streams):
        own, where = stream.on_error, ("streams", index, "on_error")
        if settings.engine == "spark" and own != StreamErrorSettings():
            yield Problem(where, "is for engine: fleet; set the application's on_error")
        elif own.then == "dead-letter" and settings.on_error.then != "dead-letter":
            yield Problem(
                (*where, "then"),
                "needs the application's place: set on_error.then: dead-letter with its"
                " dead_letter, and `then: halt` on the streams that keep none",
            )


def _spark(settings: Settings) -> Iterator[Problem]:
    if settings.on_error.then != "halt" and settings.processor is None:
        yield Problem(
            ("on_error", "then"),
            f"{settings.on_error.then} is for a processor; a record that fails in a pipeline is"
            " Spark's matter",
        )
    else:
        yield from _dead_letters(settings)
    if settings.processor is not None and settings.pipeline is not None:
        yield Problem(("pipeline",), "and processor exclude each other: name one of them")
    if settings.checkpoint.every == "manual":
        yield Problem(
            ("checkpoint", "every"),
            "manual has no meaning with engine: spark: Spark commits whole batches, and what the"
            " processor did not checkpoint would not be read again",
        )
    if settings.decode is not None and settings.pipeline is not None:
        yield Problem(("decode",), "is for a processor; a pipeline decodes the column `data`")
    if settings.environment.only is not None:
        yield Problem(
            ("environment", "only"),
            "is for engine: fleet; Spark's Python workers have the environment that Spark gives"
            " them",
        )
    if settings.fetch.kpl_range == "drop":
        yield Problem(("fetch", "kpl_range"), "drop is for engine: fleet; on Spark all are kept")
    yield from _checkpoint(settings)
    yield from _source(settings)
    yield from _output(settings)


def _checkpoint(settings: Settings) -> Iterator[Problem]:
    checkpoint = settings.spark.checkpoint
    is_embedded = settings.aws.endpoint == EMBEDDED
    if is_embedded and checkpoint is not None:
        yield Problem(
            ("spark", "checkpoint"),
            "is made by each run with aws.endpoint: embedded, whose stream is new each time;"
            " remove it",
        )
    elif not is_embedded and not checkpoint:
        yield Problem(
            ("spark", "checkpoint"),
            "is missing: the place where Spark keeps how far the query is, such as"
            " /var/lib/orders/checkpoint or s3a://bucket/orders",
        )


def _source(settings: Settings) -> Iterator[Problem]:
    for name in settings.spark.source:
        elsewhere = _SET_ELSEWHERE.get(name.lower())
        if elsewhere is not None:
            yield Problem(("spark", "source", name), f"is set by {elsewhere}; remove it here")


def _output(settings: Settings) -> Iterator[Problem]:
    yield from spark_output_rules(settings)
    yield from spark_state_rules(settings)
    output = settings.output
    if output is None:
        return
    if output.path is None and output.format in {None, *_FILE_FORMATS}:
        yield Problem(("output", "path"), "is missing; a text")
    if output.schema is not None and settings.pipeline is not None:
        yield Problem(
            ("output", "schema"), "is for a processor's rows; a pipeline's DataFrame has its own"
        )
    if settings.processor is not None:
        yield from schema_rule(("output",), output)
        yield from _emitted(output)


def _emitted(output: OutputSettings) -> Iterator[Problem]:
    if output.schema is None and output.format not in _UNTYPED:
        yield Problem(
            ("output", "schema"),
            "is missing: emitted rows are JSON, and this format has typed columns; name them, such"
            " as `carrier string, flights long`",
        )
    if output.mode != "append":
        yield Problem(("output", "mode"), "is append for a processor: emitted rows are final")


def value_rules(settings: Settings, now: WallTime) -> Iterator[Problem]:
    """The problems of settings that each have the right type, each by itself.

    Reported together with settings of a wrong type, which have their defaults here.
    """
    yield from _starts(settings, now)
    yield from _addresses(settings)
    yield from _folders(settings)
    yield from _durations(settings)
    yield from observe_rules(settings.observe)
    yield from log_rules(settings.log)


def relation_rules(settings: Settings) -> Iterator[Problem]:
    """The problems between settings that are each right."""
    yield from stream_rules(settings)
    yield from change_rules(settings)
    yield from table_rules(settings)
    yield from engine_rules(settings)
    yield from kclpy_rules(settings)
    yield from concurrency_rules(settings)
    yield from _errors_of_streams(settings)
    if settings.stall <= settings.leases.failover:
        yield Problem(("stall",), "expected more than leases.failover: a move takes that long")
    yield from _embedded(settings)
    yield from _summary(settings)
    yield from _hooks(settings)


def _starts(settings: Settings, now: WallTime) -> Iterator[Problem]:
    starts: dict[tuple[str | int, ...], object] = {("start",): settings.start}
    starts |= {("streams", at, "start"): stream.start for at, stream in enumerate(settings.streams)}
    for path, start in starts.items():
        if isinstance(start, str):
            try:
                parse_start(start, now)
            except SettingsError as error:
                yield Problem(path, str(error).removeprefix("start: "))


def _summary(settings: Settings) -> Iterator[Problem]:
    path = settings.output.path if settings.output is not None else None
    if settings.summary is not None and (path is None or "://" in path):
        yield Problem(("summary",), "needs output.path: it is called with that folder")


# What botocore takes for a region. Its own error would not name the line of the file.
_REGION: Final = re.compile(r"(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def _addresses(settings: Settings) -> Iterator[Problem]:
    region, endpoint = settings.aws.region, settings.aws.endpoint
    is_aws = endpoint is None and not settings.aws.endpoints
    if region is not None and not _REGION.fullmatch(region):
        yield Problem(("aws", "region"), "expected a region such as eu-west-1")
    elif region is not None and is_aws and not is_aws_region(region):
        yield Problem(
            ("aws", "region"),
            "is not a region of AWS: expected one such as eu-west-1. A service elsewhere has its"
            " URL in aws.endpoint",
        )
    role_arn = settings.aws.role_arn
    if role_arn is not None and not role_arn.startswith("arn:"):
        yield Problem(("aws", "role_arn"), "expected arn:aws:iam::<account>:role/<name>")
    if endpoint is not None and endpoint != EMBEDDED:
        wrong = why_no_endpoint(endpoint)
        if wrong:
            meant = f"; did you mean {EMBEDDED}?" if nearest(endpoint, [EMBEDDED]) else ""
            yield Problem(("aws", "endpoint"), f"expected {EMBEDDED} or a URL: {wrong}{meant}")
    for service, url in settings.aws.endpoints.items():
        wrong = why_no_endpoint(url)
        if wrong:
            yield Problem(("aws", "endpoints", service), f"expected a URL: {wrong}")


def _folders(settings: Settings) -> Iterator[Problem]:
    """Texts that no file system takes as a path. An empty one would be the current folder."""
    folders: dict[tuple[str, ...], str | None] = {
        (*setting_of(name).split("."), "path"): output.path
        for name, output in named_outputs(settings)
    }
    folders["on_error", "dead_letter", "path"] = settings.on_error.dead_letter.path
    if settings.state is not None:
        folders["state", "local"] = settings.state.local
    for path, folder in folders.items():
        if folder is not None and not (folder and _is_encodable(folder)):
            yield Problem(path, "expected a folder: a text that is not empty, without NUL")


def _is_encodable(path: str) -> bool:
    try:
        # A name that is not UTF-8 comes from the environment with halves of surrogate pairs.
        return b"\0" not in path.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False


def _durations(settings: Settings) -> Iterator[Problem]:
    failover = settings.leases.failover
    if not FAILOVER_MIN_S <= failover <= FAILOVER_MAX_S:
        yield Problem(("leases", "failover"), "expected 1s to 15m")
    for name in ("idle", "every"):
        if getattr(settings.fetch, name) < SHARD_READ_PAUSE_S:
            yield Problem(
                ("fetch", name), "expected 200ms or more: the service allows 5 reads a second"
            )
    if settings.fetch.buffer <= 0:
        yield Problem(("fetch", "buffer"), "expected more than nothing, such as 16MiB")
    if (
        settings.fetch.mode == "fan-out"
        and settings.fetch.consumer is None
        and len(settings.application) > NAME_CHARACTERS_MAX
    ):
        yield Problem(
            ("fetch", "consumer"),
            f"is needed: the application's name has more than {NAME_CHARACTERS_MAX} characters,"
            " the most of a consumer's name",
        )
    every = settings.checkpoint.every
    if every is not None and not isinstance(every, str) and every <= 0:
        yield Problem(("checkpoint", "every"), "expected more than 0s; `batch` is after each batch")


def _hooks(settings: Settings) -> Iterator[Problem]:
    instance = settings.instance
    hooks = {instance.launch_hook, instance.termination_hook}
    if None not in hooks and len(hooks) == 1:
        yield Problem(
            ("instance", "termination_hook"), "is the launch hook: a hook is for one of the two"
        )


def _embedded(settings: Settings) -> Iterator[Problem]:
    embedded = settings.embedded
    if embedded is None:
        return
    endpoint = settings.aws.endpoint
    # With an emulator on this host instead, as by --set, the file may stay as it is.
    if endpoint != EMBEDDED and not is_loopback(endpoint):
        yield Problem(("embedded",), "is for aws.endpoint: embedded; remove it, or set that")
    yield from _resharding(embedded)


def _resharding(embedded: EmbeddedSettings) -> Iterator[Problem]:
    path = ("embedded", "reshard")
    if embedded.reshard and embedded.fill is None:
        yield Problem(path, "needs embedded.fill: it happens after shares of the fill")
    after = [step.after for step in embedded.reshard]
    if after != sorted(after):
        yield Problem(path, "expected the steps in the order of `after`")
    for index, step in enumerate(embedded.reshard):
        chosen = [which for which in (step.split, step.merge) if which is not None]
        if len(chosen) != 1:
            yield Problem((*path, index), "expected one of split and merge")
        elif chosen[0] < 0:
            yield Problem((*path, index), "shards are counted from 0")
