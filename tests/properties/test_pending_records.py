"""The records that a producer holds, under any order of refusals, failures and reshards."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kclrun.codec.kpl import effective_hash_key, open_aggregates
from kclrun.errors import Unavailable
from kclrun.model.record import PutResult, Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from tests.unit.producing.test_pending_records import THROTTLED, entry, pending


class Stream:
    """The shards of a stream that are split and merged, and what they have as the KCL reads it: a
    user record outside of its shard's hash keys does not count."""

    def __init__(self, chance):
        self._chance = chance
        self._made = 0
        self._shards = [self._new(0, HASH_KEY_MAX)]
        self._closed = []
        self.log = []

    def _new(self, start, end):
        self._made += 1
        return Shard(f"shardId-{self._made:012}", HashRange(start, end), "1")

    def listing(self):
        return (*self._closed, *self._shards)

    def reshard(self):
        """Split a shard, or merge two neighbours."""
        number = self._chance.randrange(len(self._shards))
        if self._chance.random() < 0.6 and len(self._shards) < 6:
            (whole,) = closed = self._shards[number : number + 1]
            middle = (whole.hash_range.start + whole.hash_range.end) // 2
            made = [
                self._new(whole.hash_range.start, middle),
                self._new(middle + 1, whole.hash_range.end),
            ]
        else:
            closed = self._shards[number : number + 2]
            made = [self._new(closed[0].hash_range.start, closed[-1].hash_range.end)]
        self._shards[number : number + len(closed)] = made
        self._closed += [Shard(each.shard_id, each.hash_range, "1", "2") for each in closed]

    def put(self, put):
        """The shard of its hash key has it."""
        hash_key = effective_hash_key(put.partition_key, put.explicit_hash_key)
        shard = next(each for each in self._shards if hash_key in each.hash_range)
        for record in open_aggregates([Record(put.data, put.partition_key, "1")]):
            hash_key = effective_hash_key(record.partition_key, record.explicit_hash_key)
            # A record by itself has lost its explicit hash key: the service has looked at it.
            if not record.aggregated or hash_key in shard.hash_range:
                self.log.append(int(record.data))
        return PutResult("1", shard.shard_id)


@settings(deadline=None)  # a storm is as long as its chances make it
@given(
    count=st.integers(1, 200),
    mode=st.sampled_from(["ordered", "aggregates", "unordered"]),
    seed=st.integers(0, 2**32),
)
def test_a_storm_of_refusals_failures_and_reshards_loses_nothing_and_keeps_the_order(
    count, mode, seed
):
    """Four requests at once, answered in any order; every outcome the service has, and reshards
    that the producer learns of late."""
    chance = random.Random(seed)
    keys = [(chance.randrange(12), chance.choice([None, None, "0"])) for _ in range(count)]

    def name(put):
        """What keeps its order: with aggregates, a key with each explicit hash key by itself."""
        hash_key = put.explicit_hash_key if mode == "aggregates" else None
        return put.partition_key, hash_key

    stream = Stream(chance)
    core = pending(
        stream.listing(),
        keeps_order=mode != "unordered",
        aggregates=mode == "aggregates",
        give_up_after_s=1e9,
    )
    under_way, waiting = [], [*enumerate(keys)]
    sent_twice, now = False, 0.0
    listing = stream.listing()
    for _ in range(20_000):
        now += chance.choice([0.0, 0.001, 0.1, 5.0])
        for number, (key, hash_key) in waiting[:3]:
            core.add(entry(number, f"key{key}", hash_key))
        del waiting[:3]
        if len(under_way) < 4 and (request := core.take(now, hurried=chance.random() < 0.5)):
            assert request.entries
            under_way.append(request)
        if mode != "unordered":
            together = [
                key
                for request in under_way
                for part in request.parts
                for key in {name(part.queue.entries[held].entry) for held in range(part.held)}
            ]
            assert len(together) == len(set(together)), "a key is under way twice"
        if chance.random() < 0.05:
            stream.reshard()
        if core.is_stale and chance.random() < 0.5:
            core.remap(chance.choice([listing, stream.listing()]))  # an old one, or the newest
            listing = stream.listing()
        if under_way and chance.random() < 0.7:
            request = under_way.pop(chance.randrange(len(under_way)))
            outcome = chance.choice(["taken", "some", "some", "none", "failed", "unknown"])
            results = [
                stream.put(put)
                if outcome in {"taken", "unknown"} or (outcome == "some" and chance.random() < 0.6)
                else THROTTLED
                for put in request.entries
            ]
            if outcome in {"failed", "unknown"}:
                sent_twice = sent_twice or outcome == "unknown"
                core.fail(request, Unavailable("no"), now, chance.random())
            else:
                core.settle(request, results, now)
        if not waiting and not core.backlog.records:
            break

    assert core.backlog.records == core.backlog.bytes == 0
    assert core.take(now + 100.0, hurried=True) is None
    assert core.due_at(now + 100.0, hurried=True) == float("inf")
    firsts = list(dict.fromkeys(stream.log))
    assert sorted(firsts) == list(range(len(keys)))
    if not sent_twice:
        assert len(stream.log) == len(keys), "the KCL reads a record twice"
    if mode != "unordered":
        names = [name(entry(0, f"key{key}", hash_key)) for key, hash_key in keys]
        for one in set(names):
            of_one = [number for number in firsts if names[number] == one]
            assert of_one == sorted(of_one)
