"""What a manager tells a lease process at its start, for a process that reaches no AWS."""

import msgspec

from kclrun.ipc.board import StartSpec
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy, FetchPolicy, LogPolicy
from kclrun.model.wire import WireCredentials, WireEndpoint

NOWHERE = WireEndpoint(url="http://127.0.0.1:9", region="x", signing_region="x")
SPEC = StartSpec(
    application="test",
    stream_name="s",
    lease_key="s0",
    shard_id="s0",
    owner="kclrun::h:n",
    seen_counter=1,
    place=0,
    incarnation=1,
    expires_instant=1.0,
    failover_s=10.0,
    processor="m:C",
    fetch=FetchPolicy(idle_s=1.0, buffer_bytes=1, batch_max=1, kpl_range="keep"),
    checkpoint=CheckpointPolicy(mode="auto", every_s=10.0, uncheckpointed_max=1),
    on_error=ErrorPolicy(retries=0, backoff_s=1.0),
    table_name="t",
    kinesis=NOWHERE,
    dynamodb=NOWHERE,
    credentials=WireCredentials("AKIAEXAMPLEEXAMPLE", "s"),
    lock_path="/nonexistent",
    log=LogPolicy(level="info", json=True),
)


def specified(start, place, incarnation, **changed):
    """For the command `start`, as the manager's loop makes it."""
    return msgspec.structs.replace(
        SPEC,
        lease_key=start.key,
        shard_id=start.key,
        seen_counter=start.counter,
        place=place,
        incarnation=incarnation,
        expires_instant=start.expires_instant,
        **changed,
    )
