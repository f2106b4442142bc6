"""Positions, tokens and instances of processors on Spark, without Spark."""

import random

import msgspec
import pytest

from kclrun.errors import StaleCheckpoint
from kclrun.model.record import Record
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.spark import positions
from kclrun.spark.processors.range_progress import (
    Absent,
    Found,
    Key,
    ProcessorCache,
    RangeProgress,
    RangeReport,
    Stale,
    begins_at,
    cut,
    fencing_token,
)
from tests.seeds import seed_of
from tests.support.tables import over_rows


def record(number, sub=0, size=3):
    return Record(b"x" * size, "key", str(number), sub_sequence_number=sub)


@over_rows(
    ("begin", "expected"),
    [
        (positions.TRIM_HORIZON, TRIM_HORIZON),
        (positions.at_timestamp(1_700_000_000_000), AT_TIMESTAMP),
        (positions.after("20"), ExtendedSequenceNumber("20")),
        (positions.after("20", 3), ExtendedSequenceNumber("20", 3)),
        (positions.before("20"), ExtendedSequenceNumber("19")),
        (positions.before("0"), TRIM_HORIZON),
    ],
)
def test_all_at_or_below_the_beginning_is_accounted_for_and_nothing_else(begin, expected):
    assert begins_at(begin) == expected
    if begin.is_before:
        assert expected < record(begin.number).position


def test_a_later_attempt_has_the_greater_fencing_token():
    begun_s = 1_795_000_000
    attempts = [(begun_s + s, task) for s in (0, 1, 90) for task in (0, 1, 17, 2**31)]

    tokens = [fencing_token(*attempt) for attempt in attempts]

    assert tokens == sorted(set(tokens))
    assert fencing_token(3_700_000_000, 2**32 - 1) < 2**63  # in 2087


def test_a_page_is_given_in_batches_and_uncopied_where_it_fits():
    page = [record(number) for number in range(7)]

    assert [len(batch) for batch in cut(page, 3)] == [3, 3, 1]
    assert [record for batch in cut(page, 3) for record in batch] == page
    assert next(cut(page, 7)) is page
    assert list(cut([], 3)) == []


def test_the_account_of_two_instances_is_their_sum_from_the_later_ones_position():
    counts = {"records": 1, "bytes": 2, "rows": 4}
    first = RangeReport(
        shard_id="s",
        position="5",
        checkpoint="4",
        **{**counts, "processing_s": 0.1000004},
    )
    later = msgspec.structs.replace(
        first, **{each: 10 * n for each, n in counts.items()}, position="9", checkpoint=None
    )

    both = first.then(later)
    assert both == msgspec.structs.replace(
        later, **{each: 11 * n for each, n in counts.items()}, checkpoint="4", processing_s=0.200001
    )
    assert first.then(msgspec.structs.replace(later, checkpoint="8")).checkpoint == "8"


def test_a_checkpoint_is_admitted_between_the_last_one_and_what_was_delivered():
    progress = RangeProgress(ExtendedSequenceNumber("10"), 1000)
    progress.deliver([record(20), record(30)])

    progress.checkpoint(ExtendedSequenceNumber("20"))
    with pytest.raises(StaleCheckpoint, match="nothing above 30"):
        progress.checkpoint(ExtendedSequenceNumber("31"))
    with pytest.raises(StaleCheckpoint, match="the last checkpoint is 20"):
        progress.checkpoint(ExtendedSequenceNumber("19"))
    progress.checkpoint(None)

    assert str(progress.checkpointed) == "30"


def test_the_commit_of_a_range_is_a_checkpoint_for_the_next():
    progress = RangeProgress(TRIM_HORIZON, 1000)
    progress.process(progress.deliver([record(10), record(20)]), 0.0)
    progress.continue_with_next_range()

    with pytest.raises(StaleCheckpoint, match="the last checkpoint is 20"):
        progress.checkpoint(ExtendedSequenceNumber("10"))
    assert progress.report("shardId-0", rows=0).checkpoint is None


KEY = Key("run", "app", "stream", "shardId-0")


def test_states_are_bounded_together_and_the_latest_is_kept_however_large_it_is():
    cache = ProcessorCache(states_bytes_max=100)
    shards = [KEY._replace(shard_id=name) for name in "abcd"]

    assert cache.keep(shards[0], positions.after("1"), "a", 60) == ()
    assert cache.keep(shards[1], positions.after("1"), "b", 40) == ()
    assert cache.keep(shards[2], positions.after("1"), "c", 10) == ("a",)
    assert cache.keep(shards[1], positions.after("2"), "b again", 90) == ("b",)
    assert cache.keep(shards[3], positions.after("1"), "d", 500) == ("c", "b again")
    assert len(cache) == 1
    assert cache.take(shards[3], positions.after("1")) == Found("d")


def test_kept_instances_are_bounded_and_the_longest_kept_goes_first():
    seed = seed_of()
    chance = random.Random(seed)
    cache, model = ProcessorCache(instances_max=5), {}

    for step in range(2_000):
        key = KEY._replace(shard_id=f"shardId-{chance.randrange(12)}")
        where = positions.after(str(chance.randrange(3)))
        if chance.random() < 0.6:
            dropped = [model.pop(key)] if key in model else []
            model[key] = (where, step)
            dropped += [model.pop(next(iter(model)))] if len(model) > 5 else []
            expected = tuple(instance for _, instance in dropped)
            assert cache.keep(key, where, step) == expected, f"seed {seed}, step {step}"
        else:
            at, instance = model.pop(key, (None, None))
            kind = Absent() if at is None else (Found if at == where else Stale)(instance)
            assert cache.take(key, where) == kind, f"seed {seed}, step {step}"
        assert len(cache) == len(model) <= 5
