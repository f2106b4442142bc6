"""Which shard a record waits for, and which shards may be sent to now.

A lane is one open shard by its hash range, with the chains that wait for it. A chain is what is
pending of one key, in order; at most one part of it is under way. The map may be stale: a record
then waits in the lane of a closed shard, which only means that it shares that lane's pauses.
Pure: `now` is an argument.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kclrun.codec.hash_keys import effective_hash_key
from kclrun.errors import SettingsError
from kclrun.model.outgoing import PutEntry
from kclrun.model.shard import Shard
from kclrun.sinks.flow_control import BATCH_RECORDS_MAX, Flow, ShardFlow
from kclrun.sinks.producing import REQUEST_BYTES_MAX

__all__ = ["FULL_WEIGHT", "Chain", "Lane", "Lanes", "weight_of"]

# A request is full at 500 records or at 5 MiB: one number for both, in records. A record above
# its share of the bytes weighs as many records as it takes the place of.
FULL_WEIGHT: Final = BATCH_RECORDS_MAX
_SHARE_BYTES: Final = REQUEST_BYTES_MAX // BATCH_RECORDS_MAX


def weight_of(size_bytes: int) -> int:
    """How many five-hundredths of a request a record fills."""
    return max(1, size_bytes // _SHARE_BYTES)


class Chain:
    """What is pending of one key, oldest first, each with its size in bytes.

    `key` None: a record that nothing is ordered with. `lane` is where the chain waits to be sent;
    None while its first records are under way.
    """

    __slots__ = ("entries", "key", "lane", "weight")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.entries: deque[tuple[PutEntry, int]] = deque()
        self.weight = 0
        self.lane: Lane | None = None


class Lane:
    """One open shard: its flow control, and the chains that can be sent there, in order.

    A lane that flow control slowed has one request under way at most, and rests after it.
    `fruitless_since` is when the first of the requests was sent that brought nothing in.
    """

    __slots__ = (
        "flow",
        "fruitless_since",
        "is_listed",
        "is_resting",
        "ready",
        "shard_id",
        "under_way",
        "weight",
    )

    def __init__(self, shard_id: str, flow: ShardFlow) -> None:
        self.shard_id = shard_id
        self.flow = flow
        self.ready: deque[Chain] = deque()
        self.weight = 0
        self.under_way = 0
        self.is_resting = False
        self.is_listed = True
        self.fruitless_since: float | None = None


class Lanes:
    """All open shards of a stream, by hash range. `open_weight` is what could be sent now.

    Raises: SettingsError if no shard is open.
    """

    def __init__(self, shards: Iterable[Shard], flow: Flow) -> None:
        self._flow = flow
        self._by_id: dict[str, Lane] = {}
        self._in_order: list[Lane] = []
        self._starts: list[int] = []
        # The lanes that have something ready, in the order of their turns; those that rest.
        self._ready: dict[Lane, None] = {}
        self._resting: dict[Lane, None] = {}
        self._wakes_at = math.inf
        self.open_weight = 0
        self.remap(shards)

    def remap(self, shards: Iterable[Shard]) -> None:
        """Take in a new listing; what waits moves to the lane it belongs to now."""
        listed = sorted((each.hash_range.start, each.shard_id) for each in shards if each.is_open)
        if not listed:
            raise SettingsError("the stream lists no open shard to write to")
        waiting = [chain for lane in self._in_order for chain in lane.ready]
        for lane in self._in_order:
            lane.ready.clear()
            lane.weight = 0
            lane.is_listed = False
        self._in_order = [self._lane(shard_id) for _, shard_id in listed]
        self._starts = [start for start, _ in listed]
        self._by_id = {lane.shard_id: lane for lane in self._in_order}
        self._flow.keep(self._by_id)
        self._ready.clear()
        self._resting = {lane: None for lane in self._in_order if lane.is_resting}
        self._wakes_at = -math.inf
        self.open_weight = 0
        for chain in waiting:
            self.queue(chain)

    def _lane(self, shard_id: str) -> Lane:
        lane = self._by_id.get(shard_id)
        if lane is None:
            lane = Lane(shard_id, self._flow.of(shard_id))
            # An earlier producer may have left it in the middle of a pause.
            lane.is_resting = not lane.flow.is_off
        lane.is_listed = True
        return lane

    def queue(self, chain: Chain, *, first: bool = False) -> None:
        """Let a chain wait for the shard of its oldest record; `first` before all others."""
        oldest, _ = chain.entries[0]
        hash_key = effective_hash_key(oldest.partition_key, oldest.explicit_hash_key)
        # A listing without the lowest range is stale or torn: its first shard stands in.
        lane = self._in_order[max(0, bisect.bisect_right(self._starts, hash_key) - 1)]
        chain.lane = lane
        if first:
            lane.ready.appendleft(chain)
        else:
            lane.ready.append(chain)
        self._ready[lane] = None
        self.weigh(lane, chain.weight)

    def next_chain(self, lane: Lane) -> Chain:
        """Take the chain whose turn it is out of the queue of a lane that has one."""
        chain = lane.ready.popleft()
        chain.lane = None
        self.weigh(lane, -chain.weight)
        if not lane.ready:
            del self._ready[lane]
        return chain

    def weigh(self, lane: Lane, added: int) -> None:
        """A chain that waits in `lane` has grown, come or gone."""
        lane.weight += added
        if not lane.is_resting:
            self.open_weight += added

    def open(self) -> Sequence[Lane]:
        """The lanes that have something and may be sent it, in the order of their turns."""
        return [lane for lane in self._ready if not lane.is_resting]

    def end_turn(self, lane: Lane) -> None:
        """The lane comes after all others from now on."""
        if lane in self._ready:
            del self._ready[lane]
            self._ready[lane] = None

    def sent(self, lane: Lane) -> None:
        """A request with records of this lane is under way."""
        lane.under_way += 1
        if not lane.flow.is_off:
            self._rest(lane)

    def answered(self, lane: Lane) -> None:
        """That request was answered or failed, and flow control has heard of it."""
        lane.under_way -= 1
        if lane.flow.is_off:
            self._wake(lane)
        else:
            self._rest(lane)
            self._wakes_at = min(self._wakes_at, lane.flow.resume_at)

    def wake(self, now: float) -> None:
        """Open the lanes whose pause is over."""
        if now < self._wakes_at:
            return
        for lane in [*self._rested()]:
            if lane.flow.resume_at <= now:
                self._wake(lane)
        self._wakes_at = min((lane.flow.resume_at for lane in self._rested()), default=math.inf)

    def wakes_at(self) -> float:
        """When the next pause of a lane that has something ends; infinity if there is none."""
        ends = (lane.flow.resume_at for lane in self._rested() if lane.ready)
        return min(ends, default=math.inf)

    def _rested(self) -> Iterator[Lane]:
        return (lane for lane in self._resting if not lane.under_way)

    def _rest(self, lane: Lane) -> None:
        if lane.is_resting or not lane.is_listed:
            return
        lane.is_resting = True
        self._resting[lane] = None
        self.open_weight -= lane.weight

    def _wake(self, lane: Lane) -> None:
        if not lane.is_resting:
            return
        lane.is_resting = False
        self._resting.pop(lane, None)
        self.open_weight += lane.weight
