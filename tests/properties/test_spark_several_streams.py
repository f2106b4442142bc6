"""Whole queries over several streams in the faulty world of `test_spark_source_storms.py`: each is
resharded on its own, their shards have the same ids, and streams are added while the query stands.
"""

import dataclasses
import heapq
import itertools
import os
import random

import pytest

from kclrun.model.stream import qualified_shards
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.stream_set import StreamsAdmin, StreamsReader
from tests.examples import seeds
from tests.properties.test_spark_source_storms import EPOCH, Query, World, drain, judge

pytestmark = pytest.mark.seconds

STORMS = int(os.environ.get("KCLRUN_STORMS") or len(seeds(0, 120)))
LOT = 20
NAMES = ("orders", "parcels", "returns")


class Part(World):
    """One stream of a whole, at the whole's time."""

    def __init__(self, seed, name, whole):
        self.whole = whole
        super().__init__(seed, name)

    elapsed = property(lambda self: self.whole.elapsed, lambda self, _: None)
    put_at = property(lambda self: self.whole.put_at, lambda self, _: None)

    def wait(self, pause_s):
        self.whole.wait(pause_s)


class Whole:
    """Several streams, one clock. `several` names those that the query reads now."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.elapsed = 0.0
        self.put_at, self.events, self.order = [], [], itertools.count()
        self.parts = {
            name: Part(seed * 8 + place, name, self)
            for place, name in enumerate(NAMES[: self.chance.randint(2, 3)])
        }
        self.skew_s = self.chance.choice([0.0, -3.0, 40.0])
        self.read(tuple(self.parts))

    at, clock, wall, later = World.at, World.clock, World.wall, World.later

    def wait(self, pause_s):
        until = self.elapsed + max(0.0, pause_s)
        while self.events and self.events[0][0] <= until:
            at, _, event = heapq.heappop(self.events)
            self.elapsed = max(self.elapsed, at)
            event()
        self.elapsed = max(self.elapsed, until)

    def read(self, several):
        parts = {name: self.parts[name] for name in several}
        self.several = several
        if len(several) == 1:
            (self.reader,) = (self.admin,) = parts.values()
            self.model = self.reader.model
            return
        self.reader, self.admin = StreamsReader(parts), StreamsAdmin(parts)
        self.model = StreamsReader({name: part.model for name, part in parts.items()})

    def named(self, stream, shard_id):
        return shard_id if len(self.several) == 1 else f"{stream}:{shard_id}"

    @property
    def log(self):
        return {
            self.named(name, shard_id): log
            for name in self.several
            for shard_id, log in self.parts[name].log.items()
        }

    @property
    def listings(self):
        newest = {name: self.parts[name].listings[-1][1] for name in self.several}
        if len(newest) > 1:
            newest = {name: qualified_shards(name, shards) for name, shards in newest.items()}
        return [(self.at, list(itertools.chain(*newest.values())))]


def settings_of(world, **more):
    chance = world.chance
    return SourceSettings(
        address=StreamAddress(stream=",".join(world.several)),
        start=Start(StartKind.EARLIEST),
        poll_interval_s=chance.choice([0.2, 1.0]),
        records_per_trigger_max=chance.choice([None, None, 50]),
        inline_bytes_max=chance.choice([512 * 1024, 512 * 1024, 0]),
        aligns_shards=chance.random() < 0.8,
        **more,
    )


def storm(seed):
    world = Whole(seed)
    chance = world.chance
    ends_at = EPOCH + chance.choice([20.0, 120.0])
    for part in world.parts.values():
        pause_s = chance.choice([0.1, 0.4, 5.0]) * (ends_at - EPOCH) / 20
        at = EPOCH + chance.uniform(0, 10)
        while at < ends_at:
            world.later(at, part.put)
            at += chance.expovariate(1 / pause_s)
        for _ in range(chance.randint(0, 4)):
            at = chance.uniform(EPOCH + 1, ends_at)
            for generation in range(chance.choice([1, 1, 3])):
                world.later(at + generation * chance.choice([0.01, 1.0]), part.reshard)
    world.wait(chance.choice([0.0, 5.0, ends_at - EPOCH + 1]))
    all_of_them = world.several
    world.read(all_of_them[: chance.randint(1, len(all_of_them))])
    query = Query(world, settings_of(world))
    adds_at = chance.uniform(EPOCH, ends_at + 5)
    while world.at < ends_at:
        query.step(crashes=True)
        if world.at >= adds_at and world.several != all_of_them:
            add(query, all_of_them)
    if world.several != all_of_them:
        add(query, all_of_them)
    drain(query, by_available_now=chance.random() < 0.5)
    judge(world, query, is_latest=False)
    return world, query


def add(query, names):
    """The query is started again with more streams: its batches keep their names among them."""
    world = query.world
    (*_, only) = world.several
    if len(world.several) == 1:
        query.batch_of = {f"{only}:{shard}": found for shard, found in query.batch_of.items()}
    world.read(names)
    query.settings = dataclasses.replace(
        query.settings, address=StreamAddress(stream=",".join(names))
    )
    query.open()
    if not query.logged:
        return
    start = query.start_of(query.committed)
    assert query.planner.latest_offset(start).streams.keys() == set(names)


@pytest.mark.parametrize("first", range(0, STORMS, LOT))
def test_rows_of_all_streams_come_once_and_in_order_and_streams_may_be_added(first):
    for seed in range(first, min(first + LOT, STORMS)):
        try:
            storm(seed)
        except BaseException:
            print(f"seed {seed}: replay with storm({seed})")
            raise
