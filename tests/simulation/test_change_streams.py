"""Storms over the stream of a DynamoDB table: no children at the end of a shard, no hash keys, two
children that are listed one long after the other, and shards that are trimmed in any order.
"""

from functools import partial

import msgspec
import pytest

from kclrun.errors import InvariantViolation
from kclrun.lease import events
from kclrun.leases import cleanup
from kclrun.local import shard_log
from kclrun.model.shard import ALL_HASH_KEYS, is_of_changes
from kclrun.simulation import fleet
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.delivery_queue import SimulatedDeliveryQueue
from kclrun.simulation.shards import ShardStream
from tests.support.storms.dense import dense_storm, expiring_storm
from tests.support.storms.playing import play

# How much later than its elder the second child of a shard is listed: beyond the minute for which
# an ended row stays.
LATE_S = 90.0


class ChangeStream(ShardStream):
    """As the wire reader of DynamoDB Streams shows it to the cores."""

    def listing(self, now):
        shown = super().listing(now)
        kept = [shard for shard in shown if self._is_listed(shard.shard_id, now)]
        parents = {parent for shard in kept for parent in shard.parents}
        return tuple(
            msgspec.structs.replace(
                shard,
                hash_range=ALL_HASH_KEYS,
                ending_sequence_number=shard.ending_sequence_number
                or ("1" if shard.shard_id in parents else None),
            )
            for shard in kept
        )

    def _is_listed(self, shard_id, now):
        """A shard lives for hours, and is listed within seconds: so before its children."""
        log = self._logs.get(shard_id)
        if log is None or not log.parents or self.is_expired(log.parents[0]):
            return True
        if not self._is_listed(log.parents[0], now):
            return False
        elder = self._children[log.parents[0]][0]
        age_s = now - (log.created_at - WORLD_BEGAN_AT)
        return log is elder or age_s >= LATE_S


def end_without_children(queue):
    if queue.fetching.is_expired:
        queue._post(events.ShardExhausted((), is_expired=True))
        return
    queue._observer.shard_exhausted(queue._reader)
    queue._post(events.ShardExhausted(()))


@pytest.fixture
def of_changes(monkeypatch):
    made = lambda number: f"shardId-{number:020}-{number * 7919 % 65536:08x}"  # noqa: E731
    monkeypatch.setattr(shard_log, "shard_id_of", made)
    monkeypatch.setattr(fleet, "ShardStream", ChangeStream)
    monkeypatch.setattr(SimulatedDeliveryQueue, "_report_exhausted", end_without_children)
    assert is_of_changes(made(3))


DENSE = partial(dense_storm, minutes=8)


def storm(seed, drawn=DENSE):
    """Without merges; and the last split is early enough for its second child to be listed before
    the calm, which demands that what is listed is read. A shard is trimmed after its children were
    listed: a day is longer than a listing lags."""
    profile = drawn(seed)
    splits_until_s = profile.storm_s - 1.5 * LATE_S
    strikes = tuple(
        msgspec.structs.replace(each, lasts_s=2 * LATE_S) if each.kind == "expire_shards" else each
        for each in profile.strikes
        if each.kind not in {"merge_shards", "delete_row"}
        and (each.kind != "split_shard" or each.at_s < splits_until_s)
    )
    return msgspec.structs.replace(profile, strikes=strikes, java_workers=0)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("seed", "drawn"),
    [
        (1, DENSE),
        pytest.param(5, DENSE, marks=pytest.mark.long),
        pytest.param(0, expiring_storm, marks=pytest.mark.long),
    ],
)
def test_storms_over_such_a_stream_lose_nothing_and_read_no_shard_twice(seed, drawn, of_changes):
    played = play(storm(seed, drawn), replay=f"tests/simulation/test_change_streams.py: {seed}")

    assert played.records > 1000
    assert not played.is_short


@pytest.mark.seconds
def test_an_ended_row_that_goes_while_its_shard_is_listed_is_found(of_changes, monkeypatch):
    monkeypatch.setattr(cleanup, "_may_have_more_children", lambda *_: False)

    with pytest.raises(InvariantViolation, match="I11"):
        play(storm(1))
