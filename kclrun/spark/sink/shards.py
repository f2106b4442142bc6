"""The open shards that a sink writes to, read on the driver at most every 30 s.

Spark plans the writer of every micro-batch anew, in a Python process that it keeps for the next
one (and ends after a minute without work): this cache lives in that process. If a listing fails
temporarily, the last one is used; the first one has to succeed.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from kclrun.errors import AccessDenied, NotFound, ServiceError, Throttled, Unavailable
from kclrun.model.retries import PASSING, Retries, repeated
from kclrun.model.shard import Shard
from kclrun.ports import ShardFilter
from kclrun.spark.options import StreamAddress
from kclrun.spark.requests import connected

# A record that was sent by an old map still arrives, because the service routes it. Only flow
# control is less exact for so long, and a reshard itself takes about as long.
_KEPT_S: Final = 30.0
# With pauses from 0.1 s on that double, 3 to 6 s in all. A micro-batch can wait for so long, and so
# can a user for the message that an endpoint cannot be reached.
_ATTEMPTS_MAX: Final = 6
_RETRIES: Final = Retries(attempts_max=_ATTEMPTS_MAX, base_s=0.1)
# The same number as the connections that a process keeps.
_STREAMS_MAX: Final = 16


class OpenShards:
    """The open shards of some streams, remembered for 30 s each; threads may share it.

    `listed` asks the service. `clock` is any clock that does not go back; `chance` is from 0 to 1.
    """

    def __init__(
        self,
        listed: Callable[[StreamAddress], tuple[Shard, ...]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._listed = listed
        self._clock = clock
        self._wait = wait
        self._chance = chance
        self._forget()

    def of(self, address: StreamAddress) -> tuple[Shard, ...]:
        """The open shards of a stream as of at most 30 s ago.

        Raises: NotFound where the stream does not exist, or has no open shards; AccessDenied,
        InvalidRequest; Throttled or Unavailable after six attempts, if there was never an answer.
        """
        with self._lock:
            at, shards = self._read.get(address, (-math.inf, ()))
            if self._clock() - at < _KEPT_S:
                return shards
            try:
                shards = repeated(
                    partial(self._listed, address), _RETRIES, wait=self._wait, chance=self._chance
                )
            except PASSING as error:
                if not shards:
                    raise _not_writable(error, address) from None
            except (NotFound, AccessDenied) as error:
                raise _not_writable(error, address) from None
            self._keep(address, shards)
            return shards

    def _keep(self, address: StreamAddress, shards: tuple[Shard, ...]) -> None:
        self._read[address] = (self._clock(), shards)
        self._read.move_to_end(address)
        if len(self._read) > _STREAMS_MAX:
            self._read.popitem(last=False)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._read: OrderedDict[StreamAddress, tuple[float, tuple[Shard, ...]]] = OrderedDict()

    def forget_in_children(self) -> OpenShards:
        """This object; in a forked child it starts empty, with a lock of its own."""
        os.register_at_fork(after_in_child=self._forget)
        return self


def list_open_shards(address: StreamAddress) -> tuple[Shard, ...]:
    """The open shards now, from one request. Raises: a ServiceError leaf; NotFound for none."""
    listed = connected(address).admin.list_shards(ShardFilter("AT_LATEST"))
    shards = tuple(shard for shard in listed if shard.is_open)
    if not shards:
        raise NotFound("no shard of it is open: it is being created or deleted")
    return shards


def _not_writable(error: ServiceError, address: StreamAddress) -> ServiceError:
    """The same error, with the stream, its place and advice for the user."""
    where = address.endpoint_url or address.region or "the region of this environment"
    message = f"the stream {address.name} at {where} cannot be written to: {error}"
    advice = _WHAT_TO_DO[type(error)]
    return error.reworded(f"{message}\n{advice}")


_WHAT_TO_DO: Final = {
    NotFound: "Check streamName, region and endpointUrl; kclrun does not create streams",
    AccessDenied: "Grant kinesis:ListShards and kinesis:PutRecords on it",
    Throttled: f"ListShards was tried {_ATTEMPTS_MAX} times: too many others list this stream",
    Unavailable: f"Tried {_ATTEMPTS_MAX} times: check endpointUrl, region and the network",
}


_OPEN: Final = OpenShards(list_open_shards).forget_in_children()


def open_shards(address: StreamAddress) -> tuple[Shard, ...]:
    """As `OpenShards.of`, from this process's cache."""
    return _OPEN.of(address)
