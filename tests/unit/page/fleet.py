"""A small fleet as the page reads it: values of every kind, at times of the test's own."""

from kclrun.model.lease import Halt, Handoff, Lease, Load, OwnerId
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.operating.doctor.findings import Finding, Kind
from kclrun.operating.summaries import Lag, lag_summary
from kclrun.page.lag_history import LagHistory
from kclrun.page.snapshot import About, Owners, ReadProblem, ShownOutput, Snapshot
from tests.support.build import key, shard

NOW = WallTime(1_780_000_000.0)
A, B = OwnerId("kclrun:az1:host-1:1a2b"), OwnerId("kclrun:az2:host-2:77aa")
JAVA = OwnerId("java-worker-17")
NUMBER = "49671234567890123456789012345678901234567890123456789012"
ABOUT = About(
    application="orders",
    streams="orders",
    table="orders-leases",
    place="region us-east-1",
    leases_command="kclrun leases --config app.yaml",
    doctor_command="kclrun doctor --config app.yaml",
    letters_command="kclrun dead-letters --config app.yaml",
    letters="Dead letters are kept in: queue orders-dead.",
    outputs=(ShownOutput("output", "output", "s3://rows/orders", 60.0),),
    plan=(("Application", (("application", "orders"),)),),
)


def lease(number: int, owner: OwnerId | None = A, **fields: object) -> Lease:
    fields = {"checkpoint": ExtendedSequenceNumber(NUMBER), "counter": 7} | fields
    return Lease(key=key(number), owner=owner, **fields)


def snapshot_of(*leases: Lease, **fields: object) -> Snapshot:
    given = {"taken_at": NOW, "leases": {each.key: each for each in leases}} | fields
    return Snapshot(**given)


def behind(number: int, seconds: float | None, state: str = "owned", note: str = "") -> object:
    at = None if seconds is None else WallTime(NOW - seconds)
    return lag_summary(
        shard=key(number),
        state=state,
        owner="",
        checkpoint="",
        lag=Lag(seconds, at, note=note),
        retention_s=86_400.0,
        note="",
    )


def small_fleet() -> Snapshot:
    """Two owners and a Java worker: a split, a halt, an expired lease, a request, a broken row."""
    leases = (
        lease(0, checkpoint=SHARD_END, children=frozenset({key(3), key(4)})),
        lease(1, load=Load(120.5, 0.25), halt=Halt("ValueError: no number", WallTime(NOW - 600))),
        lease(2, B, handoff=Handoff(A, WallTime(NOW - 3)), owner_switches=6),
        lease(3, A, checkpoint=TRIM_HORIZON, parents=frozenset({key(0)}), load=Load(1.0, 0.1)),
        lease(
            4,
            JAVA,
            parents=frozenset({key(0)}),
            outputs=StoredCursors(
                ExtendedSequenceNumber(NUMBER),
                (("output", Cursor(ExtendedSequenceNumber(NUMBER), 2)),),
            ),
        ),
        lease(5, None, checkpoint=TRIM_HORIZON),
    )
    lags = {key(n): behind(n, s) for n, s in ((1, 600.0), (2, 4.0), (3, 75.0), (4, None))}
    history = LagHistory()
    for seconds in (1.0, 30.0, 600.0):
        history.add({key(1): seconds, key(2): 4.0, key(3): 75.0, key(4): None})
    return snapshot_of(
        *leases,
        table_at=WallTime(NOW - 2),
        lags_at=WallTime(NOW - 12),
        broken={"shardId-broken": "leaseCounter is no number"},
        shards={key(n): shard(n, *([0] if n in (3, 4) else [])) for n in range(6)},
        lags=lags,
        history=history.look(),
        owners=Owners(frozenset({JAVA}), frozenset({key(4)})),
        findings=(Finding(kind=Kind.HOLE, keys=(key(6),), evidence="it is listed and has no row"),),
        findings_at=NOW,
        problems=(ReadProblem("The lag cannot be measured", "AccessDenied", WallTime(NOW - 30)),),
    )
