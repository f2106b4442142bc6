"""An application's stream and lease table in memory, for verbs that run in this process.

Time is the test's own: it passes while a verb sleeps, and then the owners of leases act.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kclrun.aws.rows import Item
from kclrun.cli.program import run_program
from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.errors import NotFound
from kclrun.local.lease_rows import LeaseRows
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.lease import ANYBODY, KCL3_MODE_KEY, OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.record import PutEntry
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.ports import ScanPage
from kclrun.protocol.writes import Applied, End, LeaseChange, Offer, Release, Renew, Take
from tests.support.stream_ports import ModelStream

BEGUN = 1_700_000_000.0  # 2023-11-14T22:13:20Z
FAILOVER_S = 1.0
A, B, JAVA = map(OwnerId, ("kclrun:az1:host1:nonce", "kclrun:az2:host2:nonce", "java-worker"))
# Where verbs look at a clock, or wait.
CLOCKED = (
    "doctor",
    "lag",
    "leases.command",
    "leases.reset",
    "leases.views",
    "migrate.spark",
    "page.reading",
    "times",
    "startup",
)
CONFIG = "application: orders\nstream: orders\nleases: {failover: 1s}\naws: {region: us-east-1}\n"


def key(number: int, stream: str = "") -> LeaseKey:
    return LeaseKey(f"{stream}shardId-{number:012d}")


class Clock:
    """In place of the module `time`: `acts` are called four times in each second that is slept."""

    strftime, gmtime = staticmethod(time.strftime), staticmethod(time.gmtime)
    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self, now: float = BEGUN) -> None:
        self.now = now
        self.slept: list[float] = []
        self.acts: list[Callable[[], object]] = []

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        self.slept.append(pause_s)
        over = self.now + pause_s
        while self.now < over:
            self.now = min(over, self.now + 0.25)
            for act in self.acts:
                act()


class Rows(LeaseRows):
    """A lease table that may be missing, and whose writes may fail: `outcomes` come first."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = True
        self.outcomes: list[Any] = []

    def scan(self, *, consistent: bool = True) -> Iterator[ScanPage]:
        self._require()
        return super().scan(consistent=consistent)

    def read(self, key: LeaseKey) -> Lease | None:
        self._require()
        return super().read(key)

    def write(self, change: LeaseChange) -> Any:
        return self.outcomes.pop(0) if self.outcomes else super().write(change)

    def items(self, *, consistent: bool = True) -> Iterator[Sequence[Item]]:
        self._require()
        keys = sorted(self._rows.keys() | self._unreadable.keys())
        yield [item for each in keys if (item := self.raw(each)) is not None]

    def _require(self) -> None:
        if not self.is_there:
            raise NotFound("no such table", operation="Scan")


