"""What the next cycle of one owner would do and why, in words: for `kclrun leases --explain`.

Pure: from two scans of the table. The same planner decides as in a manager, so what is printed is
what would be done; only which of several equal leases it is, is left to chance there and fixed
here. What two scans cannot show is unknown: an owner's asks that went unanswered, its room in use
by leases it just took, and anything that stood still for longer than the scans are apart.
"""

from __future__ import annotations

import msgspec

from kclrun.leases.assignment import Action, Decision, plan
from kclrun.leases.observation import Observation
from kclrun.leases.offers import LEFT_LYING_S, delay_s, delay_words
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.standing import Hands, Standing
from kclrun.leases.table_view import TableView
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream_key import stream_of
from kclrun.model.time import Instant

__all__ = ["Explained", "explain"]

# A draw in the middle: `explain` has no chance, and says the same of the same table.
_EVEN_DRAW = 0.5


class Explained(msgspec.Struct, frozen=True):
    """One decision. `action` is "take", "take by force", "ask", "offer" or "nothing"; `key` is
    None for nothing. `sentence` is whole: "take shard X: expired …", "nothing: balanced: …"."""

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

    Each scan is all readable leases of the table; `broken` are the keys of the others. `apart_s`
    is the time between the scans in seconds; with less than a failover no lease can be known to
    be expired. Never empty: the last line says how things stand where nothing is to be done.
    """
    earlier, later = _of_ours(earlier, policy), _of_ours(later, policy)
    observation = Observation(policy.failover_s)
    observation.update(earlier, Instant(0.0))
    now = Instant(apart_s)
    observation.update(later, now)
    view = TableView(later, broken, observation, me=policy.me, gone=frozenset(), now=now)
    held = [lease.key for lease in view.unended if lease.owner == policy.me]
    hands = Hands(held=held)
    standing = Standing(view, observation, hands, me=policy.me)
    offered = tuple(_explain_offer(lease, standing, policy) for lease in standing.offered)
    planned = plan(standing, observation, policy, hands, lambda: _EVEN_DRAW)
    decided = tuple(_explain_decision(decision) for decision in planned.decisions)
    return offered + decided or (Explained("nothing", None, f"nothing: {planned.summary}"),)


def _of_ours(leases: tuple[Lease, ...], policy: ManagerPolicy) -> tuple[Lease, ...]:
    """Without the rows of streams that this owner does not read."""
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


def _explain_offer(lease: Lease, standing: Standing, policy: ManagerPolicy) -> Explained:
    wait_s = delay_s(lease, standing.me, standing.kclrun_owners, standing.view.silent)
    words = delay_words(lease, standing.me)
    if lease.offered_to != standing.me and standing.mine >= standing.target(policy.leases_max):
        wait_s += LEFT_LYING_S
        words += "; we are at our target"
    when = "at once" if wait_s == 0 else f"in {wait_s:.1f} s unless another owner does"
    return Explained("take", lease.key, f"take shard {lease.key} {when}: {words}")
