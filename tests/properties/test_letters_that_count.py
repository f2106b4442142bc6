"""Any lives of the owners of one lease: of the letters up to the checkpoint those count, and no
others, whose owner's work was committed [K20, R12].

The owners keep letters by the lease process's own code, over a lease table with the conditions of
all its writes. They are killed between any two steps, freeze and wake up, and requests of theirs
arrive late. In half of the lives an output stores its cursor.
"""

import itertools
import random
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.calling.tracebacks import Failure
from kclrun.errors import SinkError
from kclrun.local import lease_rows
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.letter import KeptLetter, Letter, Takeover, classified
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol import conditions, writes
from kclrun.worker import giving_up
from kclrun.worker.giving_up import LeaseLetters

KEY = LeaseKey("shardId-000000000002")
RECORDS = 9
# Each broken rule is found within them; without one, 20,000 were told rightly.
LIVES = range(400, 700)
FAILURE = Failure("ValueError: x", "shop.py:3 in process")
PLACE = SimpleNamespace(path=None)


def at(number):
    return TRIM_HORIZON if number == 0 else ExtendedSequenceNumber(str(100 + number))


def number_of(position):
    return 0 if position.is_sentinel else int(position.sequence_number) - 100


class Memory:
    """A place of letters; what a killed owner had under way arrives at some time, or never."""

    def __init__(self):
        self.letters, self.takeovers, self.late = {}, {}, []
        self.cut = False  # the next request is under way when its sender is killed

    def keep(self, letter):
        self._put(self.letters, letter)

    def take_over(self, takeover):
        self._put(self.takeovers, takeover)

    def _put(self, into, content):
        if self.cut:
            self.late.append(lambda: into.update({content.name: content}))
            self.cut = False
            raise Killed
        into[content.name] = content

    def kept(self):
        found = [KeptLetter(each, name, (name,)) for name, each in self.letters.items()]
        return classified(found, self.takeovers.values())


class Killed(BaseException):
    pass


class Table:
    """The lease table, through which a note may be under way for long."""

    def __init__(self, rows, memory):
        self.rows, self.memory, self.cut = rows, memory, False

    def write(self, change):
        if self.cut:
            self.memory.late.append(lambda: self.rows.write(change))
            self.cut = False
            raise Killed
        return self.rows.write(change)


class Owner:
    """One lease process. Its verdict of a record is drawn anew by each owner."""

    def __init__(self, world, name):
        self.world, self.me = world, OwnerId(f"kclrun::{name}")
        self.table = Table(world.rows, world.memory)
        spec = SimpleNamespace(
            lease_key=KEY, owner=self.me, application="shop", processor="p", stream_name="orders",
            shard_id=KEY, on_error=SimpleNamespace(then="dead-letter"), letters=PLACE,
        )  # fmt: skip
        self.letters = LeaseLetters(spec, self.table, lambda: world.memory)
        self.verdicts = {}

    def begin(self):
        """Take and claim. The manager of a former process of the same owner does not take."""
        rows = self.world.rows
        row = rows.read(KEY)
        if row.owner != self.me:
            take = writes.Take(KEY, self.me, row.owner, row.counter, 10.0, "LATEST")
            row = rows.write(take).row
        self.row = rows.write(writes.Claim(KEY, self.me, row.counter)).row
        self.saved = self.done = number_of(self.row.checkpoint)
        if (output := self.world.output) is not None:
            output.token = self.token = self.row.counter
            self.done = max(self.saved, output.at)
            self.sent = output.at
        self.letters.begin(self.row, at(self.done))

    def process(self):
        """The next batch, of one to three records: each has a row or a letter."""
        if self.done == RECORDS:
            return
        last = min(RECORDS, self.done + self.world.chance.randint(1, 3))
        for number in range(self.done + 1, last + 1):
            verdict = self.world.chance.choice(["row", "letter"])
            if verdict == "letter":
                record, saved = Record(b"x", "k", str(100 + number), 5.0), at(self.saved)
                self.letters.keep(record, FAILURE, 3, delivered=at(last), durable=saved)
            self.verdicts[number] = verdict
            self.done = number

    def save(self, *, renews=False):
        """The output and then the checkpoint, or a renewal; a condition that fails ends it."""
        rows, output = self.world.rows, self.world.output
        if output is not None and not renews and self.done > self.sent:
            if (output.token, output.at) != (self.token, self.sent):
                raise Killed
            self.committed(self.sent, self.done)
            output.at = self.sent = self.done
            if self.world.chance.random() < 0.3:
                raise Killed
        if renews or self.done == self.saved:
            change = writes.Renew(KEY, self.me, self.row.counter)
        else:
            change = writes.Checkpoint(
                KEY, self.me, self.row.counter, at(self.done), at(self.saved)
            )
        outcome = rows.write(change)
        if not isinstance(outcome, writes.Applied):
            raise Killed
        self.row = outcome.row
        if isinstance(change, writes.Checkpoint):
            if output is None:
                self.committed(self.saved, self.done)
            self.saved = self.done

    def save_late(self):
        """As `LeaseStateMachine._late_checkpoint`, with the row as this owner last saw it."""
        row, upto = self.row, self.done if self.world.output is None else self.sent
        if row.has_open_letters or upto <= self.saved:
            return
        late = writes.LateCheckpoint(
            KEY, self.me, at(self.saved), at(upto), letters_to=row.letters_to
        )
        if isinstance(self.world.rows.write(late), writes.Applied):
            if self.world.output is None:
                self.committed(self.saved, upto)
            self.saved = upto

    def committed(self, after, upto):
        for number in range(after + 1, upto + 1):
            self.world.committed[number] = self.verdicts[number]


