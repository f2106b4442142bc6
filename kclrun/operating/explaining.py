"""The next decisions of one owner and their reasons, in words: for `kclrun leases --explain`.

Pure: from two scans of the table.
"""

from __future__ import annotations

import msgspec

from kclrun.leases.assignment import Action, Decision, LocalHoldings, OwnerLoads, plan
from kclrun.leases.balancing import LEFT_LYING_S, delay_s, delay_words
from kclrun.leases.load import FleetLoad, Pairing
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream import stream_of
from kclrun.model.time import Instant

# A draw in the middle: `explain` uses no chance, so it gives the same answer for the same table.
_EVEN_DRAW = 0.5


class Explained(msgspec.Struct, frozen=True):
    """One decision. `action` is "take", "take by force", "ask", "offer", "exchange" or "nothing";
    `key` is None for nothing. `sentence` is whole: "take shard X: expired …", "nothing: …"."""

    action: str
    key: LeaseKey | None
    sentence: str


def explain(
    earlier: tuple[Lease, ...],
    later: tuple[Lease, ...],
    policy: ManagerPolicy,
    *,
    apart_s: float,
    broken: tuple[str, ...] = (),
) -> tuple[Explained, ...]:
    """The decisions of the owner `policy.me` after the later scan, in the order they are made.

    Each scan is all readable leases of the table; `broken` are the keys of the others. `apart_s` is
    the time between the scans in seconds; with less than a failover no lease can be known to be
    expired. Never empty: where nothing is to be decided, the last line describes the situation.

    The planner of a manager decides, so a manager would decide the same. Only the choice among
    equal leases differs: a manager leaves it to chance, here it is fixed. Two scans do not show
    everything: not an owner's asks that went unanswered, not its places filled by leases it just
    took, and nothing that stood still for longer than the scans are apart.
    """
    earlier, later = _of_ours(earlier, policy), _of_ours(later, policy)
    observation = Observation(policy.failover_s)
    observation.update(earlier, Instant(0.0))
    now = Instant(apart_s)
    observation.update(later, now)
    view = TableView(later, broken, observation, me=policy.me, gone=frozenset(), now=now)
    held = [lease.key for lease in view.unended if lease.owner == policy.me]
    holdings = LocalHoldings(held=held)
    loads = OwnerLoads(view, observation, holdings, me=policy.me)
    offered = tuple(_explain_offer(lease, loads, policy) for lease in loads.offered)
    planned = plan(loads, observation, policy, holdings, lambda: _EVEN_DRAW)
    decided = tuple(_explain_decision(decision) for decision in planned.decisions)
    decided += _explain_load(loads, observation, policy) if not decided and not offered else ()
    return offered + decided or (Explained("nothing", None, f"nothing: {planned.summary}"),)


def _of_ours(leases: tuple[Lease, ...], policy: ManagerPolicy) -> tuple[Lease, ...]:
    """The rows of the streams that this owner reads."""
    return tuple(lease for lease in leases if stream_of(lease.key) in policy.streams)


def _explain_decision(decision: Decision) -> Explained:
    key, action = decision.lease.key, decision.action
    if action is Action.ASK:
        sentence = f"ask {decision.owner} for {key}: {decision.because}"
    elif action is Action.FORCE:
        sentence = f"take shard {key} by force from {decision.owner}: {decision.because}"
    elif action is Action.OFFER:
        sentence = f"offer shard {key} in the name of {decision.owner}: {decision.because}"
    else:
        sentence = f"take shard {key}: {decision.because}"
    return Explained(action.value, key, sentence)


def _explain_load(
    loads: OwnerLoads, observation: Observation, policy: ManagerPolicy
) -> tuple[Explained, ...]:
    """The exchange that the loads call for. Two scans do not show how long leases are steady."""
    if policy.balance != "load" or loads.me not in loads.kclrun_owners:
        return ()
    fleet = FleetLoad(loads, observation, all_steady=True)
    exchange = Pairing(loads, fleet, policy.leases_max, lambda _: True).best()
    if exchange is None:
        return ()
    explained = []
    for swap in exchange.swaps:
        back = f" and ask for {swap.take}" if swap.take is not None else ""
        words = f"give {swap.give} to {exchange.other}{back}: {exchange.because}"
        explained.append(Explained("exchange", swap.give, f"{words}, if that lasts a minute"))
    return tuple(explained)


def _explain_offer(lease: Lease, loads: OwnerLoads, policy: ManagerPolicy) -> Explained:
    wait_s = delay_s(lease, loads.me, loads.kclrun_owners, loads.view.silent)
    words = delay_words(lease, loads.me)
    if lease.offered_to != loads.me and loads.mine >= loads.target(policy.leases_max):
        wait_s += LEFT_LYING_S
        words += "; we are at our target"
    when = "at once" if wait_s == 0 else f"in {wait_s:.1f} s unless another owner does"
    return Explained("take", lease.key, f"take shard {lease.key} {when}: {words}")
