"""Names of the state of a query's shards, and which of them a batch reads [K21]. Pure.

Each attempt at a range writes its version under a name of its own, and then claims the name of the
range's end for it, which only the first attempt gets. `docs/explanation/spark-batches.md` says why
the names are safe.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.shard import HashRange
from kclrun.model.state import StatePlace, version_folder
from kclrun.spark.positions import Place, Position
from kclrun.state.chain import Chain
from kclrun.state.versions import checked, token_of, with_checksum

# Of the numbers of runs: those before the last hundred are of no use to a later run.
RUNS: Final = "runs"
RUNS_KEPT: Final = 100
# The run of what a query begins with: every run of the query reads it.
ORIGIN: Final = 0
# Above that of every start.
ANY_RUN: Final = 10**18
# The field of an offset that has the lineage. An offset that a query without a checkpoint begins at
# has an empty one: Spark asks for it again at each start until its first batch is planned.
LINEAGE: Final = "lineage"
BEGINS: Final = ""
_RUN_DIGITS: Final = 6
_CLAIM: Final = re.compile(r"(?P<at>[a-z_]+(?:-[0-9-]+)?)\.(?P<run>[0-9]{6,})\Z", re.ASCII)
_MAGIC: Final = b"kclrun-state-claim\n"


class Family(msgspec.Struct, frozen=True):
    """Which keys a shard has, and the shards whose state it begins with."""

    hash_range: HashRange | None
    parents: tuple[str, ...] = ()


class BatchState(msgspec.Struct, frozen=True):
    """Of one batch: the lineage of its state, the run that it belongs to, and its shards."""

    lineage: str
    run: int
    families: Mapping[str, Family]


class QueryPlace(msgspec.Struct, frozen=True):
    """Where the state of an application's stream is. `may_begin_empty` is in `place`."""

    place: StatePlace
    application: str
    stream: str

    def folder(self, lineage: str) -> str:
        """Below the place. No lease of a fleet has its versions there, so that a fleet deletes none
        of them. Raises: SettingsError for a lineage that is not one."""
        if re.fullmatch(r"[0-9a-f]{32}", lineage) is None:
            raise SettingsError(f"{lineage[:40]!r} is not the lineage of a query's state")
        return f"spark/{version_folder(self.application, self.stream)}/{lineage}"

    @property
    def folder_of_fleet(self) -> str:
        """Where the versions are that the rows of the lease table name."""
        return version_folder(self.application, self.stream)


def marked(offset: Mapping[str, Any], lineage: str) -> dict[str, Any]:
    """The offset with the lineage, its keys in their fixed order."""
    return dict(sorted({**offset, LINEAGE: lineage}.items()))


def lineage_of(offset: Mapping[str, Any]) -> str | None:
    """The lineage that an offset carries; None where the query had no state."""
    lineage = offset.get(LINEAGE)
    return lineage if isinstance(lineage, str) else None


def unmarked(offset: Mapping[str, Any]) -> dict[str, Any]:
    """The offset as the source knows it."""
    return {name: value for name, value in offset.items() if name != LINEAGE}


def claim_name(at: Position, run: int) -> str:
    """The name of the state at a position, as this run has it."""
    return f"{_text_of(at)}.{run:0{_RUN_DIGITS}}"


def _text_of(at: Position) -> str:
    """The position without characters that a folder or S3 gives a meaning."""
    match at.place:
        case Place.TIMESTAMP:
            return f"time-{at.timestamp_ms}"
        case Place.RECORD:
            sub = "" if at.sub_sequence_number is None else f"-{at.sub_sequence_number}"
            return f"{'before' if at.is_before else 'after'}-{at.number}{sub}"
    return at.place.name.lower()


def greatest(names: Iterable[str], at: Position, run: int) -> str | None:
    """The claim that `run` reads at a position: that of the greatest run up to its own."""
    text, best = _text_of(at), None
    found = -1
    for name in names:
        match = _CLAIM.match(name)
        if match is not None and match["at"] == text and found < int(match["run"]) <= run:
            best, found = name, int(match["run"])
    return best


def encode_claim(chain: Chain) -> bytes:
    """What a claim says: the versions that hold the state; none where it is empty."""
    return with_checksum(_MAGIC, msgspec.msgpack.encode(chain))


def decode_claim(name: str, content: bytes) -> Chain:
    """Raises: SettingsError, in words, if the bytes are not a claim's."""
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
    """The claims of a shard at positions at which no batch begins any more. `kept`: where the
    batches ended that a query may go back to. A young one may be of a batch under way."""
    texts = {_text_of(each) for each in kept}
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
    """The versions of a shard on which no claim rests. A young one may be claimed yet."""
    used = {name for chain in chains for name in chain.names}
    return tuple(
        name
        for name, age_s in listed
        if token_of(name) is not None and name not in used and age_s >= retain_s
    )


def is_claim(name: str) -> bool:
    """Whether a name of a shard is a claim's."""
    return _CLAIM.match(name) is not None
