"""One state of a tiny world: the table, two hosts, what is on its way, what was processed.

States are never changed: a step makes a new one and shares with the old one what it did not touch.
Instants are those of each host's own clock, counters those of the rows; `shapes.py` says which
states are the same.
"""

from copy import copy
from typing import NamedTuple

from kclrun.calling.delivery import Delivery

# Every host was booted so long before: older instants than any rule asks for exist from the start.
BOOTED_S = 1000.0


class Request(NamedTuple):
    """One request on its way. `kind` is write, row, parents, rows or scan; `what` the change or the
    keys; `sent` the sender's instant. Once it was carried out, `answer` is the event that the
    sender is to hear, and `waits` for how many ticks it has not."""

    kind: str
    what: object
    sent: float
    answer: object = None
    waits: int = 0


class Ledger(NamedTuple):
    """One shard, seen from outside. `is_unclean`: some end may bring records again [I8]."""

    processed: int = 0
    delivered: int = 0
    is_unclean: bool = False


class LiveProcess:
    """One lease process: the real life, the real decision of what user code is given, user code.

    `delivered` is the number of the last record given to user code; `busy` the record that user
    code is at, if any, and `busy_ticks` for how long. `has_claimed` is not the core's word: its own
    claim was seen to apply.
    """

    __slots__ = (
        "alarm",
        "busy",
        "busy_ticks",
        "commands",
        "delivered",
        "delivery",
        "events",
        "has_claimed",
        "is_initialized",
        "key",
        "life",
        "number",
        "request",
        "timed",
    )

    def __init__(self, key, number, life):
        self.key = key
        self.number = number
        self.life = life
        self.alarm = 0.0
        self.delivery = Delivery(batch_max=1)
        self.busy = self.busy_ticks = self.delivered = 0
        self.has_claimed = self.is_initialized = False
        self.request = None
        self.events = self.commands = self.timed = ()

    def copy(self):
        new = object.__new__(LiveProcess)
        for name in LiveProcess.__slots__:
            setattr(new, name, getattr(self, name))
        new.delivery = copy(self.delivery)
        return new


class LiveHost:
    """One host: its manager's core (`mind`, as saved), its processes, what they sent.

    `orphans` are writes whose sender heard, or will hear, nothing: they may arrive at any time, or
    never. `waiting` are writes of a key that has one under way; `reaps` processes that ended and
    whose manager has not heard of it. `shape` is kept while nothing changes.
    """

    __slots__ = (
        "alarm",
        "has_manager",
        "is_draining",
        "is_finished",
        "mind",
        "orphans",
        "others_in_sight",
        "processes",
        "reaps",
        "requests",
        "shape",
        "started",
        "timed",
        "waiting",
    )

    def __init__(self):
        self.mind = None
        self.alarm = 0.0
        self.has_manager = True
        self.is_draining = self.is_finished = self.others_in_sight = False
        self.processes = {}
        self.requests = self.timed = self.waiting = self.reaps = self.orphans = ()
        self.started = 0
        self.shape = None

    def copy(self):
        new = object.__new__(LiveHost)
        for name in LiveHost.__slots__:
            setattr(new, name, getattr(self, name))
        new.processes = dict(self.processes)
        new.shape = None
        return new


class State(NamedTuple):
    """`ticks` since the world began; `rows` and `ledgers` by key; what may still go wrong."""

    rows: dict
    hosts: tuple
    ledgers: dict
    ticks: int
    faults_left: int
    drains_left: int
