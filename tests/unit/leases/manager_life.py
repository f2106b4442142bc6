"""One manager over a few rows that the test moves by hand. Not a test.

`say` feeds an event; `scan` lets the next scan come due and answers it from `rows`; `apply` answers
a write of the manager as the table would, and changes `rows`.
"""

import msgspec

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.local.lease_rows import change_row
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import Applied

replace = msgspec.structs.replace
ME, OTHER, THIRD = "kclrun:a:me:n", "kclrun:a:other:n", "kclrun:b:third:n"
JAVA = "java-1"


def row(key="s0", owner=None, counter=0, **fields):
    whole = HashRange(0, HASH_KEY_MAX)
    fields = {"checkpoint": TRIM_HORIZON, "hash_range": whole, **fields}
    return Lease(key=key, owner=owner, counter=counter, **fields)


def rows_of(owner, count, prefix):
    return [row(f"{prefix}{number}", owner) for number in range(count)]


def offered(key="s0", by=OTHER, to=None, counter=7, **fields):
    return row(key, OFFERED, counter, offered_by=by, offered_to=to, **fields)


class Answers:
    """What the manager `core` answered last (`said`), by kind, and how it keeps a lease."""

    def asked(self, kind):
        return [command for command in self.said if isinstance(command, kind)]

    def writes(self, kind=object):
        changes = [command.change for command in self.asked(c.WriteRow)]
        return [change for change in changes if isinstance(change, kind)]

    def notes(self):
        return [note.event for note in self.asked(c.Note)]

    def state(self, key="s0"):
        held_lease = self.core.held_lease(key)
        return held_lease and held_lease.state.value


class ManagerLife(Answers):
    def __init__(self, *rows, **policy):
        self.now = 100.0
        self.core = LeaseManager(ManagerPolicy(me=ME, **policy), lambda: 0.5)
        self.rows = {lease.key: lease for lease in rows}
        self.said = ()
        self.say(e.Started(started_at=5100.0))
        self.say(e.LeasesScanned(tuple(self.rows.values())))

    def say(self, event, *, after=0.0):
        self.now += after
        self.said = self.core.handle(event, self.now)
        self.core.check()
        return self.said

    def tick(self, seconds):
        return self.say(e.Ticked(), after=seconds)

    def scan(self, *, after=0.0, renewed=True):
        """The next scan, on time or `after` so many seconds; the others renewed their rows."""
        reported = self.core.handle(e.Ticked(), self.now) if after == 0 else ()
        self.now += after
        for _ in range(60):
            if any(isinstance(command, c.ScanTable) for command in reported):
                break
            self.now = max(self.now + 0.01, self.core.next_deadline(self.now))
            reported = self.core.handle(e.Ticked(), self.now)
        if renewed:
            for lease in list(self.rows.values()):
                if lease.owner not in (None, OFFERED, ME):
                    self.rows[lease.key] = replace(lease, counter=lease.counter + 1)
        return self.say(e.LeasesScanned(tuple(self.rows.values())))

    def finds(self, *offers):
        """The query for offers that is under way comes back."""
        return self.say(e.OffersFound(offers))

    def apply(self, change, *, after=0.0, **seen_too):
        """The write applied. `seen_too`: what else its image shows, as an ask by another owner."""
        image = change_row(change, self.rows[change.key])
        self.rows[change.key] = image = replace(image, **seen_too)
        return self.say(e.WriteResolved(change, Applied(image)), after=after)

    def resolve(self, change, outcome, *, after=0.0):
        return self.say(e.WriteResolved(change, outcome), after=after)

    def take(self, key="s0"):
        """Answer the take that was just asked for."""
        return self.apply(next(take for take in self.writes(ch.Take) if take.key == key))

    def renewal(self):
        """The next renewal without a process; every process gives up unclaimed until then."""
        for _ in range(60):
            if self.asked(c.StartProcess):
                key = self.asked(c.StartProcess)[0].key
                self.say(e.ProcessStarted(key, 7))
                self.say(
                    e.ProcessReported(key, reports.StartUnclaimed("its start command expired"))
                )
                self.say(e.ProcessExited(key, 7, "exit code 3"))
                self.say(e.RowRead(key, self.rows[key]))
            elif self.writes(ch.Renew):
                return self.writes(ch.Renew)[0]
            else:
                self.tick(0.5)
        raise AssertionError(f"no renewal in a minute: {self.said}")
