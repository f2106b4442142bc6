"""Runs the scenario tables beside this file: one sentence a row, over the pure functions.

`cleanup.yaml` is the proof of I11: a row goes only when nobody can miss it.
"""

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import yaml

from kclrun.leases.assignment import Action, LocalHoldings, OwnerLoads, plan
from kclrun.leases.balancing import delay_s
from kclrun.leases.cleanup import TrimWatch, ended_rows
from kclrun.leases.load import HEAVY_ABOVE, FleetLoad, Pairing
from kclrun.leases.policy import ManagerPolicy, ScanPace
from kclrun.leases.restarts import Restarts
from kclrun.leases.shard_sync import Listing, children_to_create, sync_empty_table, sync_table
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import ANYBODY, OFFERED, DiedOn, Halt, Handoff, Lease, Load, OwnerId
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol.writes import EndedParent

LISTED_AT = 1_700_000_000.0
replace = msgspec.structs.replace


def scenarios(name):
    rows = yaml.load((Path(__file__).parent / f"{name}.yaml").read_text(), Loader=yaml.CSafeLoader)
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


def view_of(leases, broken=()):
    observation = Observation(10.0)
    observation.update(leases, 0.0)
    everything = (tuple(leases), tuple(broken), observation)
    return TableView(*everything, me="me", gone=frozenset(), now=0.0)


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
        view = view_of(leases, row.get("broken", ()))
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


def who(name):
    """The owner id of a scenario's name: "other" and "b/other" are kclrun's, "java-1" is not."""
    special = {None: None, "nobody": None, "offered": OFFERED, "anybody": ANYBODY}
    if name in special or name.startswith("java"):
        return special.get(name, name)
    group, _, host = name.rpartition("/")
    return OwnerId(f"kclrun:{group or 'a'}:{host}:n")


def assignment_lease(key, fields):
    asked = fields.get("asked")
    return Lease(
        key=key,
        checkpoint=SHARD_END if fields.get("ended") else TRIM_HORIZON,
        owner=who(fields.get("owner")),
        parents=frozenset(fields.get("parents", ())),
        checkpoint_owner=fields.get("checkpoint_owner"),
        failover_s=fields.get("failover"),
        halt=Halt("poison", 1.0) if fields.get("halted") else None,
        handoff=Handoff(who(asked), 1.0) if asked else None,
        offered_by=who(fields.get("by")),
        offered_to=who(fields.get("to")),
    )


def split_all(count, owner):
    """`count` ended shards, each with two children; the owner has the first child of one."""
    leases = {f"p{n}": {"ended": True, "owner": "me"} for n in range(count)}
    for n in range(2 * count):
        leases[f"c{n}"] = {"parents": [f"p{n // 2}"]}
    leases["c0"]["owner"] = owner
    return leases


def specs_of(row):
    specs = dict(row.get("leases", {}))
    if "split" in row:
        specs |= split_all(row["split"], row["owner_of_rest"])
    for owner, count in row.get("owners", {}).items():
        specs |= {f"{owner}{n}": {"owner": owner} for n in range(count)}
    for n in range(row.get("dead", 0)):
        specs[f"dead{n}"] = {"owner": "dead", "still": 12}
    for n in range(row.get("waiting", 0)):  # ours, and no work: its parent's row is not readable
        specs[f"waiting{n}"] = {"owner": "me", "parents": ["unread"]}
    return specs


def observed(leases, specs, row):
    """A view at 500 s by somebody who saw rows and asks stand for as long as the scenario says."""
    observation = Observation(10.0)
    still = {key: f.get("moved", f.get("still", 0)) for key, f in specs.items()}
    asked_for = {key: fields.get("asked_for", 0) for key, fields in specs.items()}
    before_moves = {fields["moved"] + 1 for fields in specs.values() if "moved" in fields}
    seen_before = {key for key, fields in specs.items() if "moved" in fields}
    for age in sorted({*still.values(), *asked_for.values(), *before_moves}, reverse=True):
        observation.update(
            [
                replace(
                    lease,
                    counter=lease.counter if still[lease.key] >= age else -1,
                    handoff=lease.handoff if asked_for[lease.key] >= age else None,
                )
                for lease in leases
                if still[lease.key] >= age or lease.key in seen_before or not lease.is_ended
            ],
            500.0 - age,
        )
    observation.update(leases, 500.0)
    broken = (*row.get("broken", ()), *(("unread",) if "waiting" in row else ()))
    gone = frozenset(map(who, row.get("gone", ())))
    view = TableView(tuple(leases), broken, observation, me=who("me"), gone=gone, now=500.0)
    return view, observation


