"""A producer that can account for every record: which shard has it, at which sequence number.

One thread, one PutRecords after the other; records of a key are numbered from 0. Splits and merges
happen between two calls, after a given number of records, while consumers read on.
"""

import json
import random
import threading
import time
from collections import Counter, defaultdict

from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.processor.ledger_processor import digest

_RECORDS_A_CALL_MAX = 500


class Producer:
    """Puts `total` records at `rate` a second (None: as fast as it goes).

    `reshards`: (after how many records, "split" or "merge", index among the open shards in the
    order of their hash ranges). `pauses`: it pauses by itself after so many records, each until
    `resume`. `put` maps a shard to its (sequence number, key, n), in order.
    """

    def __init__(
        self, kinesis, stream, total, *, seed, rate=None, reshards=(), pauses=(), keys=200
    ):
        self.put = defaultdict(list)
        self.failure = None
        # Called after each reshard, in this producer's thread, with the shards that it closed.
        self.resharded = lambda closed: None
        self._kinesis = kinesis
        self._stream = stream
        self._total = total
        self._rate = rate
        self._reshards = sorted(reshards)
        self._pauses = sorted(pauses)
        self._random = random.Random(seed)
        self._keys = [f"key-{number}" for number in range(keys)]
        self._counts = Counter()
        self._may_put = threading.Event()
        self._may_put.set()
        self._between_calls = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="producer")

    def start(self):
        self._thread.start()
        return self

    @property
    def has_started(self):
        return self._thread.ident is not None

    @property
    def is_done(self):
        if self.failure is not None:
            raise self.failure
        return not self._thread.is_alive()

    @property
    def total_put(self):
        return sum(len(records) for records in tuple(self.put.values()))

    @property
    def is_paused(self):
        """Whether it waits for `resume`. Its failure is raised here: it would never pause."""
        return not self.is_done and not self._may_put.is_set()

    def pause(self):
        """Returns once no call is under way."""
        self._may_put.clear()
        with self._between_calls:
            pass

    def resume(self):
        self._may_put.set()

    def reshard(self, how, index):
        """Split or merge now, between two calls; as `reshards`."""
        with self._between_calls:
            self._reshard(how, index)

    def join(self, timeout_s=HUNG_S):
        self._thread.join(timeout_s)
        assert self.is_done, "the producer is not done in time"

    def stop(self):
        self._is_stopping = True
        self._may_put.set()
        if self.has_started:
            self._thread.join()

    def _run(self):
        try:
            self._produce()
        except Exception as error:
            self.failure = error

    def _produce(self):
        done, began = 0, time.monotonic()
        pace = _RECORDS_A_CALL_MAX if self._rate is None else max(1, self._rate // 20)
        while done < self._total and not self._is_stopping:
            if self._pauses and self._pauses[0] <= done:
                self._pauses.pop(0)
                self._may_put.clear()
            paused_at = time.monotonic()
            self._may_put.wait()
            # A pause is not made up for: the pace goes on from where it was.
            began += time.monotonic() - paused_at
            with self._between_calls:
                while self._reshards and self._reshards[0][0] <= done:
                    self._reshard(*self._reshards.pop(0)[1:])
                done += self._put(min(pace, _RECORDS_A_CALL_MAX, self._total - done))
            if self._rate is not None:
                # A pace, not a wait for anything.
                time.sleep(max(0.0, began + done / self._rate - time.monotonic()))
        while self._reshards and not self._is_stopping:
            self._reshard(*self._reshards.pop(0)[1:])

    def _put(self, size):
        entries = []
        for key in self._random.choices(self._keys, k=size):
            number = self._counts[key]
            self._counts[key] += 1
            entries.append((key, number))
        answer = self._kinesis.put_records(
            StreamName=self._stream,
            Records=[
                {
                    "PartitionKey": key,
                    "Data": json.dumps({"key": key, "n": number, "digest": digest(key, number)}),
                }
                for key, number in entries
            ],
        )
        assert answer["FailedRecordCount"] == 0, "the rig's puts are never refused"
        for (key, number), result in zip(entries, answer["Records"], strict=True):
            self.put[result["ShardId"]].append((result["SequenceNumber"], key, number))
        return size

    def _is_active(self):
        summary = self._kinesis.describe_stream_summary(StreamName=self._stream)
        return summary["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE"

    def _reshard(self, how, index):
        until(self._is_active)  # the reshard before it
        open_ones = {"Type": "AT_LATEST"}
        shards = sorted(
            self._kinesis.list_shards(StreamName=self._stream, ShardFilter=open_ones)["Shards"],
            key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]),
        )
        chosen = shards[index]
        closed = [chosen["ShardId"]]
        if how == "split":
            first = int(chosen["HashKeyRange"]["StartingHashKey"])
            last = int(chosen["HashKeyRange"]["EndingHashKey"])
            self._kinesis.split_shard(
                StreamName=self._stream,
                ShardToSplit=chosen["ShardId"],
                NewStartingHashKey=str((first + last) // 2 + 1),
            )
        else:
            closed.append(shards[index + 1]["ShardId"])
            self._kinesis.merge_shards(
                StreamName=self._stream,
                ShardToMerge=chosen["ShardId"],
                AdjacentShardToMerge=shards[index + 1]["ShardId"],
            )
        self.resharded(closed)
