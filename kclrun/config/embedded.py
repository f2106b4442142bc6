"""The settings of the embedded AWS: what it has when the application begins."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kclrun.config.names import FunctionRef, documented

# Ours, of a stream that kclrun makes on an emulator: the quota of an account is the service's.
SHARDS_MAX: Final = 500


class FillSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The data that is put into an embedded stream while the application runs."""

    source: Annotated[FunctionRef, documented("module:function that yields (key, data) pairs")]
    aggregate: Annotated[
        float, documented("share of the records sent inside KPL aggregates", ge=0, le=1)
    ] = 0.0
    rate: Annotated[
        int | None, documented("records a second; as fast as it goes if left out", ge=1)
    ] = None


class ReshardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One split or merge of an embedded stream during the fill."""

    after: Annotated[float, documented("share of the fill after which it happens", ge=0, le=1)]
    split: Annotated[
        int | None, documented("index, among the open shards, of the one to split")
    ] = None
    merge: Annotated[
        int | None, documented("index, among the open shards, of the one to merge with the next")
    ] = None


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the embedded AWS."""

    shards: Annotated[
        int, documented("shards of each stream that is created", ge=1, le=SHARDS_MAX)
    ] = 1
    limits: Annotated[bool, documented("enforce the per-shard limits of the service")] = False
    fill: Annotated[
        FillSettings | None, documented("records to put into the (first) stream meanwhile")
    ] = None
    reshard: Annotated[
        tuple[ReshardSettings, ...], documented("splits and merges during the fill")
    ] = ()
