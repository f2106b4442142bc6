"""Checks the sink's options and columns before any row leaves Spark. Pure.

A column that the sink would not send is an error; it is never left out silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.spark.options import REACHED_NAMES, OptionReader, Reached, read_reached

# The names of the sink's options; `SinkSettings` describes them.
NAMES: Final = (
    *REACHED_NAMES,
    "ordering",
    "aggregate",
    "maxRecordBytes",
    "giveUpAfter",
)
# Options that Spark adds to a streaming sink's options by itself.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
_ORDERINGS: Final = {"key": True, "none": False}
# A record's data and key: 1 MiB by default; UpdateMaxRecordSize raises a stream's limit to 10 MiB.
_RECORD_BYTES: Final = 2**20
_RECORD_BYTES_MAX: Final = 10 * 2**20


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All options of the sink, in types.

        streamName or streamARN      required; the ARN names the region
        region, endpointUrl          from the ARN, else the AWS chain
        roleArn, roleExternalId,
        roleSessionName              a role to assume
        ordering                     key: a key's records never overtake each other, so a request
                                     holds one record of a key;
                                     none: a refused record may be overtaken
        aggregate                    false; true packs the records of a key into KPL aggregates:
                                     for few keys with many records
        maxRecordBytes               1MiB; up to 10MiB where the stream allows it
        giveUpAfter                  2m without any progress, then the task fails

    `give_up_after_s`: the time for which a shard, or the service, may accept nothing before a task
    fails; Spark then tries it again. Two minutes are twelve of the flow control's longest pauses:
    the tasks of a query compete for a throttled shard.
    """

    reached: Reached
    keeps_order: bool = True
    aggregates: bool = False
    record_bytes_max: int = _RECORD_BYTES
    give_up_after_s: float = 120.0


def sink_settings(options: Mapping[str, str]) -> SinkSettings:
    """The settings from the options; names in any case.

    Raises: SettingsError naming every option that is unknown, missing or wrong.
    """
    named = {key: text for key, text in options.items() if key.lower() not in _SPARKS_OWN}
    given = OptionReader("the kclrun sink", named, NAMES)
    settings = SinkSettings(
        reached=read_reached(given),
        keeps_order=given.choice("ordering", _ORDERINGS, default=True),
        aggregates=given.switch("aggregate", default=False),
        record_bytes_max=given.size_bytes("maxRecordBytes", _RECORD_BYTES, 1024, _RECORD_BYTES_MAX),
        # A throttled shard gets a request at least every 10 s: a shorter limit would give it up.
        give_up_after_s=given.duration_s("giveUpAfter", 120.0, "15s", "1h"),
    )
    given.settle()
    return settings


DATA: Final = "data"
PARTITION_KEY: Final = "partitionKey"
EXPLICIT_HASH_KEY: Final = "explicitHashKey"

# Spark's names of the types, by column.
_TYPES: Final = {
    DATA: ("binary", "string"),
    PARTITION_KEY: ("string",),
    EXPLICIT_HASH_KEY: ("string",),
}
_REQUIRED: Final = (DATA, PARTITION_KEY)
_NAMED_MAX: Final = 10


def check_columns(columns: Sequence[tuple[str, str]]) -> None:
    """Check the names and types (in the form of Spark's `simpleString`) of a DataFrame's columns.

    Raises: SettingsError for a column that is missing, present twice, of another type, or unknown.
    """
    names = [name for name, _ in columns]
    for name in _REQUIRED:
        if name not in names:
            raise SettingsError(
                f"the sink needs a column {name} ({' or '.join(_TYPES[name])}){_near(name, names)}:"
                f" the DataFrame has {_listed(names)}\nSelect it with select(… .alias({name!r})),"
                " or use kclrun.spark.write(df, stream, key=…, data=…)"
            )
    for name, type_name in columns:
        _check(name, type_name, names.count(name))


def _check(name: str, type_name: str, count: int) -> None:
    if name not in _TYPES:
        raise SettingsError(
            f"the sink does not know the column {name!r}: it takes {', '.join(_TYPES)}\n"
            f"Drop it, or pack what it holds into {DATA}, as with"
            " to_json(struct(…)).alias('data')"
        )
    if count > 1:
        raise SettingsError(f"the DataFrame has {count} columns called {name}: select one of them")
    # A collation is part of a string's type: "string collate UNICODE_CI".
    if type_name.partition(" ")[0] not in _TYPES[name]:
        raise SettingsError(
            f"the column {name} is {type_name[:200]}; the sink takes"
            f" {' or '.join(_TYPES[name])}\n{_remedy(name)}"
        )


def _remedy(name: str) -> str:
    if name == DATA:
        return "Cast it to string, or make JSON of it, as with to_json(struct(…)).alias('data')"
    return f"Cast it: col({name!r}).cast('string')"


def _near(name: str, names: Sequence[str]) -> str:
    # The column itself may appear under a name that differs only in its capitals.
    by_folded = {each.casefold(): each for each in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return f" (is it {by_folded[close[0]]!r}?)" if close else ""


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no columns"
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(repr(each) for each in names[:_NAMED_MAX]) + more
