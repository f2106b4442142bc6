"""What `stream`, `start`, `aws`, `fetch` and `spark.source` say to the source, as its options.

Pure. Rule: what stands elsewhere in the file is not repeated in `spark.source`
(`config/engine_rules.py` refuses it), so neither can contradict the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from kclrun.config.schema import Settings, StartAtLeases
from kclrun.config.start_position import parse_start
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.model.time import WallTime

__all__ = ["as_option_texts", "source_options"]


def source_options(settings: Settings, now: WallTime) -> dict[str, str]:
    """The options of `format("kclrun")` for this application; `now` judges `start`.

    Raises: SettingsError for a `start` that has come to lie in the future of `now`.
    """
    aws = settings.aws
    stream = "streamARN" if settings.only_stream.startswith("arn:") else "streamName"
    given = {
        stream: settings.only_stream,
        # An ARN says its region; the option may not say another.
        "region": aws.region if stream == "streamName" else None,
        "endpointUrl": aws.endpoints.get("kinesis", aws.endpoint),
        "roleArn": aws.role_arn,
        "pollInterval": settings.fetch.idle.text,
    }
    return (
        {name: value for name, value in given.items() if value is not None}
        | _start(settings, now)
        | as_option_texts(settings.spark.source)
    )


def as_option_texts(options: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Options as Spark takes them: switches are `true` and `false`."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def _start(settings: Settings, now: WallTime) -> dict[str, str]:
    if isinstance(settings.start, StartAtLeases):
        leases = {"startingLeases": settings.start.leases}
        url = settings.aws.endpoints.get("dynamodb", settings.aws.endpoint)
        return leases if url is None else leases | {"startingLeasesEndpointUrl": url}
    start = parse_start(settings.start, now)
    if start.at is not None:
        return {"startingTimestamp": str(round(start.at * 1000))}
    words = {TRIM_HORIZON: "earliest", LATEST: "latest"}
    return {"startingOffsets": words[start.sentinel]}
