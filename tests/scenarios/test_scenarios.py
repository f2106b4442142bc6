"""Runs the scenario tables beside this file: one sentence a row, over the pure functions.

`cleanup.yaml` is the proof of I11: a row goes only when nobody can miss it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from kclrun.leases.cleanup import TrimWatch, ended_rows
from kclrun.leases.healing import children_to_create
from kclrun.leases.listing import Listing
from kclrun.leases.observation import Observation
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.restarts import Restarts
from kclrun.leases.shard_sync import sync_empty_table, sync_table
from kclrun.leases.table_view import TableView
from kclrun.leases.taking import plan_takes
from kclrun.model.changes import EndedParent
from kclrun.model.lease import Halt, Lease
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard

LISTED_AT = 1_700_000_000.0


def scenarios(name):
    rows = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
    return pytest.mark.parametrize("row", rows, ids=[row["it"] for row in rows])


def shards_of(texts, still_open=()):
    split = [(text.partition("<")[0], text.partition("<")[2]) for text in texts]
    parents = {key: named.split("+") if named else [] for key, named in split}
    closed = {parent for named in parents.values() for parent in named} - set(still_open)
    width = (HASH_KEY_MAX + 1) // max(1, len(texts))
    shards = []
    for place, (key, named) in enumerate(parents.items()):
        last = HASH_KEY_MAX if place == len(parents) - 1 else (place + 1) * width - 1
        ending = str(1000 + place) if key in closed else None
        shards.append(Shard(key, HashRange(place * width, last), str(100 + place), ending, *named))
    return tuple(shards)


def view_of(leases, broken=(), *, me="me", gone=frozenset(), now=0.0, still=None):
    """A view at `now` by somebody who saw each lease unchanged for so many seconds."""
    observation = Observation(10.0)
    ages = still or {}
    for age in sorted(set(ages.values()), reverse=True):
        observation.update([r for r in leases if ages.get(r.key, 0) >= age], now - age)
    observation.update(leases, now)
    view = TableView(tuple(leases), tuple(broken), observation, me=me, gone=gone, now=now)
    return view, observation


@scenarios("shard_sync")
def test_shard_sync(row):
    start = ExtendedSequenceNumber(row["start"])
    if "empty" in row:
        shards = shards_of(row["empty"])
        if row.get("hole"):
            shards = shards[1:]
        plan, heals = sync_empty_table(shards, start, LISTED_AT), ()
    else:
        keys = [text.split() for text in row["leases"]]
        leases = [Lease(key=k, checkpoint=SHARD_END if end else TRIM_HORIZON) for k, *end in keys]
        view, _ = view_of(leases, row.get("broken", ()))
        listing = Listing(shards_of(row["shards"], row.get("open", ())), LISTED_AT, 0.0)
        plan = sync_table(listing, view.has_row, start)
        heals = children_to_create(view, listing)

    assert plan.problem == row.get("problem")
    assert {le.key: le.checkpoint for le in plan.leases} == {
        key: ExtendedSequenceNumber(name) for key, name in row.get("creates", {}).items()
    }
    for lease in plan.leases:
        assert lease.latest_pinned_at == (LISTED_AT if lease.checkpoint == LATEST else None)
        assert (lease.owner, lease.counter) == (None, 0)
        assert lease.hash_range is not None
    healed = {
        child.key: [p.key + "!" * isinstance(p, EndedParent) for p in change.parents]
        for change in heals
        for child in change.children
    }
    assert healed == row.get("heals", {})
    assert all(c.checkpoint == TRIM_HORIZON for change in heals for c in change.children)


def taking_lease(key, fields):
    return Lease(
        key=key,
        checkpoint=SHARD_END if fields.get("ended") else TRIM_HORIZON,
        owner=fields.get("owner"),
        parents=frozenset(fields.get("parents", ())),
        checkpoint_owner=fields.get("checkpoint_owner"),
        failover_s=fields.get("failover"),
        halt=Halt("poison", 1.0) if fields.get("halted") else None,
    )


def split_all(count, owner):
    """`count` ended shards, each with two children; the owner has the first child of one."""
    leases = {f"p{n}": {"ended": True, "owner": "me"} for n in range(count)}
    for n in range(2 * count):
        leases[f"c{n}"] = {"parents": [f"p{n // 2}"]}
    leases["c0"]["owner"] = owner
    return leases


@scenarios("taking")
def test_taking(row):
    specs = row.get("leases") or split_all(row["split"], row["owner_of_rest"])
    leases = [taking_lease(key, fields) for key, fields in specs.items()]
    gone = frozenset(row.get("gone", ()))
    ages = {key: fields.get("still", 0) for key, fields in specs.items()}
    view, observation = view_of(leases, row.get("broken", ()), gone=gone, now=500.0, still=ages)
    mine = sum(1 for le in leases if le.owner == "me" and not le.is_ended)

    takes = plan_takes(
        view,
        observation,
        ManagerPolicy(me="me", leases_max=row.get("max", 64)),
        mine=mine,
        held=mine + row.get("waiting", 0),
        gone=gone,
        children=frozenset(row.get("children", ())),
        is_busy=lambda key: key in row.get("busy", ()),
        chance=random.Random(7).random,
    )

    taken = [take.key for take in takes]
    if "takes" in row:
        assert sorted(taken) == sorted(row["takes"])
    else:
        assert len(set(taken)) == row["count"]
        assert set(taken) <= set(row.get("among", taken))
    for take in takes:
        seen = view.rows[take.key]
        assert (take.seen_owner, take.seen_counter) == (seen.owner, seen.counter)


@scenarios("cleanup")
def test_cleanup(row):
    leases = [
        Lease(
            key=key,
            checkpoint=ExtendedSequenceNumber(fields["at"]),
            parents=frozenset(fields.get("parents", ())),
            children=frozenset(fields.get("children", ())),
        )
        for key, fields in row["rows"].items()
    ]
    view, _ = view_of(leases, row.get("broken", ()))
    listing = Listing(shards_of(row["listed"]), LISTED_AT, 0.0) if "listed" in row else None
    deletes = {change.key for change in ended_rows(view, listing)}
    watch = TrimWatch()
    for at, shards in row.get("listings", ()):
        listing = Listing(shards_of(shards), LISTED_AT, float(at))
        watch.update(view, listing)
        is_ours = row.get("ours", ()).__contains__
        deletes |= {
            change.key
            for change in watch.trimmed_rows(view, listing, two_periods_s=10.0, is_ours=is_ours)
        }

    assert sorted(deletes) == sorted(row["deletes"])


@scenarios("restarts")
def test_restarts(row):
    restarts = Restarts()
    now = 0.0
    for event in row["events"]:
        what, _, lived = event.partition(" after ")
        restarts.started(now)
        now += float(lived or 1)
        if what == "crash":
            restarts.crashed(now)
        elif what == "stop":
            restarts.stopped(now)
        else:
            restarts.progressed()

    if "pause" in row:
        assert restarts.pause_s == row["pause"]
    if "tripped" in row:
        assert restarts.has_tripped is row["tripped"]
