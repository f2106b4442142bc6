"""Balance that stays: shares by owner and by group, then no move at all; and what a fleet asks.

Real managers with a short failover; no records, so the leases themselves are all there is to see.
`KCLRUN_FLEET_LONG=1` counts requests with the default failover, to be held against the Java KCL's.
"""

import os
import time

import pytest

from tests.patience import HUNG_S

pytest_plugins = ("tests.processes.fleet_rig.fixtures",)
pytestmark = pytest.mark.slow

IS_LONG = os.environ.get("KCLRUN_FLEET_LONG") == "1"
FAILOVER_S = 3.0
# The simulator looks for two minutes of its own time, over many more fleets.
CYCLES = 10 if IS_LONG else 5


def test_groups_settle_at_their_share_and_then_nothing_moves(watched_aws, fleet):
    """Of the unequal ones here; of many more in tests/properties/test_leases_balance.py."""
    shards = 15
    fleet = fleet(watched_aws.stream(shards), failover_s=FAILOVER_S)
    for group, count in {"x": 2, "y": 4}.items():
        fleet.add_all([f"{group}{number}" for number in range(count)], group)

    rested_s, counts = fleet.until_at_rest(shards)

    print(f"at rest after {rested_s:.1f} s: {counts}")
    assert fleet.moves_in_cycles(CYCLES) == []
    assert fleet.is_settled(shards)


def test_what_a_settled_fleet_asks_of_dynamodb(watched_aws, fleet):
    """Counted at the server; no record comes, so no checkpoint."""
    failover_s = 10.0 if IS_LONG else 4.0
    window_s = 60.0 if IS_LONG else 8.0
    owners, shards = 4, 20
    fleet = fleet(watched_aws.stream(shards), failover_s=failover_s)
    fleet.add_all([f"m{number}" for number in range(owners)])
    fleet.until_at_rest(shards)
    hung_at = time.monotonic() + HUNG_S
    while True:
        began = time.monotonic()
        time.sleep(window_s)  # an observation, no wait
        # A machine that stood still asks for what nobody asks for at rest: look again.
        if not fleet.silences(began) or time.monotonic() > hung_at:
            break
        fleet.until_at_rest(shards)

    counts = fleet.notes.requests_between(began, began + window_s)
    hours = window_s / 3600
    renewals = sum(count for kind, count in counts.items() if kind.startswith("renew"))
    a_lease_hour = renewals / shards / hours
    an_owner_hour = {
        kind: round(counts[kind] / owners / hours) for kind in ("Scan", "Query", "GetItem")
    }
    print(f"failover {failover_s:g} s, {owners} owners, {shards} leases, {window_s:g} s: {counts}")
    print(f"writes a lease-hour {a_lease_hour:.0f}; reads an owner-hour {an_owner_hour}")
    # The Java KCL's rhythm: a renewal each third of a failover less 25 ms, and nothing else.
    every_s = failover_s / 3 - 0.025
    assert 0 < a_lease_hour <= 1.1 * 3600 / every_s
    assert sum(counts.values()) == renewals + counts["Scan"] + counts["Query"]
    # A scan each half failover after the last one; a look for offers each half second at most.
    assert counts["Scan"] <= owners * (window_s / (failover_s / 2) + 1)
    assert counts["Query"] <= owners * (window_s / 0.5 + 1)
