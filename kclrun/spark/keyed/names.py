"""Names of the state of a query's shards, and which of them a batch reads [K21]. Pure.

Each attempt at a range writes its version under a name of its own, and then claims the name of the
range's end for it, which only the first attempt gets. `docs/explanation/spark-batches.md` has the
reasons.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.shard import HashRange
from kclrun.model.state import StateDestination, version_folder
from kclrun.spark.positions import Position, PositionKind
from kclrun.state.chain import Chain
from kclrun.state.versions import checked, token_of, with_checksum

# The folder of the runs' numbers. A run needs the greatest only; a hundred are kept.
RUNS: Final = "runs"
RUNS_KEPT: Final = 100
# The number of the state that a query begins with: below the number of every run, so that every run
# reads that state.
ORIGIN: Final = 0
# Above the number of every run.
ANY_RUN: Final = 10**18
# The field of an offset that has the lineage. The offset that a query without a checkpoint begins
# at has an empty lineage: Spark requests that offset again at each start, until a batch is planned.
LINEAGE: Final = "lineage"
BEGINS: Final = ""
_RUN_DIGITS: Final = 6
_CLAIM: Final = re.compile(r"(?P<at>[a-z_]+(?:-[0-9-]+)?)\.(?P<run>[0-9]{6,})\Z", re.ASCII)
_MAGIC: Final = b"kclrun-state-claim\n"


class Family(msgspec.Struct, frozen=True):
    """The keys of a shard, and the shards with whose state it begins."""

    hash_range: HashRange | None
    parents: tuple[str, ...] = ()


class BatchState(msgspec.Struct, frozen=True):
    """The lineage of a batch's state, the number of the run that reads it, and the batch's
    shards."""

    lineage: str
    run: int
    families: Mapping[str, Family]


class QueryPlace(msgspec.Struct, frozen=True):
    """Where the state of an application's stream is. `may_begin_empty` is in `place`."""

    place: StateDestination
    application: str
    stream: str

    def folder(self, lineage: str) -> str:
        """The folder of a lineage, below the place. No lease of a fleet has its versions there, so
        no fleet deletes any of them. Raises: SettingsError for a text that is not a lineage."""
        if re.fullmatch(r"[0-9a-f]{32}", lineage) is None:
            raise SettingsError(f"{lineage[:40]!r} is not the lineage of a query's state")
        return f"spark/{version_folder(self.application, self.stream)}/{lineage}"

    @property
    def folder_of_fleet(self) -> str:
        """The folder of the versions that the rows of the lease table name."""
        return version_folder(self.application, self.stream)


def marked(offset: Mapping[str, Any], lineage: str) -> dict[str, Any]:
    """The offset with the lineage, its keys in their fixed order."""
    return dict(sorted({**offset, LINEAGE: lineage}.items()))


def lineage_of(offset: Mapping[str, Any]) -> str | None:
    """The lineage that an offset carries; None where the query had no state."""
    lineage = offset.get(LINEAGE)
    return lineage if isinstance(lineage, str) else None


def unmarked(offset: Mapping[str, Any]) -> dict[str, Any]:
    """The offset without the lineage."""
    return {name: value for name, value in offset.items() if name != LINEAGE}


def claim_name(at: Position, run: int) -> str:
    """The name of this run's claim of the state at a position."""
    return f"{_text_of(at)}.{run:0{_RUN_DIGITS}}"


def _text_of(at: Position) -> str:
    """The position without characters that a folder or S3 gives a meaning."""
    match at.kind:
        case PositionKind.TIMESTAMP:
            return f"time-{at.timestamp_ms}"
        case PositionKind.RECORD:
            sub = "" if at.sub_sequence_number is None else f"-{at.sub_sequence_number}"
            return f"{'before' if at.is_before else 'after'}-{at.number}{sub}"
    return at.kind.name.lower()


def greatest(names: Iterable[str], at: Position, run: int) -> str | None:
    """The claim that `run` reads at a position: that of the greatest run up to `run`."""
    text, best = _text_of(at), None
    found = -1
    for name in names:
        match = _CLAIM.match(name)
        if match is not None and match["at"] == text and found < int(match["run"]) <= run:
            best, found = name, int(match["run"])
    return best


def encode_claim(chain: Chain) -> bytes:
    """The content of a claim: the versions that hold the state; none where it is empty."""
    return with_checksum(_MAGIC, msgspec.msgpack.encode(chain))


def decode_claim(name: str, content: bytes) -> Chain:
    """Raises: SettingsError if the bytes are not those of a claim."""
    body = checked(_MAGIC, f"the state {name}", content)
    try:
        return msgspec.msgpack.decode(body, type=Chain)
    except msgspec.MsgspecError:
        raise SettingsError(f"the state {name} cannot be read") from None


def run_of(name: str) -> int | None:
    """The number in the name of a run."""
    return int(name) if re.fullmatch(r"[0-9]{6,}", name) else None


def run_name(run: int) -> str:
    """The name under which a run is claimed."""
    return f"{run:0{_RUN_DIGITS}}"


def old_claims(
    listed: Iterable[tuple[str, float]], kept: Collection[Position], retain_s: float
) -> tuple[str, ...]:
    """The claims of a shard at positions where no batch begins any more. `kept` are the ends of the
    batches that a query may go back to. A claim younger than `retain_s` may be of a batch under
    way."""
    texts = {_text_of(position) for position in kept}
    return tuple(
        name
        for name, age_s in listed
        if (match := _CLAIM.match(name)) is not None
        and match["at"] not in texts
        and age_s >= retain_s
    )


def old_versions(
    listed: Iterable[tuple[str, float]], chains: Iterable[Chain], retain_s: float
) -> tuple[str, ...]:
    """The versions of a shard that no claim names. A version younger than `retain_s` may be claimed
    yet."""
    used = {name for chain in chains for name in chain.names}
    return tuple(
        name
        for name, age_s in listed
        if token_of(name) is not None and name not in used and age_s >= retain_s
    )


def is_claim(name: str) -> bool:
    """Whether a name in a shard's folder is that of a claim."""
    return _CLAIM.match(name) is not None
