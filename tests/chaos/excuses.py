"""Whose records may come again: those of lease processes that something unclean happened to.

Unclean is a SIGKILL or a SIGSTOP of the process itself, or a table that did not answer this lease's
requests properly while the process had records to checkpoint. Nothing else is: not the death of a
manager or a launcher, not a failing read, not a write that arrives once more later.

And which reports may be missing from the log: those that a killed manager had no time to read.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass

# By these a request of the lease table was not served, or not in time, or its fate is unknown; or,
# where a write was doubled and the second answer came, it was refused to a sender who had no reason
# to think that it was he who had moved the counter, and who therefore let go of the lease.
EXCUSING_FAULTS = frozenset(
    {"throttle", "fail", "fail_after", "cut_before", "cut_after", "cut_amid", "stall", "delay"}
    | {"repeat"}
)
# What is written between the signal and the mark, and the clocks of three processes.
_SLACK_S = 1.0


@dataclass
class Life:
    """One lease process on one lease: from its beginning until its successor's."""

    shard: str
    token: int
    pid: int
    machine: str
    began: float
    ended: float = float("inf")
    last_batch_at: float = 0.0


def lives_of(ledger):
    """By shard, in the order of their tokens."""
    lives = {}
    for mark in ledger.marks:
        if mark["what"] == "began":
            place = (mark["shard"], mark["token"], mark["pid"])
            lives[place] = Life(*place, mark["manager"], mark["at"], last_batch_at=mark["at"])
    for batch in ledger.batches:
        lives[batch.shard, batch.token, batch.pid].last_batch_at = batch.at
    by_shard = defaultdict(list)
    for life in sorted(lives.values(), key=lambda life: (life.shard, life.token)):
        by_shard[life.shard].append(life)
    for several in by_shard.values():
        for former, latter in itertools.pairwise(several):
            former.ended = latter.began
    return by_shard


def excuses(lives, signals, hits, failover_s):
    """Pids to the words of what happened to them."""
    signals_of, hits_of = defaultdict(list), defaultdict(list)
    for each in signals:
        signals_of[each.pid].append(each)
    for hit in hits:
        if hit["kind"] in EXCUSING_FAULTS:
            for key in hit["keys"]:
                hits_of[key, hit["door"].partition("/")[0]].append(hit)
    found = defaultdict(set)
    for several in lives.values():
        for life in several:
            found[life.pid] |= _signals_in(life, signals_of[life.pid])
            found[life.pid] |= _hits_in(life, hits_of[life.shard, life.machine], failover_s)
    return {pid: words for pid, words in found.items() if words}


def died_before_it_logged(at, pid, signals):
    """Whether the manager `pid` was killed before it had a second to log what happened at `at`.

    What a lease process reports is logged by its manager. A frozen one reads its reports later; one
    that is killed takes along what it has not read.
    """
    mine = [each for each in signals if each.pid == pid]
    killed_at = min(
        (each.at for each in mine if each.name == "KILL" and each.at >= at), default=None
    )
    if killed_at is None:
        return False
    frozen_s = sum(
        max(0.0, min(each.until, killed_at) - max(each.at, at))
        for each in mine
        if each.name == "STOP"
    )
    return killed_at - at - frozen_s < _SLACK_S


def _signals_in(life, signals):
    return {
        f"SIG{each.name}"
        for each in signals
        if each.name in ("KILL", "STOP")
        and life.began - _SLACK_S <= each.at
        and each.at <= life.ended + _SLACK_S
    }


def _hits_in(life, hits, failover_s):
    """A lease is lost `failover` after the last renewal that got through; what was delivered
    meanwhile may have been checkpointed no more."""
    unsure_from = life.last_batch_at - failover_s - _SLACK_S
    return {"table fault" for hit in hits if unsure_from <= hit["at"] <= life.ended + _SLACK_S}
