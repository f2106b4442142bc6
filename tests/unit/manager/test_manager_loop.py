"""The loop, its pool, and what it performs; signals and samples."""

import errno
import os
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.config.schema import StreamSettings
from kclrun.errors import (
    AccessDenied,
    HostRefused,
    IndexMissing,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from kclrun.leases import commands, events
from kclrun.leases.held_lease import HeldLease
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.transitions import State
from kclrun.local.lease_rows import LeaseRows
from kclrun.manager.gauge import Gauge
from kclrun.manager.loop import IoPool, Loop, SignalPipe
from kclrun.manager.manager import Manager
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.sampling import state_of
from kclrun.manager.service_calls import CredentialRenewal, Prefetching, ServiceCalls
from kclrun.manager.world import ExitReason, FleetServices, SourceStream
from kclrun.model.lease import OFFERED, Halt, Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.state import StateDestination
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.observe.logs import EventLog, LineSink
from kclrun.ports import ShardFilter, StreamSummary
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.protocol.writes import Applied, Ask, CreateLease, OutcomeUnknown, Renew, Take
from tests.patience import HUNG_S
from tests.shortage import no_more_descriptors
from tests.unit.manager.manager_rig import sampler_of_core

replace = msgspec.structs.replace
ENDPOINT = WireEndpoint(url="http://127.0.0.1:9", region="x", signing_region="x")


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def pool(loop):
    pool = IoPool(loop.post, threads=4)
    yield pool
    pool.close(patience_s=2.0)


@pytest.fixture
def log(tmp_path):
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    sink = LineSink(fd)
    yield EventLog(sink, app="a", owner="o")
    sink.close()
    os.close(fd)


def turn_until(loop, condition, timeout_s=HUNG_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        loop.turn(loop.now() + 0.05)


def test_timers_run_in_their_order_and_cancelled_ones_never(loop):
    ran = []
    now = loop.now()
    loop.at(now + 0.02, lambda: ran.append("second"))
    loop.at(now + 0.01, lambda: ran.append("first"))
    loop.at(now + 0.015, lambda: ran.append("never")).cancel()

    turn_until(loop, lambda: len(ran) == 2)

    assert ran == ["first", "second"]


def test_a_turn_runs_256_timers_and_256_posted_calls_and_the_next_turn_the_rest(loop):
    ran = []
    for number in range(300):
        loop.at(loop.now(), lambda number=number: ran.append(number))
        loop.post(lambda number=number: ran.append(-number))

    loop.turn()
    assert sorted(ran) == sorted([*range(256), *(-number for number in range(256))])
    loop.turn()
    assert len(ran) == 600
    loop.turn(loop.now())
    assert len(ran) == 600


@pytest.mark.parametrize(
    ("deadline_s", "timer_s", "is_posted", "wait_s"),
    [
        (None, None, False, 1.0),
        (0.5, None, False, 0.5),
        (0.5, 0.25, False, 0.25),
        (0.25, 0.5, False, 0.25),
        (5.0, 5.0, False, 1.0),
        (-1.0, None, False, 0.0),
        (0.5, 0.5, True, 0.0),
    ],
)
def test_a_turn_waits_for_what_comes_first_and_a_second_at_most(
    loop, monkeypatch, deadline_s, timer_s, is_posted, wait_s
):
    monkeypatch.setattr(loop, "now", lambda: 100.0)
    loop.at(100.1, None).cancel()
    if timer_s is not None:
        loop.at(100.0 + timer_s, lambda: None)
    if is_posted:
        loop.post(lambda: None)

    assert loop._wait_s(None if deadline_s is None else 100.0 + deadline_s) == wait_s


def test_a_word_to_a_closed_loop_is_not_an_error_and_never_run():
    closed, ran = Loop(), []
    closed.close()

    closed.post(lambda: ran.append("late"))

    assert ran == []


def test_a_word_from_another_thread_wakes_the_loop(loop, monkeypatch):
    # It looks up by itself once a second otherwise.
    monkeypatch.setattr("kclrun.manager.loop._WAIT_S_MAX", 2 * HUNG_S)
    ran = []
    threading.Timer(0.05, lambda: loop.post(lambda: ran.append(threading.get_ident()))).start()

    while not ran:
        loop.turn(loop.now() + 2 * HUNG_S)

    assert ran == [threading.get_ident()]


def test_a_descriptor_unwatched_in_the_same_turn_is_not_called(loop):
    pipes = [os.pipe() for _ in range(2)]
    called = []

    def call(number):
        called.append(number)
        for read_fd, _ in pipes:
            loop.unwatch(read_fd)

    for number, (read_fd, write_fd) in enumerate(pipes):
        loop.watch(read_fd, lambda number=number: call(number))
        os.write(write_fd, b"x")

    loop.turn(loop.now() + 0.1)

    assert len(called) == 1
    for ends in pipes:
        for fd in ends:
            os.close(fd)


def test_signals_are_only_enqueued_and_the_former_handlers_come_back():
    former = signal.getsignal(signal.SIGHUP)
    pipe = SignalPipe()
    pipe.open()

    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + HUNG_S
    taken = ()
    while len(taken) < 2 and time.monotonic() < deadline:
        taken += pipe.take()
    pipe.close()

    assert set(taken) == {signal.SIGHUP, signal.SIGTERM}
    assert signal.getsignal(signal.SIGHUP) == former


def test_hang_ups_that_were_ignored_at_the_start_stay_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pipe = SignalPipe()
    pipe.open()
    try:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        pipe.close()
        kept = signal.signal(signal.SIGHUP, former)

    assert kept is signal.SIG_IGN


class Table(LeaseRows):
    """Fails as often as told; keeps who is inside a write of a key."""

    def __init__(self, failures=0):
        super().__init__()
        self.failures = failures
        self.overlaps = 0
        self.inside = set()
        self.guard = threading.Lock()

    def read(self, key):
        if self.failures:
            self.failures -= 1
            raise Unavailable("refused", operation="GetItem", code="")
        return super().read(key)

    def write(self, change):
        key = change.lease.key if isinstance(change, CreateLease) else change.key
        with self.guard:
            self.overlaps += key in self.inside
            self.inside.add(key)
        time.sleep(0.02)
        with self.guard:
            outcome = super().write(change)
            self.inside.discard(key)
        return outcome


class Stream:
    def summary(self):
        return StreamSummary("s", "arn", "ACTIVE", 24, 1, 0.0)

    def list_shards(self, shard_filter=None):
        return () if shard_filter is None else ("filtered",)


def service_calls_of(table, *, loop, pool, log, handled, broken, gone, coordinator=None):
    stream = SourceStream(Stream(), Stream().summary(), StreamSettings(name="s"))
    streams = {ONLY_STREAM: stream}
    world = FleetServices(
        table, streams, None, ENDPOINT, ENDPOINT, lambda: 5.0, coordinator=coordinator
    )
    return ServiceCalls(
        world,
        lambda _: ShardFilter("AT_LATEST"),
        SimpleNamespace(deliver=handled.append, broke=broken.append, table_gone=gone.append),
        loop=loop,
        pool=pool,
        log=log,
    )


@pytest.fixture
def performing(loop, pool, log):
    def make(table, gone=None, coordinator=None):
        handled, broken = [], []
        service_calls = service_calls_of(
            table,
            loop=loop,
            pool=pool,
            log=log,
            handled=handled,
            broken=broken,
            gone=[] if gone is None else gone,
            coordinator=coordinator,
        )
        return service_calls, handled, broken

    return make


@pytest.mark.seconds
def test_a_read_is_repeated_until_it_succeeds_with_one_warning_an_outage(
    performing, loop, tmp_path
):
    service_calls, handled, _ = performing(Table(failures=3))

    service_calls.perform(commands.ReadRow("k"))
    turn_until(loop, lambda: handled)

    assert handled == [events.RowRead("k", None)]
    log = (tmp_path / "log").read_text()
    assert log.count("service_unreachable") == 1
    assert log.count("service_back") == 1


def test_a_broken_row_is_an_answer_and_not_an_outage(performing, loop, tmp_path):
    table = Table()
    table.plant({"leaseKey": {"S": "k"}, "leaseCounter": {"S": "four"}})
    service_calls, handled, _ = performing(table)
    begun = loop.now()

    service_calls.perform(commands.ReadRow("k", begun + 0.1))
    turn_until(loop, lambda: handled)

    (reported,) = handled
    assert isinstance(reported, events.RowUnreadable)
    assert "'k' is broken" in reported.reason
    assert loop.now() - begun >= 0.1
    assert "service_unreachable" not in (tmp_path / "log").read_text()


class Coordinator:
    """Answers once with each of these."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def mode(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "event"),
    [
        (["CLIENT_VERSION_3X"], events.Kcl3ModeRead("CLIENT_VERSION_3X")),
        ([Unavailable("", operation="GetItem", code=""), None], events.Kcl3ModeRead(None)),
        ([AccessDenied("no", operation="GetItem", code="")], events.Kcl3ModeUnreadable("no")),
        ([InvalidRequest("key", operation="GetItem", code="")], events.Kcl3ModeUnreadable("key")),
    ],
)
def test_a_refusal_to_show_the_mode_of_a_kcl_3_fleet_is_an_answer(performing, loop, answers, event):
    service_calls, handled, _ = performing(Table(), coordinator=Coordinator(*answers))

    service_calls.perform(commands.ReadKcl3Mode())
    turn_until(loop, lambda: handled)

    assert handled == [event]


def test_one_write_of_a_key_is_under_way_at_a_time_and_their_order_holds(performing, loop):
    table = Table()
    service_calls, handled, _ = performing(table)
    row = Lease(key="k", checkpoint=TRIM_HORIZON)

    service_calls.perform(commands.WriteRow(CreateLease(row)))
    service_calls.perform(
        commands.WriteRow(Take("k", "kclrun:g:s:n", None, 0, 10.0, "TRIM_HORIZON"))
    )
    service_calls.perform(commands.WriteRow(Renew("k", "kclrun:g:s:n", 1)))
    service_calls.perform(
        commands.WriteRow(CreateLease(Lease(key="other", checkpoint=TRIM_HORIZON)))
    )
    turn_until(loop, lambda: len(handled) == 4)

    mine = [event for event in handled if getattr(event.change, "key", "") == "k"]
    assert [type(event.change) for event in mine] == [Take, Renew]
    assert all(isinstance(event.outcome, Applied) for event in handled)
    assert table.overlaps == 0


def test_a_write_waits_for_its_instant(performing, loop):
    service_calls, handled, _ = performing(Table())
    begun = loop.now()

    service_calls.perform(commands.WriteRow(Renew("k", "o", 1), begun + 0.2))
    turn_until(loop, lambda: handled)

    assert loop.now() - begun >= 0.2


def test_shards_are_listed_with_the_start_filter_only_when_asked(performing, loop):
    service_calls, handled, _ = performing(Table())

    service_calls.perform(commands.ListShards(with_start=False))
    turn_until(loop, lambda: len(handled) == 1)
    service_calls.perform(commands.ListShards(with_start=True))
    turn_until(loop, lambda: len(handled) == 2)

    assert handled == [
        events.ShardsListed((), 5.0, None),
        events.ShardsListed((), 5.0, ("filtered",)),
    ]


def test_a_failure_that_nobody_expects_is_carried_to_the_loop(performing, loop):
    service_calls, _, broken = performing(None)

    service_calls.perform(commands.ScanTable())
    turn_until(loop, lambda: broken)

    assert isinstance(broken[0], AttributeError)


class OnAFullHost:
    """A table whose first call finds that this host has no more to give."""

    def __init__(self, error):
        self.errors = [error]

    def read(self, key):
        if self.errors:
            raise self.errors.pop()

    def write(self, change):
        raise self.errors.pop()


SHORTAGES = (OSError(errno.EMFILE, "Too many open files"), MemoryError("of the test"))


@pytest.mark.parametrize("error", SHORTAGES)
def test_a_read_that_this_host_has_no_room_for_is_repeated(performing, loop, tmp_path, error):
    service_calls, handled, broken = performing(OnAFullHost(error))

    service_calls.perform(commands.ReadRow("k"))
    turn_until(loop, lambda: handled or broken)

    assert (handled, broken) == ([events.RowRead("k", None)], [])
    assert "this host has no more to give" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("error", SHORTAGES)
def test_a_write_that_this_host_had_no_room_for_may_have_happened(performing, loop, error):
    service_calls, handled, broken = performing(OnAFullHost(error))
    take = Take("k", "me", None, 3, 10.0, "TRIM_HORIZON")

    service_calls.perform(commands.WriteRow(take))
    turn_until(loop, lambda: handled or broken)

    assert broken == []
    (resolved,) = handled
    assert resolved.change == take
    assert isinstance(resolved.outcome, OutcomeUnknown)


class Index:
    """A table of which only offers are asked; each answer is a value, or an error to raise."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def offered(self, rows_max):
        self.asked.append(rows_max)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_offers_are_looked_for_once_and_an_outage_is_one_warning(performing, loop, tmp_path):
    row = Lease(key="k", checkpoint=TRIM_HORIZON, owner=OFFERED)
    away = Unavailable("refused", operation="Query")
    index = Index(away, away, (row,))
    service_calls, handled, _ = performing(index)

    for count in (1, 2, 3):
        service_calls.perform(commands.FindOffers(7))
        turn_until(loop, lambda count=count: len(handled) == count)

    assert handled == [
        events.OffersFound(None),
        events.OffersFound(None),
        events.OffersFound((row,)),
    ]
    assert index.asked == [7, 7, 7]
    log = (tmp_path / "log").read_text()
    assert log.count("service_unreachable") == 1
    assert log.count("service_back") == 1


def test_a_table_without_the_index_is_reported_once_and_is_no_outage(performing, loop, tmp_path):
    missing = IndexMissing("no such index", operation="Query", code="ValidationException")
    service_calls, handled, _ = performing(Index(missing, missing))

    for count in (1, 2):
        service_calls.perform(commands.FindOffers(1))
        turn_until(loop, lambda count=count: len(handled) == count)

    assert handled == [events.OffersFound(None)] * 2
    log = (tmp_path / "log").read_text()
    assert log.count("offers_unindexed") == 1
    assert "service_unreachable" not in log


def test_a_query_for_offers_of_a_table_that_is_gone_says_nothing(performing, loop, tmp_path):
    gone = NotFound("no such table", operation="Query", code="ResourceNotFoundException")
    service_calls, handled, _ = performing(Index(gone))

    service_calls.perform(commands.FindOffers(1))
    turn_until(loop, lambda: handled)

    assert handled == [events.OffersFound(None)]
    assert not (tmp_path / "log").exists() or not (tmp_path / "log").read_text()


class Vanishing(LeaseRows):
    """Its first scans say that there is no such table."""

    def __init__(self, missing):
        super().__init__()
        self.missing = missing

    def scan(self, *, consistent=True):
        if self.missing:
            self.missing -= 1
            raise NotFound("no such table", operation="Scan", code="ResourceNotFoundException")
        return super().scan()


def test_after_an_outage_the_next_one_is_reported_anew_with_its_length(performing, loop, tmp_path):
    service_calls, _, _ = performing(Table())
    outages = service_calls.outages
    for _ in range(2):
        outages.failed("read", Unavailable("a", operation="GetItem", code="500"), loop.now() - 5.0)
        outages.failed("read", Unavailable("b", operation="GetItem", code="503"), loop.now())
        [(operation, (since, code))] = outages.items()
        assert (operation, code) == ("read", "500")
        assert 5.0 <= loop.now() - since < HUNG_S
        outages.worked("read")
        outages.worked("read")
        assert list(outages.items()) == []

    lines = [msgspec.json.decode(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [line["event"] for line in lines] == ["service_unreachable", "service_back"] * 2
    assert all(5.0 <= line["outage_s"] < HUNG_S for line in lines[1::2])


def test_an_outage_without_a_code_is_called_by_its_kind(performing):
    outages = performing(Table())[0].outages

    outages.failed("read", Unavailable("no route"), 1.0)

    assert list(outages.items()) == [("read", (1.0, "Unavailable"))]


def test_only_a_second_scan_proves_that_the_table_is_gone(performing, loop, tmp_path):
    gone = []
    once, handled, _ = performing(Vanishing(missing=1), gone)
    once.perform(commands.ScanTable())
    turn_until(loop, lambda: handled)
    assert gone == []

    twice, handled, _ = performing(Vanishing(missing=2), gone)
    twice.perform(commands.ScanTable())
    turn_until(loop, lambda: gone)

    assert handled == []
    assert [type(error) for error in gone] == [NotFound]
    assert "service_unreachable" not in (tmp_path / "log").read_text()


def test_new_credentials_are_handed_over_once_and_a_failure_keeps_the_old(
    loop, pool, log, tmp_path
):
    class Source:
        keys = WireCredentials("a", "b")

        def current(self):
            if isinstance(self.keys, Exception):
                raise self.keys
            return self.keys

        def notify(self, replaced):
            self.replaced = replaced

    source, handed = Source(), []
    handing = CredentialRenewal(source, loop=loop, pool=pool, log=log, renewed=handed.append)

    def look():
        done = len(loop._timers) + 1
        handing.look()
        turn_until(loop, lambda: len(loop._timers) >= done)

    look()
    source.keys = WireCredentials("c", "d")
    look()
    look()
    source.keys = Unavailable("no metadata")
    look()

    look()
    source.keys = WireCredentials("e", "f")
    look()
    source.keys = RuntimeError("SECRET")
    look()

    assert handed == [WireCredentials("c", "d"), WireCredentials("e", "f")]
    assert handing.held == WireCredentials("e", "f")
    reported = (tmp_path / "log").read_text()
    assert reported.count("credentials_not_renewed") == 2, "once an outage"
    assert "no metadata" in reported, "in the provider's words"
    assert "SECRET" not in reported, "an error of another kind may quote a secret"
    apart = [round(instant - loop.now()) for instant, _, _ in loop._timers]
    assert set(apart) == {30}


def test_keys_that_were_replaced_after_a_refusal_are_handed_over_at_once(loop, pool, log):
    class Source:
        keys = WireCredentials("a", "b")

        def current(self):
            return self.keys

        def notify(self, replaced):
            self.replaced = replaced

    source, handed = Source(), []
    handing = CredentialRenewal(source, loop=loop, pool=pool, log=log, renewed=handed.append)
    handing.open()

    source.keys = WireCredentials("c", "d")
    source.replaced()
    turn_until(loop, lambda: handed)

    assert handed == [WireCredentials("c", "d")]
    pending = [timer for _, _, timer in loop._timers if timer.callback is not None]
    assert len(pending) == 1, "and looked for as before"


def test_a_sample_before_anything_happened_is_empty_and_whole():
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n"), lambda: 0.5)

    sample = sampler_of_core(core, began=10.0).take(12.5)

    assert sample.uptime_s == 2.5
    assert sample.leases == ()
    assert sample.records_total == 0


@pytest.mark.parametrize(
    ("has_undone", "state", "reason"),
    [
        (False, WorkerState.FINISHED, ExitReason.CAUGHT_UP),
        (True, WorkerState.LOST, ExitReason.CUT_SHORT),
        (True, WorkerState.HALTED, ExitReason.CAUGHT_UP),
    ],
)
def test_a_stop_that_left_work_without_a_checkpoint_does_not_end_well(
    loop, log, tmp_path, has_undone, state, reason
):
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n"), lambda: 0.5)
    manager = Manager(core, identity=None, loop=loop, log=log, report=ReportWriter(), grace_s=60.0)
    manager.processes = LivingProcesses()
    status = {"state": state, "has_undone": has_undone, "checkpointed": TRIM_HORIZON}
    manager.departed(Living("before the stop", state=WorkerState.LOST, has_undone=True))

    manager.drain("caught up", at_its_end=ExitReason.CAUGHT_UP)
    manager.departed(Living("a", **status))

    assert manager._exit_reason is reason
    assert manager._exit_reason.exit_code == (75 if reason is ExitReason.CUT_SHORT else 0)
    reported = (tmp_path / "log").read_text()
    assert ("checkpoint_missed" in reported) == (reason is ExitReason.CUT_SHORT)


class LivingProcesses:
    """None, and none was forced."""

    has_forced = False

    def broadcast(self, message):
        pass

    def __len__(self):
        return 0


class Living:
    """A lease process as a look sees it."""

    def __init__(self, key, trouble="", awaited="", **status):
        self.key, self.pid, self.trouble, self.heat = key, os.getpid(), trouble, None
        self.awaited = awaited
        self.warning = ""
        self.status = LeaseStatus(
            **{"pid": 1, "incarnation": 1, "state": WorkerState.PROCESSING} | status
        )

    def look(self):
        return self.status

    @property
    def last_status(self):
        return self.status


def test_a_sample_shows_rates_lags_and_trouble_also_of_what_no_process_reads():
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n"), lambda: 0.5)
    halt = Halt("process_records failed 6 times: KeyError", 4.0, 2.0)
    rows = {key: Lease(key=key, checkpoint=TRIM_HORIZON, halt=None) for key in "abc"}
    rows["a"] = replace(rows["a"], halt=halt)
    for key, state in (("a", State.HALTED), ("b", State.RUNNING), ("c", State.RUNNING)):
        core._held.held_leases[key] = HeldLease(key=key, state=state, row=rows[key])
    well = Living("b", records_total=10, millis_behind_latest=0)
    failing = Living("c", "KeyError: 1 (a.py:7)", millis_behind_latest=500, last_fetch_instant=9.0)
    sampler = sampler_of_core(
        core,
        lambda: [well, failing],
        began=10.0,
        leases_command="kclrun leases --config app.yaml",
    )
    sampler.take(10.0)
    well.status = replace(well.status, records_total=40)

    shown = sampler.take(12.0)

    halted, running, raising = shown.leases
    assert (halted.state, halted.lag_ms, halted.note) == ("halted", 10_000, halt.reason)
    assert (running.state, running.records_total, running.records_per_s) == ("running", 40, 15.0)
    assert (raising.state, raising.note, raising.lag_ms) == ("failing", failing.trouble, 3_500)
    assert (shown.lag_ms_max, shown.leases_command) == (10_000, "kclrun leases --config app.yaml")


def test_a_lease_that_waits_for_a_destination_says_for_which_since_when_and_why():
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n"), lambda: 0.5)
    core._held.held_leases["a"] = HeldLease(key="a", state=State.RUNNING)
    words = "output failed 9 times: outputs.table: the database does not answer"
    waiting = Living("a", awaited=words, destination_since_instant=10.0)

    (shown,) = sampler_of_core(core, lambda: [waiting], began=10.0).take(310.0).leases

    assert shown.state == "waiting"
    assert shown.destination_away_s == 300.0
    assert shown.note == f"waits for a destination for 300 s: {words}"


def test_a_lease_that_initializes_is_starting_and_not_ending():
    held_lease = HeldLease(key="a", state=State.RUNNING)

    for state, word in (
        (WorkerState.STARTING, "starting"),
        (WorkerState.CLAIMING, "starting"),
        (WorkerState.PROCESSING, "running"),
        (WorkerState.OFFERING, "ending"),
    ):
        assert state_of(held_lease, Living("a", state=state).status) == word
    assert state_of(held_lease, Living("a", state=WorkerState.STARTING).status, "x") == "failing"


def test_a_gauge_reads_this_process_and_forgets_a_dead_one():
    gauge = Gauge()
    gauge.look([os.getpid(), 2**22 + 1])

    gauged = gauge.look([os.getpid(), 2**22 + 1])

    cpu, memory = gauged[os.getpid()]
    assert cpu is not None
    assert memory > 2**20
    assert gauged[2**22 + 1] == (None, None)


def test_a_gauge_reads_the_memory_of_eight_processes_a_look_in_turn(monkeypatch):
    gauge, read = Gauge(), []
    monkeypatch.setattr(gauge, "_cpu_percent", lambda _: 1.0)
    monkeypatch.setattr(gauge, "_own_bytes", lambda pid: read.append(pid) or pid)
    pids = range(1, 21)

    looks = []
    for _ in range(5):
        gauged = gauge.look(pids)
        looks.append(list(read))
        read.clear()

    assert [len(look) for look in looks] == [8] * 5
    assert sorted([*looks[0], *looks[1], *looks[2][:4]]) == list(pids)
    assert [*looks[2][4:], *looks[3], *looks[4]] == [*looks[0], *looks[1], *looks[2][:4]]
    assert gauged == {pid: (1.0, pid) for pid in pids}


def test_a_gauge_shows_nothing_where_there_is_no_descriptor_to_read_it_with():
    gauge = Gauge()
    gauge.look([os.getpid()])

    with no_more_descriptors():
        gauged = gauge.look([os.getpid()])

    assert gauged == {os.getpid(): (None, None)}


def test_a_host_without_a_thread_to_give_is_refused_in_words(monkeypatch):
    def no_more(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)

    with pytest.raises(HostRefused, match="TasksMax"):
        IoPool(lambda callback: None)


def test_a_host_without_a_free_thread_asks_at_once_and_copies_no_state(loop, log, monkeypatch):
    prefetching = Prefetching(
        StateDestination(path="states", local="copies"),
        application="orders",
        owner="kclrun:g:me:n",
        world=None,
        credentials=lambda: WireCredentials("key", "secret"),
        loop=loop,
        log=log,
        is_stopping=lambda: False,
    )
    ask, sent = Ask("s0", "kclrun:g:me:n", "kclrun:g:other:n", 5.0), []

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    assert not prefetching.delays(ask, lambda: sent.append(ask))
    assert sent == [], "its caller sends it"