class Site:
    """One application, its streams, and owners that renew and answer while a verb waits."""

    def __init__(self, folder: Path, shards: int = 2) -> None:
        self.clock = Clock()
        self.rows = Rows()
        self.folder = folder
        self.config = folder / "app.yaml"
        self.configure(CONFIG)
        self.kinesis = Kinesis(KinesisSettings(), b"site".ljust(32))
        self.make_stream("orders", shards)
        self.mode: str | None = None

    def configure(self, text: str) -> None:
        self.config.write_text(text)
        self.config.chmod(0o600)

    def make_stream(self, name: str, shards: int) -> None:
        self.kinesis.create_stream(name, shards, WallTime(self.clock.now))
        self.clock.now += 60.0  # until it is ACTIVE

    def stream(self, name: str = "orders") -> ModelStream:
        return ModelStream(self.kinesis, name, lambda: WallTime(self.clock.now))

    def put(self, *hash_keys: int, after_s: float = 0.0, stream: str = "orders") -> list[str]:
        """A record to each of these hash keys, so long from now; their sequence numbers."""
        self.clock.now += after_s
        entries = [PutEntry(b"x", "key", explicit_hash_key=str(each)) for each in hash_keys]
        return [str(each.sequence_number) for each in self.stream(stream).put(entries)]

    def aws(self, settings: Settings) -> SimpleNamespace:
        """What a verb takes for `services.Aws`."""
        return SimpleNamespace(
            settings=settings,
            table=self.rows,
            called_table=f"the lease table {settings.table}",
            called_stream=lambda name: f"the stream {name}",
            stream=self.stream(),
            reader=self.stream(),
            admin_of=self.stream,
            reader_of=self.stream,
            kinesis=SimpleNamespace(url="https://kinesis", region="us-east-1"),
            source_client=SimpleNamespace(service_time=lambda: WallTime(self.clock.now)),
            dynamodb_client=SimpleNamespace(service_time=lambda: WallTime(self.clock.now)),
            credentials=SimpleNamespace(current=lambda: None),
            coordinator=SimpleNamespace(mode=lambda: None),
            control=SimpleNamespace(dynamodb_reads=lambda: self),
        )

    def settings(self) -> Settings:
        return settings_of(self.config.read_text(), environment={}, now=WallTime(self.clock.now))

    def get_item(self, **_: object) -> dict[str, Item]:
        """The row of KCL 3 that says in which mode its fleet is, as botocore answers."""
        item = self.rows.raw(KCL3_MODE_KEY)
        return {} if item is None else {"Item": item}

    def plant(
        self,
        number: int,
        owner: OwnerId | None = None,
        checkpoint: ExtendedSequenceNumber = TRIM_HORIZON,
        stream: str = "",
        **more: Any,
    ) -> None:
        ranges = {shard.shard_id: shard.hash_range for shard in self.stream().list_shards()}
        fields = {"hash_range": ranges.get(key(number)), "counter": 1} | more
        lease = Lease(key=key(number, stream), checkpoint=checkpoint, owner=owner, **fields)
        self.rows._put(lease.key, lease)

    def row(self, number: int) -> Lease:
        found = self.rows.read(key(number))
        assert found is not None
        return found

    def live(self, *owners: OwnerId, answer: str = "renew") -> None:
        """While a verb sleeps these owners renew; `answer` is what one does about a request."""

        def act() -> None:
            for page in list(self.rows.scan()):
                for row in page.leases:
                    if row.owner in owners:
                        getattr(self, "renew" if row.handoff is None else answer)(row)

        self.clock.acts.append(act)

    # What an owner may do about a request

    def renew(self, row: Lease) -> None:
        self.rows.write(Renew(row.key, row.owner, row.counter))

    def offer(self, row: Lease, taker: OwnerId | None = None) -> None:
        """Give it away, to the one it is meant for, or to B."""
        to = None if row.handoff.to == ANYBODY else row.handoff.to
        at = row.checkpoint
        offer = Offer(row.key, row.owner, row.counter, at, at, offered_to=to)
        assert isinstance(self.rows.write(offer), Applied)
        if self.clock.now < self.takes_from:
            return
        self._take(row, taker or to or B)

    takes_from = 0.0

    def _take(self, row: Lease, taker: OwnerId) -> None:
        taken = Take(row.key, taker, OFFERED, row.counter + 1, FAILOVER_S, "TRIM_HORIZON")
        assert isinstance(self.rows.write(taken), Applied)

    def offer_to_a_third(self, row: Lease) -> None:
        self.offer(row, OwnerId("kclrun:az3:host3:nonce"))

    def offer_only(self, row: Lease) -> None:
        """Give it away; the taker comes later, or never."""
        self.takes_from = float("inf")
        self.offer(row)

    def release(self, row: Lease) -> None:
        """As an owner does that sees no other kclrun owner."""
        at = row.checkpoint
        self.rows.write(Release(row.key, row.owner, row.counter, at, at))

    def drop(self, row: Lease) -> None:
        self.rows.write(Renew(row.key, row.owner, row.counter, drops_ask=True))

    def end(self, row: Lease) -> None:
        self.rows.write(End(row.key, row.owner, row.counter, last=row.checkpoint))


def site_for(monkeypatch: pytest.MonkeyPatch, folder: Path, shards: int = 2) -> Site:
    """A site whose services and clock all verbs have from now on."""
    site = Site(folder, shards)
    for module in CLOCKED:
        monkeypatch.setattr(f"kclrun.cli.{module}.time", site.clock)
    monkeypatch.setattr("kclrun.cli.services.Aws", site.aws)
    return site


Called = tuple[int, list[str], list[str]]


def caller(site: Site, capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    """`call("leases move 0", …)`: exit code, lines of output, lines on standard error."""

    def call(line: str, *more: object) -> Called:
        verb, *rest = line.split()
        code = run_program([verb, "--config", str(site.config), *rest, *map(str, more)])
        reported = capsys.readouterr()
        return code, reported.out.splitlines(), reported.err.splitlines()

    return call