@scenarios("assignment")
def test_assignment(row):
    specs = specs_of(row)
    leases = [assignment_lease(key, fields) for key, fields in specs.items()]
    view, observation = observed(leases, specs, row)
    policy = ManagerPolicy(
        me=who("me"), leases_max=row.get("max", 64), moves_per_cycle=row.get("moves", 8)
    )
    holdings = LocalHoldings(
        held=[lease.key for lease in view.unended if lease.owner == who("me")],
        asked=row.get("asking", ()),
        unanswered=row.get("unanswered", ()),
        children=row.get("children", ()),
        gone=frozenset(map(who, row.get("gone", ()))),
        busy=row.get("busy", ()),
    )
    left = frozenset(map(who, row.get("left", ())))
    loads = OwnerLoads(view, observation, holdings, me=who("me"), left=left)
    planned = plan(loads, observation, policy, holdings, random.Random(7).random)

    decided = {action: [] for action in Action}
    for decision in planned.decisions:
        decided[decision.action].append(decision)
    by_name = {Action.TAKE: "takes", Action.FORCE: "forces", Action.OFFER: "offers"}
    for action, names in by_name.items():
        keys = sorted(decision.lease.key for decision in decided[action])
        expected = row.get(names, [])
        if isinstance(expected, int):
            assert len(set(keys)) == expected
            assert set(keys) <= set(row.get("among", keys))
        else:
            assert keys == sorted(expected)
    asks = Counter(decision.owner for decision in decided[Action.ASK])
    assert asks == {who(owner): count for owner, count in row.get("asks", {}).items()}
    assert {d.lease.key for d in decided[Action.ASK]}.isdisjoint(row.get("spares", ()))
    for decision in decided[Action.ASK]:
        assert decision.lease.owner == decision.owner
    waits = {
        lease.key: delay_s(lease, who("me"), loads.kclrun_owners, view.silent)
        for lease in loads.offered
    }
    assert waits == pytest.approx(row.get("waits", {}))
    if "pace" in row:
        assert planned.pace is ScanPace[row["pace"]]
    assert row.get("says", "") in "; ".join(
        [*(decision.because for decision in planned.decisions), planned.summary]
    )


def loaded_lease(owner, number, figure, row):
    key, text = f"{owner.rpartition('/')[2]}{number}", str(figure)
    kbps, _, cpu = text.lstrip("~").partition("/")
    java = float(kbps) if text.startswith("~") else None
    measured = not text.startswith(("~", "-"))
    asked = row.get("asked", {}).get(key)
    return Lease(
        key=key,
        checkpoint=TRIM_HORIZON,
        owner=who(owner),
        throughput_kbps=java,
        load=Load(float(kbps), float(cpu or 0)) if measured else None,
        halt=Halt("poison", 1.0) if key in row.get("halted", ()) else None,
        died_on=DiedOn("h", TRIM_HORIZON) if key in row.get("died", ()) else None,
        handoff=Handoff(who(asked), 1.0) if asked else None,
        offered_by=who("me") if owner == "offered" else None,
        offered_to=who(row.get("to_be")) if owner == "offered" else None,
    )


@scenarios("load")
def test_load(row):
    leases = [
        loaded_lease(owner, number, figure, row)
        for owner, figures in row["leases"].items()
        for number, figure in enumerate(figures)
    ]
    moved, observation = row.get("moved", ()), Observation(10.0)
    before = [replace(lease, handoff=None) for lease in leases if lease.key not in moved]
    observation.update(before, 0.0)
    leases = [replace(lease, counter=1) for lease in leases]
    observation.update(leases, 500.0)
    view = TableView(tuple(leases), (), observation, me=who("me"), gone=frozenset(), now=500.0)
    held = [lease.key for lease in leases if lease.owner == who("me")]
    loads = OwnerLoads(view, observation, LocalHoldings(held=held), me=who("me"))

    fleet = FleetLoad(loads, observation)
    may_move = set(view.rows).difference(row.get("stuck", ())).__contains__
    pairing = Pairing(loads, fleet, row.get("places", 64), may_move)
    exchange = pairing.best()

    swaps = exchange.swaps if exchange is not None else ()
    gives, takes = (
        sorted(key for key in keys if key is not None)
        for keys in ([swap.give for swap in swaps], [swap.take for swap in swaps])
    )
    for found, name in ((gives, "gives"), (takes, "takes")):
        expected = row.get(name, found if "gives" in row else [])
        assert (len(found) if isinstance(expected, int) else found) == expected
    if exchange is not None:
        assert exchange.other == who(row.get("to")) or "to" not in row
        heavy, light = exchange.loads
        excess, gain = pairing.margins(exchange)
        assert heavy == pytest.approx(HEAVY_ABOVE + excess)
        assert gain > 0
        assert light < heavy


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
    view = view_of(leases, row.get("broken", ()))
    listing = Listing(shards_of(row["listed"]), LISTED_AT, 0.0) if "listed" in row else None
    deletes = {change.key for change in ended_rows(view, listing)}
    watch = TrimWatch(10.0)
    for at, shards in row.get("listings", ()):
        listing = Listing(shards_of(shards), LISTED_AT, float(at))
        watch.update(view, listing)
        deletes |= {
            change.key
            for change in watch.trimmed_rows(
                view, listing, two_periods_s=10.0, held=row.get("ours", ())
            )
        }

    assert sorted(deletes) == sorted(row["deletes"])


@scenarios("restarts")
def test_restarts(row):
    restarts = Restarts()
    now = 0.0
    for event in row["events"]:
        what, _, lived = event.partition(" after ")
        restarts.started_instant = now
        now += float(lived or 1)
        if what == "crash":
            restarts.crashed(now)
        elif what == "fail":
            restarts.failed(now)
        elif what == "stop":
            restarts.stopped(now)
        elif what == "starve":
            restarts.broke(now, at_records=True)
        elif what == "break":
            restarts.broke(now, at_records=False)
        else:
            restarts.progressed()

    if "pause" in row:
        assert restarts.pause_s == row["pause"]
    if "tripped" in row:
        assert restarts.has_tripped is row["tripped"]
    if "verdict" in row:
        decision = restarts.decision(
            slot="this host", failed_slot=row.get("failed"), are_others=row.get("others", False)
        )
        assert decision.name == row["verdict"].upper().replace(" ", "_")
