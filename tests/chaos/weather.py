"""Which faults come when, drawn from a seed: a handful at any time, now and then a partition."""

import random

from tests.chaos.faults import Fault

_WRITES = ("UpdateItem", "PutItem", "TransactWriteItems", "DeleteItem")
_TABLE_READS = ("GetItem", "BatchGetItem", "Query", "Scan")
_STREAM_READS = ("GetRecords", "GetShardIterator", "SubscribeToShard")
_LISTINGS = ("ListShards", "Scan", "DescribeStreamSummary")
_OPERATIONS = (_WRITES, _WRITES, _TABLE_READS, _STREAM_READS, _LISTINGS, ())
_WEIGHTS = {
    "delay": 4,
    "throttle": 4,
    "fail": 3,
    "fail_after": 4,
    "cut_before": 3,
    "cut_after": 5,
    "cut_amid": 4,
    "repeat": 4,
    "echo": 4,
    "stall": 2,
    "slice": 2,
    "expire": 2,
    "page": 2,
}
# How long the faults of a kind last that are no matter of an instant.
_SECONDS = {"delay": (0.05, 1.5), "echo": (0.05, 4.0), "stall": (0.5, 6.0), "slice": (0.05, 0.5)}
_LASTS_S = (2.0, 12.0)
_PAUSE_S = (0.3, 2.7)
_SHARES = (0.05, 0.6)
# One in ten is a partition: one manager, one service or both, everything. Most are short; the long
# ones leave whoever was cut off beyond his fence, and his leases with others, for a while.
_PARTITION_SHARE = 1 / 10
_PARTITION_FAILOVERS = (0.2, 4.0)
_DEEP_FAILOVERS = 3.0


def foretell(seed, managers, storm_s, failover_s):
    """The faults of a whole storm, in the order of their starts."""
    rng = random.Random(f"weather {seed}")
    faults, at_s = [], rng.uniform(*_PAUSE_S)
    while at_s < storm_s:
        if rng.random() < _PARTITION_SHARE:
            faults += _partition(rng, managers, at_s, failover_s)
        else:
            faults.append(_fault(rng, managers, at_s))
        at_s += rng.uniform(*_PAUSE_S)
    faults += _deep_partitions(managers[-1], storm_s, failover_s)
    return sorted(faults, key=lambda fault: fault.start_s)


def _fault(rng, managers, at_s):
    kind = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    operations = rng.choice(_OPERATIONS)
    if kind == "expire":
        operations = ("GetRecords",)
    elif kind == "page":
        operations = ("Scan", "ListShards")
    # A quarter of them concern everybody: what the services themselves do.
    concerned = managers if rng.random() < 0.25 else [rng.choice(managers)]
    return Fault(
        kind=kind,
        start_s=at_s,
        duration_s=rng.uniform(*_LASTS_S),
        operations=operations,
        doors=_doors(concerned, ("kinesis", "dynamodb")),
        share=rng.uniform(*_SHARES),
        seconds=rng.uniform(*_SECONDS.get(kind, (0.0, 0.0))),
    )


def _partition(rng, managers, at_s, failover_s):
    services = rng.choice((("kinesis",), ("dynamodb",), ("kinesis", "dynamodb")))
    return [
        Fault(
            # What is sent is lost, or what is answered, or nobody says anything at all.
            kind=rng.choice(("cut_before", "cut_after", "stall")),
            start_s=at_s,
            duration_s=_mostly_short(rng, _PARTITION_FAILOVERS) * failover_s,
            doors=_doors([rng.choice(managers)], services),
            seconds=6.0,
        )
    ]


def _deep_partitions(manager, storm_s, failover_s):
    """However short the storm: one manager loses its leases to others and cannot know it, and reads
    nothing for so long that parents of a merge end far apart."""
    return [
        Fault(
            kind="cut_before",
            start_s=storm_s * part,
            duration_s=_DEEP_FAILOVERS * failover_s,
            doors=_doors([manager], [service]),
        )
        for part, service in ((0.3, "dynamodb"), (0.6, "kinesis"))
    ]


def _mostly_short(rng, bounds):
    least, most = bounds
    return least + (most - least) * rng.random() ** 2


def _doors(managers, services):
    return tuple(f"{manager}/{service}" for manager in managers for service in services)
