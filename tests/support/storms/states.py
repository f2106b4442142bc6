"""Keyed state of single records in virtual time, and what must hold of it.

A lease process has the real window of records, state, versions and outputs; only user code, the
store of the versions and its requests are simulated. Requests arrive late, twice, or never. A
promise that breaks raises RuleBroken at once: at every position that a row has, the version that it
names is the fold of the records up to there, per key, through all reshards; and nothing that a row
needs is deleted.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import msgspec

import kclrun.outputs.commits
from kclrun.calling.concurrency import RecordWindow, Settled
from kclrun.calling.failures import Breaker, Halt, LetGo
from kclrun.codec.kpl import effective_hash_key
from kclrun.errors import SettingsError, SinkError
from kclrun.lease import commands, events
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.states import State
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.state import is_own_version
from kclrun.model.time import WallTime
from kclrun.outputs.commits import Keyed
from kclrun.outputs.sending import Outputs
from kclrun.processor import Context, RecordCall, RecordContext
from kclrun.protocol import reports
from kclrun.simulation.delivery_queue import SimulatedDeliveryQueue
from kclrun.simulation.stories import RuleBroken
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings
from kclrun.state.chain import Entries, read_chain
from kclrun.state.keyed import LiveEntries, Undoable
from kclrun.state.stores.state_versions import StateVersions
from tests.support.contexts import made_context
from tests.support.outputs_host import FakeHost
from tests.support.storms.outputs import ProcessWithOutputs
from tests.support.storms.playing import Played, play
from tests.support.storms.profile import Profile, Strike, StrikeKind

# The records of a shard have at least so many keys; most have more.
KEYS, KEYS_MIN = 48, 3
# Records of a shard at the same time, and how long a call takes at most.
AT_ONCE, CALL_MAX_S = 6, 0.4
# In the calm what was left in the storm has to be read within seconds.
CALM_CALL_MAX_S = 0.002
# Every so many-th record of a shard makes each call raise, and is skipped; of the others, the share
# whose first call raises. User code is as it is in the calm, too: the fold is one of the records.
POISON_EVERY, RAISING = 41, 0.05
# Versions that nothing names are deleted at this age: much younger than by default, so that a
# deletion meets requests that are late.
RETAIN_S: Final = 30.0

Values = dict[str, dict[str, int]]


@functools.cache
def keys_in(hash_range: HashRange) -> list[str]:
    """Keys whose records go to the shard of this range, however often it was split."""
    found: list[str] = []
    for number in itertools.count():
        if number >= KEYS and len(found) >= KEYS_MIN:
            return found
        key = f"key-{number}"
        if effective_hash_key(key, None) in hash_range:
            found.append(key)
    raise AssertionError("numbers do not end")


def key_of(keys: Sequence[str], number: int) -> str:
    """The key of record `number` of a shard with these keys."""
    return keys[(number * number + number // 3) % len(keys)]


def begin_step(values: Any, _: int) -> None:
    """The first half of what a record changes of its key's values."""
    values["n"] = values.get("n", 0) + 1


def end_step(values: Any, number: int) -> None:
    """The second half. It depends on the order of the records."""
    values["order"] = (values.get("order", 0) * 31 + number) % 1_000_003
    if number % 3:
        values["odd"] = number
    elif "odd" in values:
        del values["odd"]


