"""The records that a producer holds, under any order of refusals, failures and reshards."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kclrun.codec.kpl import open_aggregates
from kclrun.errors import Unavailable
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from tests.unit.producing.test_pending_records import LOW, THROTTLED, TWO, PutResult, entry, pending


@settings(deadline=None)  # a storm is as long as its chances make it
@given(
    count=st.integers(1, 200),
    mode=st.sampled_from(["ordered", "aggregates", "unordered"]),
    seed=st.integers(0, 2**32),
)
def test_a_storm_of_refusals_failures_and_reshards_loses_nothing_and_keeps_the_order(
    count, mode, seed
):
    """Four requests at once, answered in any order; every outcome the service has, and reshards."""
    chance = random.Random(seed)
    keys = [chance.randrange(12) for _ in range(count)]
    core = pending(
        keeps_order=mode != "unordered", aggregates=mode == "aggregates", give_up_after_s=1e9
    )
    log, under_way, waiting = [], [], [*enumerate(keys)]
    sent_twice, now = False, 0.0
    for _ in range(20_000):
        now += chance.choice([0.0, 0.001, 0.1, 5.0])
        for number, key in waiting[:3]:
            core.add(entry(number, f"key{key}", chance.choice([None, None, "0"])))
        del waiting[:3]
        if len(under_way) < 4 and (request := core.take(now, hurried=chance.random() < 0.5)):
            assert request.entries
            under_way.append(request)
        if mode != "unordered":
            together = [put.partition_key for each in under_way for put in each.entries]
            assert len(together) == len(set(together)), "a key is under way twice"
        if chance.random() < 0.05:
            core.remap(chance.choice([TWO, (Shard("shardId-9", HashRange(0, HASH_KEY_MAX), "9"),)]))
        if under_way and chance.random() < 0.7:
            request = under_way.pop(chance.randrange(len(under_way)))
            outcome = chance.choice(["taken", "some", "some", "none", "failed", "unknown"])
            arrived = [
                put
                for put in request.entries
                if outcome in {"taken", "unknown"} or (outcome == "some" and chance.random() < 0.6)
            ]
            log += [
                int(each.data)
                for put in arrived
                for each in open_aggregates([Record(put.data, put.partition_key, "1")])
            ]
            if outcome in {"failed", "unknown"}:
                sent_twice = sent_twice or outcome == "unknown"
                core.fail(request, Unavailable("no"), now, chance.random())
            else:
                came = {id(put) for put in arrived}
                core.settle(
                    request,
                    [
                        PutResult("1", LOW) if id(put) in came else THROTTLED
                        for put in request.entries
                    ],
                    now,
                )
        if not waiting and not core.waiting_records:
            break

    assert core.waiting_records == core.waiting_bytes == 0
    assert core.take(now + 100.0, hurried=True) is None
    assert core.due_at(now + 100.0, hurried=True) == float("inf")
    firsts = list(dict.fromkeys(log))
    assert sorted(firsts) == list(range(len(keys)))
    if not sent_twice:
        assert len(log) == len(keys)
    if mode != "unordered":
        for key in set(keys):
            of_key = [number for number in firsts if keys[number] == key]
            assert of_key == sorted(of_key)
