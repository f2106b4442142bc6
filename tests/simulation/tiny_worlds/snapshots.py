"""Copies of the cores' states: cheap, for they are made once for each transition.

A manager's core is a net of objects that know each other by bound methods, so it cannot be copied;
what can change in it is listed here (`STATE`), taken out and put back into the one core that a
host has. A lease's life is small, and is copied whole. Rule: an attribute that neither list knows
is an error when a core is made, so that a new one cannot be forgotten.
"""

import copy
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType

from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.leases.manager import LeaseManager

# What changes in each part of a manager's core and decides something.
STATE = {
    "LeaseManager": ("is_finished", "_is_refused"),
    "LastScan": ("view", "began_instant", "changed_instant"),
    "ListingPlan": ("_has_waited", "_under_way"),
    "ChildrenOfMine": ("ended_instants",),
    "ScanPlan": (
        *("instant", "began_instant", "is_under_way", "gone", "gone_before"),
        *("_lacks_phase", "_may_be_old", "_hasty_scans"),
    ),
    "CaughtUp": (),
    "Observation": (
        *("wall_offset_s", "_keys", "_owners", "_counters", "_seen_instant", "_still", "_asks"),
    ),
    "LoadBalancer": (),
    "HeldLeases": ("held_leases", "is_draining", "are_others_in_sight"),
    "RowWrites": ("_refusals",),
    "HostCapacity": (
        *("count", "proven", "reason", "is_short", "short_since"),
        *("_step", "_pause_s", "_raised_instant", "_raise_instant", "_expired_starts"),
    ),
    "Audits": ("_views", "_synced"),
    "Auditor": ("listing", "under_way", "should_list_soon", "_has_seen_rows"),
    "TrimWatch": ("_absent_since", "_still_since"),
    "StreamWatch": ("_doubted", "_vouched"),
    "EndWatch": ("_since",),
    "RecentRows": ("_seen",),
    "Balancer": ("_loads", "_holdings_at_look", "_scanned_for"),
    "Asker": ("_asks", "_unanswered", "_is_draining", "_ending", "_refusal"),
    "OfferWatch": ("_waiting", "_find_instant", "_turn_instant"),
    "ExpiredLeaseOffers": ("under_way", "_refusal"),
    "ConfigDrift": (),
    "ModeWatch": (),
    "CapacityWatch": (),
}
# What only keeps a line of the log from being written twice, or decides nothing here: shared by all
# states.
NOTED = {
    "ModeWatch": (
        "_in_table",
        "_elsewhere",
        "_reported_mode",
        "_has_java",
        "_has_reported_java",
        "_reads",
        "_is_reading",
        "_read_instant",
    ),
    # `_whole` only saves judging the same hash ranges again; `problem` is for the end of a run.
    "Auditor": ("_changes", "_reported_expired", "_whole", "problem"),
    "Audits": ("_reasons",),
    "StreamWatch": ("_open_and_ended_since",),
    "ConfigDrift": ("_changes",),
    "CapacityWatch": ("_short_scans", "_left_unread"),
    # Published for the page of the fleet; no rule reads it.
    "HeldLeases": ("endpoint",),
    # No row has a load here, so nothing is exchanged.
    "Observation": ("_moved",),
    "LoadBalancer": (
        *("expected", "steps", "watched", "_exchange", "_looks"),
        *("_has_failed", "_failures", "_rests_until"),
    ),
}
# Containers that other parts hold on to: they are filled, never replaced.
_SHARED = {
    ("ChildrenOfMine", "ended_instants"),
    ("ListingPlan", "_under_way"),
    ("HeldLeases", "held_leases"),
}
_WIRING = (FunctionType, MethodType, BuiltinFunctionType, str, list)
_WIRED_NAMES = {
    *("_policy", "_handlers", "_children", "_auditors", "_stream", "_held", "_renew_every_s"),
    *("_leases_max", "_failover_s", "_stays_s", "_created_at", "_described_instant"),
}


class CoreOfHost:
    """The one core of a host, which is put into whatever state is looked at."""

    def __init__(self, core: LeaseManager) -> None:
        self.core = core
        self._places = [
            (part, name, (type(part).__name__, name) in _SHARED)
            for part in _parts_of(core)
            for name in STATE[type(part).__name__]
        ]
        self.index = {
            (type(part).__name__, name): place for place, (part, name, _) in enumerate(self._places)
        }
        self._held = None

    def save(self):
        """The state as a tuple, which nobody changes from here on."""
        self._held = saved = tuple(
            _saved(name, getattr(part, name), is_shared) for part, name, is_shared in self._places
        )
        return saved

    def load(self, saved) -> LeaseManager:
        """The core in this state, to be used up: save it before anything else is loaded."""
        for (part, name, is_shared), value in zip(self._places, saved, strict=True):
            if is_shared:
                container = getattr(part, name)
                container.clear()
                container.update(_loaded(name, value))
            else:
                setattr(part, name, _loaded(name, value))
        return self.core


