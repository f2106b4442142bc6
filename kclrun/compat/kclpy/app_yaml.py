"""An `app.yaml` from the properties of the MultiLangDaemon, with comments for differences.

Pure: the caller has found the script. The application that it describes reads the same stream from
the same checkpoints; properties that mean another stream or other checkpoints are refused. A value
that cannot keep its meaning is an error that names the property, unless it can be left out.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from kclrun.compat.kclpy.property_table import by_name
from kclrun.config.load import settings_of
from kclrun.config.units import Duration
from kclrun.config.yaml_reader import read_yaml
from kclrun.errors import SettingsError
from kclrun.model.lease import FAILOVER_MAX_S, FAILOVER_MIN_S
from kclrun.model.quotas import SHARD_READ_PAUSE_S
from kclrun.model.stream import why_no_endpoint
from kclrun.model.time import WallTime

# The width of the project's other files.
_WIDTH: Final = 100
# The KCL does not limit the number of records without a checkpoint, and its sample application
# checkpoints once a minute: at the rates of one lease, some 100,000 small records a second at
# the most, that is 6 million.
_UNCHECKPOINTED_MAX: Final = 10_000_000
# Texts that YAML reads as themselves, except for numbers, switches and the like.
_PLAIN: Final = re.compile(r"[A-Za-z0-9/_][A-Za-z0-9_./:+@-]*")
_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]")
# The order in which people read such a file.
_ORDER: Final = (
    "application",
    "stream",
    "processor",
    "path",
    "options",
    "start",
    "aws",
    "leases",
    "fetch",
    "checkpoint",
    "on_error",
    "stall",
    "shutdown",
    "observe",
)


class Script(msgspec.Struct, frozen=True):
    """The script that `executableName` runs: its name, the folder for `path:` if the script is not
    beside the file, its arguments. Without a name, `remark` is the reason."""

    name: str | None
    folder: str | None = None
    arguments: tuple[str, ...] = ()
    remark: str = ""


class SettingEntry(msgspec.Struct, frozen=True):
    """One setting as it will be in the file, with the comment above it."""

    setting: str
    value: Any
    comment: str = ""


def app_yaml(properties: Mapping[str, str], script: Script, source: str, now: WallTime) -> str:
    """The file's text. `source` is the name of the properties file; `now` validates its instant.

    Guaranteed: its settings are accepted. Raises: SettingsError where a property is missing or
    invalid, or where the application would read another stream or other checkpoints.
    """
    known = {name.lower(): value.strip() for name, value in properties.items() if value.strip()}
    entries = [*_processor(script), *_checkpoint()]
    try:
        entries += [SettingEntry(*fields) for fields in convert(known)]
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from None
    lines = [
        f"# From {source}, by kclrun migrate kclpy. Check it:  kclrun check --config app.yaml",
        '# What is different:  the page "Come from amazon_kclpy" of the documentation',
        "",
    ]
    lines += _sections(entries, script)
    lines += _remarks(properties)
    text = "\n".join(lines) + "\n"
    try:
        settings_of(text, environment={}, now=now, name="app.yaml")
    except SettingsError as error:
        raise SettingsError(
            f"{source} makes no app.yaml that would be accepted:\n{error}"
        ) from None
    return text


def _processor(script: Script) -> Iterator[SettingEntry]:
    if script.name is None:
        return
    comment = "what the script gives to KCLProcess; its class can be named: kclpy:module:Class"
    if script.remark:
        comment = f"{script.remark} {comment}"
    yield SettingEntry("processor", f"kclpy:{script.name}", comment)
    if script.folder is not None:
        yield SettingEntry("path", script.folder, "the folder that holds the script")
    if script.arguments:
        yield SettingEntry(
            "options.arguments", list(script.arguments), "what the script finds in sys.argv"
        )


def _checkpoint() -> Iterator[SettingEntry]:
    yield SettingEntry(
        "checkpoint.every", "manual", "the processor checkpoints by itself, as before"
    )
    yield SettingEntry(
        "checkpoint.uncheckpointed_max",
        _UNCHECKPOINTED_MAX,
        "the KCL has no such bound; a processor that never checkpoints is halted here",
    )


def _sections(entries: Sequence[SettingEntry], script: Script) -> Iterator[str]:
    tree: dict[str, Any] = {}
    for entry in entries:
        *above, last = entry.setting.split(".")
        level = tree
        for step in above:
            level = level.setdefault(step, {})
        level[last] = entry
    for section in _ORDER:
        if section == "processor" and script.name is None:
            yield from _comment(f"{script.remark} Name the script, or the class in it:", "")
            yield "# processor: kclpy:script.py"
        elif section in tree:
            yield from _entry_lines(section, tree[section], "")


def _entry_lines(name: str, entry: Any, indent: str) -> Iterator[str]:
    if isinstance(entry, SettingEntry):
        yield from _comment(entry.comment, indent)
        yield f"{indent}{name}: {_value(entry.value)}"
        return
    yield f"{indent}{name}:"
    for below, inner in entry.items():
        yield from _entry_lines(below, inner, f"{indent}  ")


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(
        _shown(text), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )


def _shown(text: str) -> str:
    """The characters that YAML allows in a comment, on one line."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _value(value: Any) -> str:
    """The value in YAML: a text without quotes if YAML would read it as that text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return f"[{', '.join(_quoted(item) for item in value)}]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and read_yaml(f"x: {value}").value == {"x": value}
        return value if is_plain else _quoted(value)
    return str(value)


def _quoted(text: str) -> str:
    """In ASCII, and with `${` as literal text."""
    quoted = json.dumps(text.replace("${", "$${"), ensure_ascii=False)
    return _NOT_ASCII.sub(lambda match: f"\\U{ord(match[0]):08x}", quoted)


def _remarks(properties: Mapping[str, str]) -> Iterator[str]:
    """The properties without a counterpart. Their values are left out: one may be a secret."""
    without = [
        f"{name}: {by_name()[name.lower()].note}"
        for name in properties
        if name.lower() in by_name() and not by_name()[name.lower()].setting
    ]
    unknown = [name for name in properties if name.lower() not in by_name()]
    if without:
        yield ""
        yield "# These properties have no counterpart:"
        for remark in without:
            yield from textwrap.wrap(
                remark, _WIDTH, initial_indent="#   ", subsequent_indent="#     "
            )
    if unknown:
        yield ""
        yield "# These are unknown, to the KCL as well as here, and were left out:"
        for name in unknown:
            yield f"#   {_shown(name)[:_WIDTH] or '(a nameless one)'}"


Converted = tuple[str, Any, str]  # setting, value, comment
Known = Mapping[str, str]

# The limits of `leases.max` and `fetch.batch_max`.
_LEASES_MAX: Final = 1024
_BATCH_MAX: Final = 100_000
# Until 9999: the greatest year of a datetime.
_EPOCH_MAX_S: Final = 253_402_300_799
_REGION_OF_ARN: Final = re.compile(r"arn:[a-z0-9-]+:kinesis:([a-z0-9-]+):")
_ROLE: Final = re.compile(r"arn:[a-z0-9-]+:iam::\d{12}:role/[\w+=,.@/-]+")
# The texts that the daemon's own conversion (Commons BeanUtils) accepts as a switch.
_SWITCH: Final = dict.fromkeys(("true", "yes", "y", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "n", "off", "0"), False
)
# The daemon's default without a regionName and without an ARN.
_REGION: Final = "us-east-1"


def convert(known: Known) -> Iterator[Converted]:
    """The settings of these properties, and those that the daemon's defaults make necessary.

    Raises: SettingsError.
    """
    if "applicationname" not in known:
        raise SettingsError("applicationName is missing")
    yield "application", known["applicationname"], "names the lease table, as before"
    if "tablename" in known:
        yield "leases.table", known["tablename"], ""
    yield from _stream(known)
    yield from _start(known)
    yield from _aws(known)
    yield from _leases(known)
    yield from _fetch(known)
    yield from _patience(known)
    yield from _metrics(known)


def _stream(known: Known) -> Iterator[Converted]:
    if "streamarn" in known:
        beside = known.get("streamname")
        yield "stream", known["streamarn"], _remark("streamArn") if beside else ""
    elif "streamname" in known:
        yield "stream", known["streamname"], ""
    else:
        raise SettingsError("streamName is missing, and streamArn, too")


def _start(known: Known) -> Iterator[Converted]:
    seconds = _number(known, "initialPositionInStreamExtended")
    for_new = "for shards without a lease; checkpoints in the table go on"
    if seconds is not None:
        if not 0 <= seconds <= _EPOCH_MAX_S:
            raise SettingsError("initialPositionInStreamExtended: expected seconds since 1970")
        instant = datetime.fromtimestamp(seconds, UTC)
        yield "start", instant.strftime("%Y-%m-%dT%H:%M:%SZ"), for_new
        return
    position = known.get("initialpositioninstream", "LATEST").upper()
    if position not in {"LATEST", "TRIM_HORIZON"}:
        raise SettingsError(
            f"initialPositionInStream: expected LATEST or TRIM_HORIZON, got {position[:40]!r};"
            " an instant stands in initialPositionInStreamExtended"
        )
    is_set = "initialpositioninstream" in known
    yield "start", position, for_new if is_set else f"the default of the KCL, {for_new}"


def _aws(known: Known) -> Iterator[Converted]:
    of_arn = _REGION_OF_ARN.match(known.get("streamarn", ""))
    region = known.get("regionname") or (of_arn[1] if of_arn else _REGION)
    comment = ""
    if "regionname" not in known and of_arn is None:
        comment = "the default of amazon_kclpy"
    elif of_arn is not None and of_arn[1] != region:
        comment = f"the stream's ARN has {of_arn[1]}: one of the two is wrong, for the KCL as well"
    yield "aws.region", region, comment
    of_table = known.get("dynamodbregionname", region)
    if of_table != region:
        raise SettingsError(
            f"dynamoDBRegionName: the lease table is in {of_table[:40]} and the stream in"
            f" {region[:40]}; kclrun has one region for both, and would begin an empty table there"
        )
    for name, setting in (("kinesisEndpoint", "kinesis"), ("dynamoDBEndpoint", "dynamodb")):
        url = known.get(name.lower())
        if url is not None:
            wrong = why_no_endpoint(url)
            if wrong:
                raise SettingsError(f"{name}: expected an https URL: {wrong}")
            yield f"aws.endpoints.{setting}", url, ""
    yield from _credentials(known.get("awscredentialsprovider", ""))


def _credentials(provider: str) -> Iterator[Converted]:
    """`Provider|argument|argument`; several are separated by commas, and the first that answers
    counts. Only a role's ARN and a profile's name are carried over."""
    first, *others = provider.split(",")
    kind, *arguments = first.split("|")
    role = next((argument for argument in arguments if _ROLE.fullmatch(argument)), None)
    beside = "; the other providers are left to the usual chain" if others else ""
    if role is not None:
        external = any(argument.startswith("externalId=") for argument in arguments)
        comment = "of the credentials provider" + beside
        if external:
            comment += (
                "; its externalId has no setting: write role_arn and external_id into a profile,"
                " and name that as aws.profile instead"
            )
        yield "aws.role_arn", role, comment
    elif "Profile" in kind and arguments:
        yield "aws.profile", arguments[0], "of the credentials provider" + beside


def _leases(known: Known) -> Iterator[Converted]:
    failover_ms = _number(known, "failoverTimeMillis")
    if failover_ms is not None:
        wanted_s = failover_ms / 1000
        allowed_s = min(max(wanted_s, FAILOVER_MIN_S), FAILOVER_MAX_S)
        same = "the same on all machines, those of amazon_kclpy included"
        comment = (
            same if allowed_s == wanted_s else f"{failover_ms} ms is outside 1s to 15m; {same}"
        )
        yield "leases.failover", _duration(allowed_s), comment
    most = _number(known, "maxLeasesForWorker")
    if most is None:
        comment = "the KCL takes any number: lower it to what one machine can bear"
        yield "leases.max", _LEASES_MAX, comment
    else:
        yield "leases.max", min(max(most, 1), _LEASES_MAX), ""
    moves = _number(known, "maxLeasesToStealAtOneTime")
    if moves is not None:
        yield "leases.moves_per_cycle", max(moves, 1), _remark("maxLeasesToStealAtOneTime")
    cleanup = known.get("cleanupleasesuponshardcompletion")
    if cleanup is not None:
        comment = _remark("cleanupLeasesUponShardCompletion")
        yield "leases.cleanup", _switch("cleanupLeasesUponShardCompletion", cleanup), comment


def _fetch(known: Known) -> Iterator[Converted]:
    mode = known.get("retrievalmode", "DEFAULT").upper()
    polls = {"maxrecords", "idletimebetweenreadsinmillis"} & known.keys()
    if mode == "FANOUT" or (mode == "DEFAULT" and not polls):
        comment = "as the KCL reads these shards; polling costs less and adds fetch.idle of latency"
        yield "fetch.mode", "fan-out", comment
        consumer = known.get("fanoutconfig.consumerarn") or known.get("fanoutconfig.consumername")
        if consumer is not None:
            yield "fetch.consumer", consumer, "the consumer of the KCL is used further"
    idle_ms = _number(known, "idleTimeBetweenReadsInMillis")
    if idle_ms is not None:
        idle = _duration(max(idle_ms / 1000, SHARD_READ_PAUSE_S))
        yield "fetch.idle", idle, _remark("idleTimeBetweenReadsInMillis")
        yield "fetch.every", idle, "the KCL makes the same pause after records"
    most = _number(known, "maxRecords")
    if most is not None:
        yield "fetch.batch_max", min(max(most, 1), _BATCH_MAX), _remark("maxRecords")


def _patience(known: Known) -> Iterator[Converted]:
    backoff_ms = _number(known, "taskBackoffTimeMillis")
    if backoff_ms is not None:
        yield "on_error.backoff", _duration(backoff_ms / 1000), _remark("taskBackoffTimeMillis")
    timeout_s = _number(known, "timeoutInSeconds")
    failover_s = (_number(known, "failoverTimeMillis") or 10_000) / 1000
    if timeout_s is not None and timeout_s > min(failover_s, FAILOVER_MAX_S):
        yield "stall", _duration(float(timeout_s)), _remark("timeoutInSeconds")
    elif timeout_s is not None:
        yield "stall", "2m", f"{timeout_s} s is not more than a move of a lease may take"
    grace_ms = _number(known, "shutdownGraceMillis")
    if grace_ms:
        yield "shutdown.grace", _duration(grace_ms / 1000), ""


def _metrics(known: Known) -> Iterator[Converted]:
    level = known.get("metricslevel", "").upper()
    if level in {"SUMMARY", "DETAILED"}:
        namespace = "observe.cloudwatch.namespace"
        remark = 'other metrics: the page "Metrics" of the documentation'
        yield namespace, known["applicationname"], remark
    if level == "DETAILED":
        yield "observe.cloudwatch.detail", "shard", "CloudWatch bills each metric of each shard"


def _number(known: Known, name: str) -> int | None:
    text = known.get(name.lower())
    if text is None:
        return None
    if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        raise SettingsError(f"{name}: expected a whole number, got {text[:40]!r}")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise SettingsError(f"{name}: expected true or false, got {text[:40]!r}")
    return _SWITCH[text.lower()]


def _duration(seconds: float) -> str:
    return Duration(max(seconds, 0.0)).text


def _remark(name: str) -> str:
    return by_name()[name.lower()].note
