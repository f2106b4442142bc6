"""The embedded Kinesis of `fleet_rig`, with a tag by which it forgets a closed shard at once.

No call of the API lowers a retention below a day. The tag's value is the id of a closed shard. Its
retention has passed from then on, and so has that of its ancestors, which were closed before it:
ListShards does not show them, and reading them is NotFound.
"""

import json

from kclrun.local import http_server, kinesis_process
from kclrun.local.operations import Answer
from kclrun.local.serving import serve_as_child
from kclrun.model.time import WallTime
from tests.processes.fleet_rig.watched_kinesis import WatchedAnswers

TRIM_TAG = "kclrun-chaos-trim"
_LONG_AGO = WallTime(0.0)


class TrimmingAnswers(WatchedAnswers):
    def __call__(self, kinesis, operation, body, now, region, **more):
        asked = json.loads(body) if operation == "AddTagsToStream" else {}
        shard_id = asked.get("Tags", {}).get(TRIM_TAG)
        if shard_id is None:
            return super().__call__(kinesis, operation, body, now, region, **more)
        stream = kinesis.stream(asked["StreamName"], None, now)
        known = {each.shard_id: each for each in stream.shards(now)}
        found = [shard_id]
        while found:
            shard = known.pop(found.pop(), None)
            if shard is not None:
                assert shard.closed_at is not None, "an open shard is never forgotten"
                shard.closed_at = _LONG_AGO
                found += shard.parents
        stream.trim(now)
        return Answer(200, b"{}")


if __name__ == "__main__":
    http_server.answer = TrimmingAnswers(http_server.answer)
    serve_as_child(kinesis_process._application)