def _saved(name, value, is_shared):
    if name == "_loads" and value is not None:
        return (value, frozenset(value.leaving), value.owners, value.kclrun_owners)
    return value.copy() if is_shared else value


def _loaded(name, value):
    kind = type(value)
    if name == "held_leases":
        return {key: _copy_of_held_lease(held_lease) for key, held_lease in value.items()}
    if name == "_loads" and value is not None:
        loads, leaving, owners, kclrun_owners = value
        loads.leaving = set(leaving)
        loads.owners, loads.kclrun_owners = owners, kclrun_owners
        return loads
    if kind is dict:
        if value and name == "_asks" and hasattr(next(iter(value.values())), "since_instant"):
            return {key: copy.copy(asked) for key, asked in value.items()}
        return value.copy()
    return value.copy() if kind in (set, deque) else value


def _copy_of_in_flight(in_flight):
    in_flight = copy.copy(in_flight)
    in_flight.unresolved = in_flight.unresolved.copy()
    return in_flight


def _copy_of_held_lease(held_lease):
    held_lease = copy.copy(held_lease)
    held_lease.restarts = copy.copy(held_lease.restarts)
    held_lease.parents = copy.copy(held_lease.parents)
    held_lease.requests = copy.copy(held_lease.requests)
    held_lease.requests.in_flight = _copy_of_in_flight(held_lease.requests.in_flight)
    return held_lease


def _parts_of(core: LeaseManager):
    """All parts with a state, each once; raises AssertionError for an attribute nobody knows."""
    found, waiting = [], [core]
    while waiting:
        part = waiting.pop()
        if any(part is other for other in found):
            continue
        found.append(part)
        for name, value in vars(part).items():
            kind = type(part).__name__
            if name in STATE[kind] or name in NOTED.get(kind, ()):
                continue
            if name == "_auditors":
                waiting.extend(value.values())
                continue
            is_part = type(value).__name__ in STATE
            known = is_part or name in _WIRED_NAMES or isinstance(value, _WIRING)
            assert known, f"{kind}.{name} is new: does it decide anything? Say so here"
            if is_part:
                waiting.append(value)
    return found


# The parts of a lease's life that change, and which others each of them knows.
_PARTS_OF_LIFE = (
    ("own", {}),
    ("ledger", {}),
    ("_requests", {}),
    ("_graceful", {"_own": "own"}),
    ("commits", {}),
    ("_shard_end", {}),
    ("_permit", {}),
    ("_lost", {}),
    ("_output", {}),
    ("_metering", {}),
)
_LIFE_ITSELF = {
    "policy",
    "state",
    "_chance",
    "_is_withdrawn",
    "_keeps_lease",
    "_manager_gone",
    "_is_initialized",
    "_failure",
    "_is_manual",
    "_saved_instant",
    "_put_off_until",
    "_warned",
}
LIFE_NAMES = frozenset({name for name, _ in _PARTS_OF_LIFE} | _LIFE_ITSELF)


def copy_of_life(life: LeaseStateMachine) -> LeaseStateMachine:
    """A life of its own in the same state."""
    new = object.__new__(type(life))
    attributes = new.__dict__
    attributes.update(life.__dict__)
    assert attributes.keys() == LIFE_NAMES, f"{attributes.keys() ^ LIFE_NAMES} is new in a life"
    for name, known in _PARTS_OF_LIFE:
        part = attributes[name]
        if part is None:
            continue
        attributes[name] = twin = object.__new__(type(part))
        inside = twin.__dict__
        inside.update(part.__dict__)
        for attribute, other in known.items():
            inside[attribute] = attributes[other]
    own, ledger = attributes["own"].__dict__, attributes["ledger"].__dict__
    own["in_flight"] = _copy_of_in_flight(own["in_flight"])
    own["_terms"] = copy.copy(own["_terms"])
    ledger["_open"] = deque(ledger["_open"])
    requests = attributes["_requests"].__dict__
    requests["_waiting"] = requests["_waiting"].copy()
    lost_lease = attributes["_lost"]
    if lost_lease is not None and lost_lease.late is not None:
        lost_lease.late = copy.copy(lost_lease.late)
    return new
