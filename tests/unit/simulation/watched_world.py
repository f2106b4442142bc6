"""A stream, a table in memory and the oracles over them, moved by hand. Not a test."""

import msgspec

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import (
    Applied,
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    End,
    EndedParent,
    Offer,
    Release,
    Take,
    keys_of,
)
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.observer import WatchPolicy
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import Stories
from tests.support.storms.coverage import StormOracles

replace = msgspec.structs.replace


class Reader:
    """A lease process of `host`, by its number."""

    def __init__(self, key, host, number):
        self.key = key
        self.who = f"{host}/{number}"


class Watched:
    """Ten records a second and shard; hosts are called a:h:1 and so on."""

    def __init__(self, shards=2, **policy):
        self.now = 0.0
        self.stream = ShardStream(shards, Traffic(records_per_s=10.0 * shards))
        self.rows = LeaseRows()
        self.observer = StormOracles(
            self.stream,
            Stories(),
            now=lambda: self.now,
            row_of=self.rows.read,
            policy=WatchPolicy(**policy),
        )
        self.keys = [log.shard_id for log in self.stream.shards()]
        for key in self.keys:
            self.write("a:h:1", CreateLease(self.lease(key)))
        self.now = 60.0

    @property
    def seen(self):
        return self.observer.situations.names

    def lease(self, key, **fields):
        parents = frozenset(self.stream.parents_of(key))
        return Lease(key=key, **{"checkpoint": TRIM_HORIZON, "parents": parents, **fields})

    # The table.

    def write(self, sender, change):
        """It is applied, or the test is wrong."""
        before = {key: self.rows.read(key) for key in keys_of(change)}
        outcome = self.rows.write(change)
        assert isinstance(outcome, Applied), outcome
        for key, was in before.items():
            self.observer.row_written(sender, change, was, self.rows.read(key))

    def wrote(self, sender, change, before, after):
        """A write that no table would apply, applied."""
        self.observer.row_written(sender, change, before, after)

    def row(self, key):
        return self.rows.read(key)

    def delete_by_somebody(self, key):
        row = self.row(key)
        self.rows.uproot(key)
        self.observer.row_deleted_from_outside(row)

    def take(self, key, host):
        row = self.row(key)
        owner = f"kclrun:{host}"
        self.write(host, Take(key, owner, row.owner, row.counter, 10.0, "TRIM_HORIZON"))

    def as_owner(self, reader, kind, *arguments, **named):
        row = self.row(reader.key)
        self.write(reader.who, kind(reader.key, row.owner, row.counter, *arguments, **named))

    def begin(self, key, host, number=1, *, for_s=10.0):
        """Take, claim, and a permit to deliver."""
        self.take(key, host)
        return self.claim(key, host, number, for_s=for_s)

    def claim(self, key, host, number=1, *, for_s=10.0):
        reader = Reader(key, host, number)
        self.as_owner(reader, Claim)
        self.observer.delivery_allowed(reader, self.now + for_s)
        return reader

    def checkpoint(self, reader, number):
        last = self.row(reader.key).checkpoint
        self.as_owner(reader, Checkpoint, self.stream.records.position(reader.key, number), last)

    def release(self, reader, number):
        self.observer.delivery_stopped(reader)
        last = self.row(reader.key).checkpoint
        self.as_owner(reader, Release, self.stream.records.position(reader.key, number), last)
        self.observer.ended_in_order(reader)

    def offer(self, reader, number, to=None):
        self.observer.delivery_stopped(reader)
        last = self.row(reader.key).checkpoint
        self.as_owner(reader, Offer, self.stream.records.position(reader.key, number), last, to)
        self.observer.ended_in_order(reader)

    # User code.

    def read(self, reader, first, last):
        self.observer.batch_begun(reader, first, last)
        self.observer.batch_processed(reader, first, last)

    def read_out(self, reader):
        """Everything the closed shard holds, and its end."""
        total = self.stream.records.total(reader.key)
        self.read(reader, 1, total)
        self.observer.shard_exhausted(reader)
        return total

    def end(self, reader):
        self.as_owner(reader, End, self.row(reader.key).checkpoint)
        self.observer.delivery_stopped(reader)

    def create_children(self, sender, parent):
        children = tuple(self.lease(child.shard_id) for child in self.stream.children_of(parent))
        self.write(sender, CreateChildren(children, (EndedParent(parent),)))

    def split(self, key):
        self.stream.split(key, self.now)
        return [child.shard_id for child in self.stream.children_of(key)]
