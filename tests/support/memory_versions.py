"""A store of state versions in memory, with the faults that a service may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kclrun.errors import SinkError


class Versions:
    """What is stored. It outlives every process."""

    def __init__(self) -> None:
        self.content: dict[tuple[str, str], bytes] = {}
        self.late: list[tuple[str, tuple[str, str], bytes | None]] = []

    def land(self) -> None:
        """Requests without an answer arrive now."""
        for _, at, content in self.late:
            if content is None:
                self.content.pop(at, None)
            else:
                self.content.setdefault(at, content)
        self.late.clear()


class MemoryVersions:
    """One process's side of it. `fates` say what happens to the next writes: `refused`, `lost` (the
    reply), `late` (no reply; it arrives with `Versions.land`)."""

    def __init__(self, stored: Versions, fates: list[str] | None = None) -> None:
        self.stored = stored
        self.fates = fates if fates is not None else []

    def create(self, shard: str, name: str, content: bytes) -> None:
        fate = self.fates.pop() if self.fates else ""
        at = (shard, name)
        if fate == "late":
            self.stored.late.append(("create", at, content))
        elif fate != "refused":
            assert self.stored.content.setdefault(at, content) == content, "a name is written once"
        if fate:
            raise SinkError(f"{fate}: {name}")

    def claim(self, shard: str, name: str, content: bytes) -> bytes:
        return self.stored.content.setdefault((shard, name), content)

    def read(self, shard: str, name: str) -> bytes | None:
        return self.stored.content.get((shard, name))

    def list(self, shard: str) -> Iterator[tuple[str, float]]:
        yield from [(name, 86400.0) for of, name in self.stored.content if of == shard]

    def shards(self) -> list[str]:
        return sorted({shard for shard, _ in self.stored.content})

    def delete(self, shard: str, names: Sequence[str]) -> None:
        for name in names:
            self.stored.late.append(("delete", (shard, name), None))
        if not (self.fates and self.fates.pop() == "late"):
            self.stored.land()

    def check(self) -> str:
        return "memory"

    def close(self) -> None:
        pass