class World:
    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.rows, self.memory, self.committed = LeaseRows(), Memory(), {}
        self.rows.write(writes.CreateLease(Lease(key=KEY, checkpoint=TRIM_HORIZON)))
        self.frozen = []
        # With one that stores its cursor, its commit decides; without, the checkpoint does.
        self.output = SimpleNamespace(at=0, token=0) if seed % 2 else None

    def live(self):
        """Owners in turn until all records are committed; then what is late arrives."""
        for name in itertools.count():
            if self.rows.read(KEY).checkpoint == at(RECORDS):
                break
            # A process may follow one of the same owner, which is proven dead.
            self.one_owner(f"m{name if self.chance.random() < 0.7 else max(0, name - 1)}")
        for late in self.memory.late:
            late()

    def one_owner(self, name):
        owner = Owner(self, name)
        self.frozen = others = [each for each in self.frozen if each.me != owner.me]
        steps = self.chance.choice([2, 6, 40])
        try:
            self.cut_one(owner, at_all=self.chance.random() < 0.2)
            owner.begin()
            for _ in range(steps):
                self.disturb(others)
                self.cut_one(owner, at_all=self.chance.random() < 0.05)
                self.chance.choice([owner.process, owner.save, lambda: owner.save(renews=True)])()
        except (Killed, SinkError):
            return
        finally:
            self.memory.cut = False
        if self.chance.random() < 0.5:
            self.frozen.append(owner)

    def cut_one(self, owner, *, at_all):
        if at_all:
            self.chance.choice([owner.table, self.memory]).cut = True

    def disturb(self, frozen):
        """What is late arrives, or a frozen owner wakes up, keeps letters and saves late."""
        if self.memory.late and self.chance.random() < 0.3:
            self.memory.late.pop(self.chance.randrange(len(self.memory.late)))()
        if frozen and self.chance.random() < 0.3:
            cut, self.memory.cut = self.memory.cut, False
            zombie = self.chance.choice(frozen)
            try:
                if self.chance.random() < 0.5 and self.rows.read(KEY).owner != zombie.me:
                    zombie.save_late()
                else:
                    zombie.process()
            except (SinkError, Killed):
                pass
            self.memory.cut = cut

    def is_told_right(self):
        counting = [
            number_of(each.letter.record.position)
            for each in self.memory.kept()
            if not each.is_uncommitted
        ]
        given_up = [n for n, verdict in sorted(self.committed.items()) if verdict == "letter"]
        return counting == given_up


def lives_told_wrongly():
    for seed in LIVES:
        world = World(seed)
        world.live()
        assert sorted(world.committed) == [*range(1, RECORDS + 1)]
        if not world.is_told_right():
            yield seed


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Owners begin one after the other."""
    ticks = itertools.count(1.0)
    monkeypatch.setattr(giving_up.time, "time", lambda: next(ticks))


def test_the_letters_that_count_are_those_of_committed_work():
    assert [*lives_told_wrongly()] == []


def without_note(monkeypatch):
    monkeypatch.setattr(LeaseLetters, "_note", lambda *_: None)


def note_after_the_letter(monkeypatch):
    note, keep = LeaseLetters._note, Memory.keep
    noting = []
    monkeypatch.setattr(LeaseLetters, "_note", lambda *given: noting.append(given))

    def kept(self, letter):
        keep(self, letter)
        note(*noting.pop())

    monkeypatch.setattr(Memory, "keep", kept)


def letter_of_what_a_late_checkpoint_passed(monkeypatch):
    note = LeaseLetters._note
    monkeypatch.setattr(LeaseLetters, "_note", lambda *given: note(*given) and None)


def takeover_without_the_cursor_of_the_output(monkeypatch):
    begin = LeaseLetters.begin
    monkeypatch.setattr(LeaseLetters, "begin", lambda self, row, _: begin(self, row, TRIM_HORIZON))


def late_checkpoint_over_letters(monkeypatch):
    real = Owner.save_late

    def save_late(self):
        self.row = msgspec.structs.replace(self.row, letters_to=None)
        real(self)

    monkeypatch.setattr(Owner, "save_late", save_late)
    late = conditions.WRITES[writes.LateCheckpoint].conditions
    kept = tuple(each for each in late if getattr(each, "field", "") != "letters_to")
    monkeypatch.setitem(lease_rows._CONDITIONS, writes.LateCheckpoint, lease_rows._all_of(kept))


def without_takeover(monkeypatch):
    monkeypatch.setattr(Memory, "take_over", lambda *_: None)


def one_name_for_all_owners(monkeypatch):
    monkeypatch.setattr(Letter, "name", property(lambda self: self.position))


def takeover_of_what_is_committed(monkeypatch):
    real = Takeover.is_over

    def is_over(self, letter):
        return real(msgspec.structs.replace(self, taken_over_at="TRIM_HORIZON"), letter)

    monkeypatch.setattr(Takeover, "is_over", is_over)


@pytest.mark.parametrize(
    "broken",
    [
        without_note,
        note_after_the_letter,
        letter_of_what_a_late_checkpoint_passed,
        takeover_without_the_cursor_of_the_output,
        late_checkpoint_over_letters,
        without_takeover,
        one_name_for_all_owners,
        takeover_of_what_is_committed,
    ],
    ids=lambda each: each.__name__.replace("_", " "),
)
def test_without_one_of_the_rules_letters_are_reported_wrongly(monkeypatch, broken):
    broken(monkeypatch)
    assert any(True for _ in lives_told_wrongly())
