"""What the settings say about a lease, as values: how it is read, checkpointed, retried and logged.

`config/policies.py` makes them, the start message carries them as they are, and the cores and the
shells decide by them. They are nouns, so that the settings, which are below the cores, can make
them. They know no setting and no default of one beyond those of their own fields.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# What happens to a record that is given up.
Then = Literal["halt", "dead-letter", "skip"]
# In which order the records of a shard are processed.
Order = Literal["key", "none"]
CheckpointMode = Literal["auto", "batch", "manual"]


class ErrorPolicy(msgspec.Struct, frozen=True):
    """The setting `on_error`: whether a call that raised is repeated, or given up.

    Records are never skipped silently [I9]. `failures.py` decides by `then` what happens to a batch
    that is given up. A call with a record older than `max_age_s` is not repeated. `limit` is that
    of `failures.Breaker`.
    """

    retries: int
    backoff_s: float
    then: Then = "halt"
    max_age_s: float | None = None
    limit: int = 100


class Concurrency(msgspec.Struct, frozen=True):
    """The setting `concurrency`. With `records: 1` records run in the order of the shard, whatever
    `order` is. `grace_s`: how long a drain may take (`shutdown.grace`)."""

    records: int = 1
    order: Order = "key"
    timeout_s: float | None = None
    grace_s: float = 60.0

    @property
    def keeps_keys_in_order(self) -> bool:
        """Whether records of one key are processed one after the other, as keyed state needs it."""
        return self.order == "key" or self.records == 1

    @property
    def cancel_after_s(self) -> float:
        """How long after a stop the calls that still run are cancelled. The other half of the grace
        is for the last commit, which waits 10 s for the outputs, and for the write that gives the
        lease away."""
        return self.grace_s / 2


class CheckpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The setting `checkpoint`: every `every_s` (auto), after each batch, or by user code."""

    mode: CheckpointMode = "auto"
    every_s: float = 10.0
    uncheckpointed_max: int = 100_000


class FetchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The setting `fetch`. `kpl_range`: keep or drop user records outside the hash range.

    `floor_s` is the least time between two GetRecords: the service allows 5 a second and shard.
    `every_s` is that at the tip; 0 means `floor_s`.
    `hot_window_s` is `observe.hot_window`; with 0 the traffic of the shard is not measured.
    """

    idle_s: float
    floor_s: float = 0.2
    every_s: float = 0.0
    buffer_bytes: int
    batch_max: int
    kpl_range: Literal["keep", "drop"]
    hot_window_s: float = 60.0


class LogPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The setting `log`, with its format decided: JSON lines or text. `own` are the packages of the
    user's code."""

    level: str
    json: bool
    levels: dict[str, str] = msgspec.field(default_factory=dict)
    own: tuple[str, ...] = ()


class TracePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The setting `observe.otlp.traces`, with the collector."""

    endpoint: str | None
    sample: float
    context: str | None
