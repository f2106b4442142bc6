"""The rules of an application that reads the stream of a DynamoDB table: what cannot be there.

Pure. `docs/explanation/dynamodb-streams.md` has the reason of each rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kclrun.config.convert import Problem
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.stream import is_change_stream

_HERE: Final = "with the stream of a DynamoDB table"
_STARTS: Final = frozenset({"TRIM_HORIZON", "LATEST"})
_OTHER_FORMATS: Final = frozenset({"text", "msgpack", "glue"})


def reads_changes(settings: Settings) -> bool:
    """Whether the application reads the stream of a DynamoDB table."""
    return any(is_change_stream(source.name) for source in settings.sources)


def refuse_changes(settings: Settings, verb: str, why: str) -> None:
    """Raises: SettingsError, if the application reads the stream of a DynamoDB table."""
    if reads_changes(settings):
        raise SettingsError(f"{verb} is for streams of Kinesis: {why}")


def change_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of settings that a DynamoDB stream cannot have."""
    if not reads_changes(settings):
        return
    if settings.streams:
        yield Problem(
            ("streams",),
            "takes streams of Kinesis; the stream of a DynamoDB table is named by `stream:`, in an"
            " application of its own",
        )
    if settings.engine == "spark":
        yield Problem(("engine",), f"is fleet {_HERE}: the source for Spark reads Kinesis")
    if settings.fetch.mode == "fan-out":
        yield Problem(
            ("fetch", "mode"), f"is polling {_HERE}: enhanced fan-out is a feature of Kinesis"
        )
    if settings.fetch.kpl_range == "drop":
        yield Problem(("fetch", "kpl_range"), f"is keep {_HERE}: its shards have no hash keys")
    if settings.start_text not in _STARTS:
        yield Problem(
            ("start",),
            f"is TRIM_HORIZON or LATEST {_HERE}: the service cannot read from a time",
        )
    if settings.state is not None:
        yield Problem(
            ("state",),
            f"cannot be kept {_HERE}: its shards have no hash keys, which decide the keys that a"
            " child takes over from its parent",
        )
    if settings.decode in _OTHER_FORMATS:
        yield Problem(
            ("decode",),
            f"is json, module:Type or module:function {_HERE}: a record is a change event in JSON",
        )
    if settings.embedded is not None or settings.aws.endpoint == "embedded":
        yield Problem(
            ("aws", "endpoint"),
            f"is not embedded {_HERE}: a new AWS has no table; use `kclrun local`, which lasts",
        )
