"""The promises, looked at from outside after each thing that happens; the cores are not asked.

I1 no record passed over, I2 positions forward, I2b never past what was processed, I3 parents first,
I4 one permitted reader, I5 counters forward and by the owner, I8 no duplicate without an unclean
end, P4 no reading before the own claim succeeded, P5 one writer and one unresolved write, P17 a
drained manager leaves no row behind.
"""

from kclrun.model.lease import OFFERED
from kclrun.model.sequence import SHARD_END
from kclrun.protocol.writes import (
    Ask,
    CreateChildren,
    CreateLease,
    Decline,
    DeleteEnded,
    DeleteTrimmed,
    LateCheckpoint,
    Offer,
    Take,
    Withdraw,
    keys_of,
)
from tests.simulation.tiny_worlds.worlds import OWNERS

# Two clocks compared through world time.
_ROUNDING_TICKS = 1e-6


class Broken(AssertionError):
    """A promise was broken. Begins with the id of its rule."""

    def __init__(self, rule: str, key: str, words: str) -> None:
        super().__init__(f"{rule}: {key}: {words}")
        self.rule = rule


def key_of(change) -> str:
    return keys_of(change)[0]


def number_of(checkpoint, records: int) -> int:
    """How many records a position covers."""
    if checkpoint == SHARD_END:
        return records
    return 0 if checkpoint.is_sentinel else int(checkpoint.sequence_number)


def check_write(motion, sender: str, change, before) -> None:
    """A write has applied: each row it changed, before and after."""
    if isinstance(change, Take | Offer) and _is_expiry(change, sender):
        motion.unclean(change.key)
    for key in keys_of(change):
        was, row = before.get(key), motion.rows.get(key)
        if row is None or row is was:
            continue
        if was is not None:
            if row.checkpoint < was.checkpoint:
                raise Broken("I2", key, f"back from {was.checkpoint} to {row.checkpoint}")
            if row.counter < was.counter:
                raise Broken("I5", key, f"its counter went back from {was.counter}")
            _check_owner(sender, change, was)
        ledger, records = motion.ledgers[key], motion.shells.world.records
        if row.is_ended and ledger.processed < records:
            raise Broken("I1", key, f"ended, and record {ledger.processed + 1} was not processed")
        if number_of(row.checkpoint, records) > ledger.processed:
            raise Broken("I2b", key, f"{row.checkpoint} is past {ledger.processed}")


def _check_owner(sender: str, change, was) -> None:
    """An owner's write lands only on its own row, as it stood when it was sent [I5]."""
    if isinstance(
        change, CreateLease | CreateChildren | DeleteEnded | DeleteTrimmed | Ask | Withdraw
    ):
        return
    if isinstance(change, LateCheckpoint):
        return
    expected = change.seen_owner if isinstance(change, Take) else change.owner
    if isinstance(change, Decline):
        expected = OFFERED if was.offered_to == change.owner else None
    if was.owner != expected or was.counter != change.seen_counter:
        found = f"{was.owner} at counter {was.counter}"
        raise Broken("I5", was.key, f"{type(change).__name__} of {sender} landed on {found}")


def check_one_writer(motion, index: int, key: str) -> None:
    """A manager is about to write [P5]. An offer in the name of the dead is no write of its own."""
    if key in motion.hosts[index].processes:
        raise Broken("P5", key, "the manager writes beside its lease process")


def check_start(motion, index: int, key: str) -> None:
    host = motion.hosts[index]
    if key in host.processes or any(each[0] == key for each in host.reaps):
        raise Broken("P5", key, "a second process, and the first is not proven dead")
    if any(each.kind == "write" and key_of(each.what) == key for each in host.requests):
        raise Broken("P5", key, "a process starts while a write of its manager is under way")


def check_one_write(motion, index: int, process) -> None:
    """A lease process writes its row: nothing else that writes it may still arrive [P5].

    A late checkpoint is no owner's write; creating children leaves the row as it is.
    """
    sent, apart = process.request.what, LateCheckpoint | CreateChildren
    if isinstance(sent, apart):
        return
    for orphan, number in motion.hosts[index].orphans:
        is_its_own = number == process.number and not isinstance(orphan, apart)
        if is_its_own and orphan != sent and _may_still_apply(orphan, motion.rows):
            words = f"{type(sent).__name__} is sent while {type(orphan).__name__} is unresolved"
            raise Broken("P5", process.key, words)


def check_permit(motion, index: int, process) -> None:
    """It may begin batches until the fence of its permit."""
    if motion.instant(index) >= process.delivery.permit.fence:
        return
    if not process.has_claimed:
        raise Broken("P4", process.key, "may read, and no claim of its own has succeeded")
    _check_alone(motion, index, process)


def check_batch(motion, index: int, process) -> None:
    """Record `busy` is given to user code."""
    key, first = process.key, process.busy
    _check_alone(motion, index, process)
    ledger = motion.ledgers[key]
    if ledger.delivered == 0 and not ledger.is_unclean:
        _check_parents(motion, key)
    if first > ledger.processed + 1:
        raise Broken("I1", key, f"record {ledger.processed + 1} was passed over")
    if first <= ledger.delivered and not ledger.is_unclean:
        raise Broken("I8", key, f"record {first} again, and nothing unclean happened")
    row = motion.rows.get(key)
    if row is not None and row.is_ended:
        raise Broken("I3", key, f"record {first} is read after the shard ended")
    delivered = max(ledger.delivered, first)
    motion.ledgers = {**motion.ledgers, key: ledger._replace(delivered=delivered)}


def check_finish(motion, index: int) -> None:
    """A drained manager says that nothing is its any more [P17]."""
    host = motion.hosts[index]
    if host.processes:
        raise Broken("P17", next(iter(host.processes)), "finished, and a process lives")
    for key, row in motion.rows.items():
        if row.owner == OWNERS[index] and not row.is_ended:
            raise Broken("P17", key, "finished, and the row is still its own")


def _may_still_apply(change, rows) -> bool:
    row = rows.get(key_of(change))
    counter = getattr(change, "seen_counter", None)
    return row is not None and (counter is None or row.counter <= counter)


def _check_alone(motion, index: int, process) -> None:
    """No other incarnation, here or there, may begin a batch of this lease now [I4]."""
    for place, host in enumerate(motion.hosts):
        other = host.processes.get(process.key)
        if other is None or other is process or other.delivery.permit is None:
            continue
        until = motion.shells.tick_of(place, other.delivery.permit.fence)
        if motion.ticks < until - _ROUNDING_TICKS:
            words = f"host {'ab'[index]} may read while host {'ab'[place]} may until tick {until}"
            raise Broken("I4", process.key, words)


def _check_parents(motion, key: str) -> None:
    for parent in motion.shells.world.parents_of(key):
        row = motion.rows.get(parent)
        if row is not None and not row.is_ended:
            raise Broken("I3", key, f"read before its parent {parent} ended")


def _is_expiry(change, sender: str) -> bool:
    """A row changes hands, or is offered, without its owner: records may come again."""
    if isinstance(change, Take):
        return change.seen_owner in OWNERS and change.seen_owner != change.owner
    return change.owner != OWNERS["ab".index(sender[0])]
