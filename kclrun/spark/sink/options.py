"""Options of the sink, as texts, into `SinkSettings`.

    streamName or streamARN                        required; the ARN says the region
    region, endpointUrl                            from the ARN, else the AWS chain
    roleArn, roleExternalId, roleSessionName       a role to assume
    ordering                                       key: a key's records never overtake each other,
                                                   so that one of them a request is under way;
                                                   none: a refused record may be overtaken
    aggregate                                      false; true packs the records of a key into KPL
                                                   aggregates: for few keys with many records
    maxRecordBytes                                 1MiB; up to 10MiB where the stream allows it
    giveUpAfter                                    2m without any progress, then the task fails

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.spark.option_reader import OptionReader
from kclrun.spark.options import REACHED_NAMES, read_reached
from kclrun.spark.settings import Reached

__all__ = ["NAMES", "SinkSettings", "sink_settings"]

NAMES: Final = (
    *REACHED_NAMES,
    "ordering",
    "aggregate",
    "maxRecordBytes",
    "giveUpAfter",
)
# What Spark puts among a streaming sink's options by itself.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
_ORDERINGS: Final = {"key": True, "none": False}
# A record's data and key: 1 MiB by default; UpdateMaxRecordSize raises a stream's limit to 10 MiB.
_RECORD_BYTES: Final = 2**20
_RECORD_BYTES_MAX: Final = 10 * 2**20


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All options of the sink, in types. Defaults are those of the table above.

    `give_up_after_s`: how long a shard, or the service, may take nothing at all before a task
    fails; Spark then tries it again. Two minutes are twelve of the flow control's longest pauses:
    the tasks of a query compete for a throttled shard.
    """

    reached: Reached
    keeps_order: bool = True
    aggregates: bool = False
    record_bytes_max: int = _RECORD_BYTES
    give_up_after_s: float = 120.0


def sink_settings(options: Mapping[str, str]) -> SinkSettings:
    """The settings that the options say; keys in any case.

    Raises: SettingsError naming every option that is unknown, missing or wrong.
    """
    named = {key: text for key, text in options.items() if key.lower() not in _SPARKS_OWN}
    given = OptionReader("the kclrun sink", named, NAMES)
    settings = SinkSettings(
        reached=read_reached(given),
        keeps_order=given.choice("ordering", _ORDERINGS, default=True),
        aggregates=given.switch("aggregate", default=False),
        record_bytes_max=given.size_bytes("maxRecordBytes", _RECORD_BYTES, 1024, _RECORD_BYTES_MAX),
        # A throttled shard is sent something every 10 s at the least: less would give it up.
        give_up_after_s=given.duration_s("giveUpAfter", 120.0, "15s", "1h"),
    )
    given.settle()
    return settings
