"""The embedded Kinesis, noting each listing and the first GetRecords of each new reader.

A reader begins with GetShardIterator; the iterator it was given names the shard of the GetRecords
that follows.
"""

import json

from kclrun.local import http_server, kinesis_process
from kclrun.local.serving import serve_as_child
from tests.processes.fleet_rig.noting import Noter

# Iterators that nobody has used yet; a reader that was stopped in between leaves its own.
_UNUSED_MAX = 10_000


class WatchedAnswers:
    """Stands in for `operations.answer`."""

    def __init__(self, answer):
        self._answer = answer
        self._noter = Noter()
        self._shards = {}

    def __call__(self, kinesis, operation, body, now, **more):
        if operation == "GetRecords":
            shard = self._shards.pop(json.loads(body)["ShardIterator"], None)
            if shard is not None:
                self._noter.note("first_read", **shard)
        elif operation == "ListShards":
            self._noter.note("list_shards", stream=json.loads(body).get("StreamName"))
        given = self._answer(kinesis, operation, body, now, **more)
        if operation == "GetShardIterator" and given.status == 200:
            asked = json.loads(body)
            stream = asked.get("StreamName") or asked["StreamARN"].rpartition("/")[2]
            iterator = json.loads(given.body)["ShardIterator"]
            self._shards[iterator] = {"stream": stream, "shard": asked["ShardId"]}
            if len(self._shards) > _UNUSED_MAX:
                self._shards.pop(next(iter(self._shards)))
        return given


if __name__ == "__main__":
    http_server.answer = WatchedAnswers(http_server.answer)
    serve_as_child(kinesis_process._application)