class Folds:
    """What the keys of each shard hold after so many of its records. Those that are given up change
    nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._known: dict[str, tuple[int, Values]] = {}

    def at(self, shard: str, number: int) -> Values:
        known, values = self._known.get(shard, (number + 1, {}))
        if known > number:
            known, values = 0, self._inherited(shard)
        keys = keys_in(self._range_of(shard))
        for each in range(known + 1, number + 1):
            if each % POISON_EVERY:
                own = values.setdefault(key_of(keys, each), {})
                begin_step(own, each)
                end_step(own, each)
        self._known[shard] = (number, values)
        return values

    def _inherited(self, shard: str) -> Values:
        values: Values = {}
        for parent in self._stream.parents_of(shard):
            total = self._stream.records.total(parent)
            assert total is not None, "a parent is closed"
            for key, of in self.at(parent, total).items():
                if effective_hash_key(key, None) in self._range_of(shard):
                    values[key] = dict(of)
        return values

    def _range_of(self, shard: str) -> HashRange:
        (found,) = (log.hash_range for log in self._stream.shards() if log.shard_id == shard)
        return found


class VersionsOfWorld:
    """All versions of one world; watches its lease table."""

    def __init__(self, world: Any) -> None:
        self.content: dict[tuple[str, str], bytes] = {}
        self.made_at: dict[tuple[str, str], float] = {}
        self.seen: Counter[str] = Counter()
        self.chance = world.scheduler.chance("state")
        self.now = world.scheduler.clock
        self._stream = world.stream
        self._folds = Folds(world.stream)
        self._needed: dict[str, frozenset[str]] = {}  # of each row, by shard
        self._written = world.observer.row_written
        world.observer.row_written = self._row_written

    def create(self, shard: str, name: str, content: bytes) -> None:
        if self.content.setdefault((shard, name), content) != content:
            raise RuleBroken("K14", shard, f"two versions have the name {name}")
        self.made_at.setdefault((shard, name), self.now())
        self.seen["versions"] += 1

    def delete(self, shard: str, names: Sequence[str]) -> None:
        if needed := self._needed.get(shard, frozenset()).intersection(names):
            raise RuleBroken("K15", shard, f"{min(needed)} is deleted, and its row needs it")
        for name in names:
            self.seen["deleted"] += self.content.pop((shard, name), None) is not None

    def _row_written(self, sender: str, change: Any, before: Any, after: Any) -> None:
        self._written(sender, change, before, after)
        if after is None:
            self._needed.pop(before.key, None)
            return
        is_same = before is not None and before.checkpoint == after.checkpoint
        if is_same and before.state_version == after.state_version:
            return
        if is_own_version(after.state_version):
            self._require_fold(after)
        elif after.checkpoint != TRIM_HORIZON:
            raise RuleBroken("K13", after.key, f"no version is named at {after.checkpoint}")

    def _require_fold(self, row: Lease) -> None:
        shard = row.key
        try:
            entries, chain, _ = read_chain(
                row.state_version or "", shard, lambda name: self.content.get((shard, name))
            )
        except SettingsError as error:
            raise RuleBroken("K13", shard, f"its row names a version, and {error}") from None
        self._needed[shard] = frozenset(chain.names)
        number = self._stream.records.number_of(shard, row.checkpoint)
        found, expected = _decoded(entries), self._folds.at(shard, number)
        self.seen["checked"] += 1
        for key in sorted({*found, *expected}):
            if found.get(key) != expected.get(key):
                words = f"at record {number} {key} has {found.get(key)}, not {expected.get(key)}"
                raise RuleBroken("K19", shard, words)


def _decoded(entries: Entries) -> Values:
    return {
        key: {name: msgspec.msgpack.decode(value) for name, value in values.items()}
        for key, values in entries.items()
    }


class _UnderWay(SinkError):
    """A request was sent, and its answer has not come."""


class _Needed(Exception):
    """A restore needs the answer of this request first."""


class _StoreOfProcess:
    """Implements `VersionStore` for code that waits: what is not answered yet raises, and is asked
    for again once it is."""

    def __init__(self, process: ProcessWithState) -> None:
        self._process = process
        self._stored: VersionsOfWorld = process.store
        self.created: set[str] = set()
        self.found: dict[tuple[str, str], bytes | None] = {}
        self.under_way: tuple[str, str, bytes] | None = None

    def create(self, shard: str, name: str, content: bytes) -> None:
        if name in self.created:
            return
        self.under_way = (shard, name, content)
        raise _UnderWay(name)

    def read(self, shard: str, name: str) -> bytes | None:
        at = (shard, name)
        if at not in self.found:
            raise _Needed(at)
        return self.found[at]

    def list(self, shard: str) -> Iterator[tuple[str, float]]:
        now, made_at = self._stored.now(), self._stored.made_at
        return iter([(name, now - made_at[of, name]) for of, name in made_at if of == shard])

    def shards(self) -> list[str]:
        """None: an hour passes between two looks at ended shards, and no storm has two."""
        return []

    def delete(self, shard: str, names: Sequence[str]) -> None:
        """Sent, whenever it arrives; the next LIST says what is left."""
        self._process.ask(functools.partial(self._stored.delete, shard, names), lambda _: None)

    def check(self) -> str:
        return "simulated"

    def close(self) -> None: ...


class RecordsQueue(SimulatedDeliveryQueue):
    """User code gets the records of a batch one by one, several at the same time, each for a time
    of its own. The real window decides, as in `RecordCalls`."""

    process: ProcessWithState
    _window: RecordWindow | None = None
    _record_breaker: Breaker | None = None
    _is_advancing = _is_due = False

    def _attempt(self, batch: Any, _: Any) -> None:
        first, last = batch.given
        self._observer.batch_begun(self._reader, first, last)
        policy = ErrorPolicy(1, 0.2, then="skip")
        breaker = self._record_breaker = self._record_breaker or Breaker(policy.limit)
        window = self._window = RecordWindow(Concurrency(AT_ONCE), policy, breaker)
        keys = keys_in(self.process.hash_range)
        window.admit(
            [Record(b"", key_of(keys, each), str(each)) for each in range(first, last + 1)]
        )
        self._contexts: dict[int, RecordContext] = {}
        self._raised_once: set[int] = set()
        self._upto = 0
        self._is_busy = True
        self.busy_since = self.busy_since or self._now()
        self._go_on()

    def _go_on(self) -> None:
        if self._window is None:
            super()._go_on()
            return
        self._is_due = True
        if self._is_advancing:
            return
        self._is_advancing = True
        while self._is_due and self._window is not None:
            self._is_due = False
            self._advance(self._window)
        self._is_advancing = False
        if self._window is None:
            super()._go_on()

    def _advance(self, window: RecordWindow) -> None:
        fence = self.process.life.own.fence
        if self._delivery.is_ending and fence is None:
            window.stop_at_once()
        elif self._delivery.is_ending:
            window.stop()
        while (step := window.next_step(self._now())) is not None:
            match step:
                case Settled(upto):
                    self._settle(window, upto)
                case LetGo(number):
                    self.process.store.seen["given up"] += 1
                    window.let_go(number)
                case Halt(reason):
                    self._delivery.halt()
                    failed = reports.ProcessorFailed("process_record", reason or "as drawn", 1)
                    self._post(failed)
        if fence is not None and self._now() < fence:
            for number in window.starts(self._now()):
                self._begin_call(window, number)
        if window.is_over:
            self._end(window)
        elif (due := window.wake_instant) is not None and due > self._now():
            self._after(due - self._now() + 0.001, self._go_on)
        elif not window.running:
            self._after(0.5, self._look)

    def _look(self) -> None:
        """As `RecordDelivery`: while a stop waits, whether the lease was renewed or lost."""
        if self._window is not None and not self._window.running:
            self._go_on()

    def _begin_call(self, window: RecordWindow, number: int) -> None:
        record = window.record(number)
        context = self._contexts[number] = RecordCall(self.process.context, record)
        begin_step(context.state[record], _number(record))
        is_storm = self._world_now() < self.process.faults_until_s
        pause_s = self._user_code._chance() * (CALL_MAX_S if is_storm else CALM_CALL_MAX_S)
        self._after(pause_s, functools.partial(self._end_call, window, number))

    def _end_call(self, window: RecordWindow, number: int) -> None:
        record, context = window.record(number), self._contexts[number]
        at = _number(record)
        end_step(context.state[record], at)
        context.is_open = False
        if self._raises(at):
            del self._contexts[number]
            self.process.take_back(context)
            error = window.checked(number, ValueError("as drawn"))
            window.raised(number, error, self._now(), WallTime(0.0))
            self.process.store.seen["raised"] += 1
        else:
            window.returned(number)
            self.process.store.seen["out of order"] += number > window.first
        self._go_on()

    def _raises(self, number: int) -> bool:
        if number % POISON_EVERY == 0:
            return True
        if number in self._raised_once or self._user_code._chance() >= RAISING:
            return False
        self._raised_once.add(number)
        return True

    def _settle(self, window: RecordWindow, upto: int) -> None:
        batch = self._batch
        assert batch is not None, "its records are settled"
        changes: list[Undoable] = []
        for number in range(self._upto, upto):
            context = self._contexts.pop(number, None)
            changes += (context.changes or ()) if context is not None else ()
        first, self._upto = batch.first + self._upto, upto
        last = batch.first + upto - 1
        self._observer.batch_processed(self._reader, first, last)
        position = self._stream.records.position(self._key, last)
        self.process.settle(position, changes)
        self._post(events.BatchProcessed(position))

    def _end(self, window: RecordWindow) -> None:
        """All are settled; or some are left to the next owner, as if they were never given."""
        batch = self._batch
        assert batch is not None, "it is under way"
        for _, context in sorted(self._contexts.items(), reverse=True):
            self.process.take_back(context)
        if window.unsettled:
            self.process.store.seen["left"] += 1
            self._observer.batch_raised(self._reader, batch.first + window.first)
            self._given = batch.first + window.first - 1
        self._window = self._batch = None
        self._is_busy = False


def _number(record: Record) -> int:
    return int(record.position.sequence_number)


class ProcessWithState(ProcessWithOutputs):
    """A lease process with keyed state, whose user code gets single records at the same time."""

    kinds = ()
    rows_wait_s = 30.0
    queue_kind = RecordsQueue
    store_kind = VersionsOfWorld
    store: VersionsOfWorld

    def policy(self, host: Any, start: Any) -> LeasePolicy:
        policy = super().policy(host, start)
        self.outputs: Outputs | None = None
        self._parents: dict[LeaseKey, Lease | None] = {}
        return msgspec.structs.replace(policy, has_storing_outputs=True, has_keyed_state=True)

    # The start [K13, K16].

    def _begin_lane(self, _: int) -> None:
        row = self._row
        assert row.hash_range is not None, "the fleet writes it"
        self.queue.process, self.hash_range = self, row.hash_range
        self._versions_store = _StoreOfProcess(self)
        nonce = f"{self.store.chance.getrandbits(32):08x}"
        self._versions = StateVersions(self._versions_store, self.key, row.counter, nonce)
        self._restore()

    def _restore(self) -> None:
        try:
            entries = self._versions.restore(self._row, self._rows_of, self.hash_range)
        except _Needed as needed:
            self._ask_for(needed.args[0])
            return
        except SettingsError as error:
            raise RuleBroken("K13", self.key, f"cannot begin: {error}") from None
        self.store.seen["restored"] += bool(entries)
        self._live = LiveEntries(entries, self._refuse, self.hash_range, 2**30)
        self.context = self._make_context(self._live)
        self.outputs = Outputs(
            [],
            FakeHost(self._post_of_outputs),
            now=self.machine.instant,
            state=Keyed(self._versions, self._live.undo, RETAIN_S),
        )
        start, _ = self.outputs.begin(self._row.checkpoint, {}, may_adopt=True)
        self._start, self._start_number = start, self._number(start)
        self.post(events.OutputsBegan(start, {}))
        if self.life.state is State.INITIALIZING:  # else delivery was stopped meanwhile
            self.queue.call(commands.CallInitialize(self._row))

    def _rows_of(self, keys: Sequence[LeaseKey]) -> Mapping[LeaseKey, Lease | None]:
        for key in keys:
            if key not in self._parents:
                raise _Needed(key)
        return self._parents

    def _ask_for(self, needed: Any) -> None:
        again = functools.partial(self.os.after, 0.5, lambda: self._ask_for(needed))
        if isinstance(needed, tuple):
            found, look = self._versions_store.found, self.store.content.get

            def read(content: bytes | None) -> None:
                found[needed] = content
                self._restore()

            self._request(functools.partial(look, needed), read, again)
            return

        def came(row: Lease | None) -> None:
            self._parents[needed] = row
            self._restore()

        self._uplink.read(
            needed, lambda row: self.os.act(functools.partial(came, row)), lambda _: again()
        )

    def take_back(self, context: RecordContext) -> None:
        """As `RecordCalls`."""
        self._live.undo_all(context.changes or ())

    def _refuse(self, *_: Any) -> None:
        raise AssertionError("only records change the state")

    def _make_context(self, live: LiveEntries) -> Context:
        return made_context(
            shard=self.key, position=self._row.checkpoint, uncheckpointed_max=1, state=live
        )

    # The thread of the outputs.

    def settle(self, position: ExtendedSequenceNumber, changes: Sequence[Undoable]) -> None:
        """Records up to here are done, with these changes."""
        outputs = self.outputs
        assert outputs is not None, "it has begun"
        outputs.rows.begin_batch()
        outputs.rows.place_changes(changes)
        outputs.rows.end_batch(position)
        outputs.settle(position)
        self.os.after(0.0, self._serve)

    def _report(self, report: reports.Report) -> None:
        super()._report(report)
        if isinstance(report, reports.Checkpointed) and self.outputs is not None:
            self.outputs.confirm(self.life.own.confirmed.state_version)
            self.os.after(0.0, self._serve)

    def _serve(self) -> None:
        outputs = self.outputs
        if outputs is None or self._is_busy or self.is_over:
            return
        if self._asked is not None:
            asked, self._asked = self._asked, None
            outputs.commit(asked)
        if not outputs._has_work():
            return
        outputs.turn()
        if (sent := self._versions_store.under_way) is not None:
            self._versions_store.under_way = None
            self._is_busy = True
            self._create(*sent)
        elif outputs._has_work():
            self.os.after(0.001, self._serve)

    def _create(self, shard: str, name: str, content: bytes) -> None:
        create = functools.partial(self.store.create, shard, name, content)

        def created(_: None) -> None:
            self._versions_store.created.add(name)
            self._is_busy = False
            self._serve()

        def unknown() -> None:
            self.store.seen["unknown"] += 1
            self._post_of_outputs(events.OutputsNotCommitted(self._row.checkpoint, "timed out"))
            self._request(create, created, unknown)

        self._request(create, created, unknown)

    def _post_of_outputs(self, event: events.Event) -> None:
        if isinstance(event, events.OutputsRefused | events.OutputsSuperseded):
            raise RuleBroken("K5", self.key, f"the state refuses a commit: {event}")
        if not (isinstance(event, events.OutputsNotCommitted) and self._versions_store.under_way):
            self.post(event)

    def ask(self, action: Any, reply: Any) -> None:
        """A request that is not repeated."""
        self._request(action, reply, lambda: None)


def versions_of(process_kind: type[ProcessWithOutputs]) -> VersionsOfWorld:
    """The versions of the one world that was played."""
    (store,) = process_kind.stores.values()
    assert isinstance(store, VersionsOfWorld)
    return store


STORM_S: Final = 600.0
_STRIKES: Final[tuple[StrikeKind, ...]] = (
    *("kill_process", "freeze_process", "kill_manager", "cut_host", "freeze_host", "kill_host"),
    *("drain_host", "move_lease", "split_shard", "merge_shards"),
)


def state_profile(seed: int, storm_s: float = STORM_S) -> Profile:
    """Zombies, requests that arrive late, reshards: a strike each 12 s on three hosts."""
    chance = random.Random(seed)
    strikes = tuple(
        Strike(
            at_s=at_s + chance.uniform(0, 12),
            kind=chance.choice(_STRIKES),
            target=chance.randrange(12),
            lasts_s=chance.uniform(2.0, 40.0),
        )
        for at_s in range(20, int(storm_s), 12)
    )
    return Profile(
        seed=seed,
        hosts=3,
        records_per_s=8.0,
        settings=FleetSettings(checkpoint_every_s=5.0),
        storm_s=storm_s,
        strikes=strikes,
        with_state=True,
    )


# What ends a state for good, as its documents say: another program deletes its row, or the records
# that it rests on are gone.
_END_STATE: Final = ("delete_row", "recreate_stream", "expire_shards")


# One shard keeps up with it: three keys of calls that take 0.2 s.
_RECORDS_PER_S_MAX: Final = 12.0


def with_state(profile: Profile) -> Profile:
    """A storm that was drawn, over processes with state: user code is that of this module, and all
    members of the fleet have state."""
    return msgspec.structs.replace(
        profile,
        java_workers=0,
        records_per_s=min(profile.records_per_s, _RECORDS_PER_S_MAX),
        user_code=UserCode(),
        strikes=tuple(each for each in profile.strikes if each.kind not in _END_STATE),
        with_state=True,
    )


def play_any(profile: Profile, replay: str = "") -> Played:
    """Play a storm with what its profile says that processes have."""
    if profile.with_state:
        return play_with_state(profile, replay)[0]
    return play(profile, replay=replay)


def play_with_state(profile: Profile, replay: str = "") -> tuple[Played, VersionsOfWorld]:
    """Play one storm; versions that nothing names are looked for twice a minute."""
    kind = ProcessWithState.of(faults_until_s=profile.storm_s, late=0.1)
    often = mock.patch.object(kclrun.outputs.commits, "COLLECT_EVERY_S", 30.0)
    with often:
        return play(profile, process_kind=kind, replay=replay), versions_of(kind)
