"""A worker of the Java KCL 2.x as the lease table sees it.

It renews what it holds, checkpoints, and lets go of what somebody else has taken.
"""

import threading


class JavaWorker:
    """Renews its leases every `every_s`, each under the condition on the counter alone."""

    def __init__(self, dynamodb, table, owner, every_s):
        self._dynamodb = dynamodb
        self._table = table
        self._owner = owner
        self._every_s = every_s
        self._held = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="java-worker")

    def start(self, counters):
        """Hold these leases: counters by shard."""
        self._held = dict(counters)
        self._thread.start()
        return self

    @property
    def holds(self):
        with self._lock:
            return sorted(self._held)

    def checkpoint(self, shard_id, number, sub=0):
        """As its processor asked; False if the lease is not its own any more."""
        return self._write(
            shard_id,
            "SET leaseCounter = :next, #c = :number, checkpointSubSequenceNumber = :sub",
            {":number": {"S": number}, ":sub": {"N": str(sub)}},
            {"#c": "checkpoint"},
        )

    def die(self):
        """As a machine that is gone: nothing is released."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _renew(self):
        while not self._stop.wait(self._every_s):
            for shard_id in self.holds:
                self._write(shard_id, "SET leaseCounter = :next", {}, None)

    def _write(self, shard_id, change, values, names):
        with self._lock:
            counter = self._held.get(shard_id)
            if counter is None:
                return False
            try:
                self._dynamodb.update_item(
                    TableName=self._table,
                    Key={"leaseKey": {"S": shard_id}},
                    UpdateExpression=change,
                    ConditionExpression="leaseCounter = :seen",
                    ExpressionAttributeValues={
                        ":seen": {"N": str(counter)},
                        ":next": {"N": str(counter + 1)},
                        **values,
                    },
                    **({"ExpressionAttributeNames": names} if names else {}),
                )
            except self._dynamodb.exceptions.ConditionalCheckFailedException:
                del self._held[shard_id]
                return False
            self._held[shard_id] = counter + 1
            return True
