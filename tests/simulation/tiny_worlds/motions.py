"""One step from one state to the next: events go in, commands are carried out, until all rest.

Everything that needs nobody else happens at once, within the step: reports, calls of user code,
starting a process, a scan, a listing. What goes over the network waits for a step of its own
(`moves.py`). Rule: a manager's shell writes a key once at a time, and a lease process does one
thing after the other, as the real ones do.
"""

from collections import deque

from kclrun.calling.delivery import ConfirmEnd, ConfirmStop, StartBatch
from kclrun.lease import commands as worker_commands
from kclrun.lease import events as worker_on
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.leases import commands as manager_commands
from kclrun.leases import events
from kclrun.model.lease import LeaseKey
from kclrun.model.policies import CheckpointPolicy
from kclrun.protocol.reports import CoreReport, Report
from kclrun.protocol.writes import Applied
from tests.simulation.tiny_worlds import rules
from tests.simulation.tiny_worlds.shells import Shells, chance
from tests.simulation.tiny_worlds.snapshots import copy_of_life
from tests.simulation.tiny_worlds.states import LiveHost, LiveProcess, Request, State
from tests.simulation.tiny_worlds.worlds import FAILOVER_S, OWNERS
from tests.support.build import position

CHECKPOINT_EVERY_S = 1.0


def begin(shells: Shells) -> State:
    """Both managers have just started."""
    motion = Motion(shells, shells.unborn())
    for index in range(len(OWNERS)):
        motion.feed(index, events.Started(0.0))
    return motion.state()


class Motion:
    """What it touches is copied first."""

    def __init__(self, shells: Shells, state: State, *, is_scan_stale: bool = False) -> None:
        self.shells = shells
        self.before = state
        self.rows = state.rows
        self.ledgers = state.ledgers
        self.ticks = state.ticks
        self.faults_left = state.faults_left
        self.drains_left = state.drains_left
        self.hosts = list(state.hosts)
        self._is_scan_stale = is_scan_stale
        self._touched = [False] * len(self.hosts)
        self._events = [deque() for _ in self.hosts]
        self._is_pumping = [False] * len(self.hosts)

    def state(self) -> State:
        """What came of it."""
        return State(
            self.rows, tuple(self.hosts), self.ledgers, self.ticks, self.faults_left,
            self.drains_left,
        )  # fmt: skip

    def host(self, index: int) -> LiveHost:
        """To be changed."""
        if not self._touched[index]:
            self._touched[index] = True
            self.hosts[index] = self.hosts[index].copy()
        return self.hosts[index]

    def process(self, index: int, key: str) -> LiveProcess:
        """To be changed."""
        host = self.host(index)
        process = host.processes[key]
        before = self.before.hosts[index].processes.get(key)
        if process is before:
            process = host.processes[key] = process.copy()
            process.life = copy_of_life(process.life)
        return process

    def instant(self, index: int) -> float:
        return self.shells.instant(index, self.ticks)

    def note(self, who: str, what: object) -> None:
        """For the story."""
        if self.shells.log is not None:
            self.shells.log.append(f"{who}: {what}")

    # The table.

    def write(self, sender: str, change):
        """Carry it out, under the rules that every write must keep."""
        rows = dict(self.rows)
        self.shells.rows.hold(rows)
        outcome = self.shells.rows.write(change)
        self.note("table", f"{type(outcome).__name__}: {change} of {sender}")
        if isinstance(outcome, Applied):
            self.shells.applied.add(type(change).__name__)
            before, self.rows = self.rows, rows
            rules.check_write(self, sender, change, before)
        return outcome

    def read(self, key: str):
        self.shells.rows.hold(self.rows)
        return self.shells.rows.read(LeaseKey(key))

    # A manager.

    def feed(self, index: int, event) -> None:
        """Give an event to the manager's core, after those that wait already."""
        host = self.host(index)
        if not host.has_manager or host.is_finished:
            return
        queue = self._events[index]
        queue.append(event)
        if self._is_pumping[index]:
            return
        self._is_pumping[index] = True
        pod, now = self.shells.cores[index], self.instant(index)
        core = pod.load(host.mind)
        while queue:
            for command in core.handle(queue.popleft(), now):
                self.note(f"host {'ab'[index]}", command)
                self._perform(index, command)
            core.check()
        self._is_pumping[index] = False
        due = core.next_deadline(now)
        host.alarm = due if due > now else now + 1e-3
        host.is_draining = core.is_draining
        host.mind = pod.save()

    def _perform(self, index: int, command) -> None:
        host = self.hosts[index]
        match command:
            case manager_commands.ScanTable():
                self._scan(index)
            case manager_commands.ListShards():
                listed = self.shells.world.shards
                self._events[index].append(events.ShardsListed(listed, float(self.ticks)))
            case manager_commands.FindOffers(rows_max):
                self.shells.rows.hold(self.rows)
                self._events[index].append(events.OffersFound(self.shells.rows.offered(rows_max)))
            case manager_commands.WriteRow(change, not_before):
                if not_before is not None and not_before > self.instant(index):
                    host.timed = (*host.timed, (not_before, change))
                else:
                    self.send(index, change)
            case manager_commands.ReadRow(key):
                self._ask(host, "row", key)
            case manager_commands.ReadParents(key, parents):
                self._ask(host, "parents", (key, parents))
            case manager_commands.StartProcess():
                self._start(index, command)
            case manager_commands.DrainProcess(key, reason):
                if key in host.processes:
                    self.post(index, key, worker_on.DrainRequested(reason))
            case manager_commands.PublishOthersInSight(others):
                host.others_in_sight = others
                for key in tuple(host.processes):
                    self.post(index, key, worker_on.OthersInSight(others))
            case manager_commands.Finish():
                rules.check_finish(self, index)
                host.is_finished = True
            case manager_commands.Note():
                pass

    def _scan(self, index: int) -> None:
        self.shells.rows.hold(self.rows)
        pages = tuple(lease for page in self.shells.rows.scan() for lease in page.leases)
        event = events.LeasesScanned(pages)
        if self._is_scan_stale:
            host = self.hosts[index]
            host.requests = (*host.requests, Request("scan", None, 0.0, event))
        else:
            self._events[index].append(event)

    def _ask(self, host: LiveHost, kind: str, what) -> None:
        host.requests = (*host.requests, Request(kind, what, 0.0))

    def send(self, index: int, change) -> None:
        """A manager's write; one of a key at a time."""
        host = self.host(index)
        key = rules.key_of(change)
        if any(each.kind == "write" and rules.key_of(each.what) == key for each in host.requests):
            host.waiting = (*host.waiting, change)
            return
        rules.check_one_writer(self, index, key)
        host.requests = (*host.requests, Request("write", change, self.instant(index)))

    def answered(self, index: int, request: Request, event) -> None:
        """A manager hears what became of a request."""
        host = self.host(index)
        host.requests = tuple(each for each in host.requests if each is not request)
        if request.kind == "write":
            key = rules.key_of(request.what)
            for waiting in host.waiting:
                if rules.key_of(waiting) == key:
                    host.waiting = tuple(each for each in host.waiting if each is not waiting)
                    self.send(index, waiting)
                    break
        self.feed(index, event)

    # A lease process.

    def _start(self, index: int, start: manager_commands.StartProcess) -> None:
        host = self.hosts[index]
        rules.check_start(self, index, start.key)
        host.started += 1
        policy = LeasePolicy(
            key=start.key,
            me=OWNERS[index],
            seen_counter=start.counter,
            expires_instant=start.expires_instant,
            failover_s=FAILOVER_S,
            checkpoint=CheckpointPolicy(every_s=CHECKPOINT_EVERY_S),
            has_waited=start.has_waited,
            others_in_sight=host.others_in_sight,
        )
        process = LiveProcess(start.key, host.started, LeaseStateMachine(policy, chance))
        host.processes[start.key] = process
        self._events[index].append(events.ProcessStarted(start.key, process.number))
        self.post(index, start.key, worker_on.Started())

    def post(self, index: int, key: str, event) -> None:
        """Something happened in a lease process; it is taken in when nothing is asked."""
        process = self.process(index, key)
        process.events = (*process.events, event)
        self.turn(index, process)

    def turn(self, index: int, process: LiveProcess) -> None:
        """One thing after the other, until a request is under way or nothing is left to do."""
        host, now = self.host(index), self.instant(index)
        if process.commands is None:
            return  # it is at it already, further up
        commands = deque(process.commands)
        process.commands = None
        while process.request is None and host.processes.get(process.key) is process:
            if commands:
                self.note(f"host {'ab'[index]}/{process.key}", commands[0])
                self._perform_in_process(index, process, commands.popleft())
            elif process.events:
                event, *rest = process.events
                process.events = tuple(rest)
                commands.extend(process.life.handle(event, now))
            else:
                break
        process.commands = tuple(commands)
        due = process.life.next_deadline(now)
        process.alarm = due if due > now else now + 1e-3

    def _perform_in_process(self, index: int, process: LiveProcess, command) -> None:
        now = self.instant(index)
        match command:
            case (
                worker_commands.SendWrite(_, due)
                | worker_commands.SendLateCheckpoint(_, due)
                | worker_commands.ReadOwnRow(due)
            ):
                if due is not None and due > now:
                    process.timed = (*process.timed, (due, command))
                else:
                    self.request(index, process, command)
            case worker_commands.ReadRows(keys):
                process.request = Request("rows", keys, now)
            case worker_commands.ListShards():
                event = worker_on.ShardsListed(self.shells.world.shards)
                process.events = (event, *process.events)
            case worker_commands.AllowDelivery():
                process.delivery.allow(command)
                rules.check_permit(self, index, process)
            case worker_commands.StopDelivery():
                process.delivery.stop()
            case (
                worker_commands.CallInitialize()
                | worker_commands.CallShardEnded()
                | worker_commands.CallShutdownRequested()
                | worker_commands.CallLeaseLost()
            ):
                process.delivery.call(command)
            case Report():
                self._report(index, process, command)
            case worker_commands.Exit(cause):
                if cause in {worker_commands.ExitCause.LOST, worker_commands.ExitCause.REPLACED}:
                    self.unclean(process.key)
                self.ends(index, process, cause.value)
            case worker_commands.AnswerCheckpoint():
                pass
        self._go_on(index, process)

    def request(self, index: int, process: LiveProcess, command) -> None:
        """Its time has come, and nothing else is under way."""
        now = self.instant(index)
        if isinstance(command, worker_commands.ReadOwnRow):
            process.request = Request("row", process.key, now)
        elif process.life.own.sends(command.change):
            process.request = Request("write", command.change, now)
            rules.check_one_write(self, index, process)

    def heard(self, index: int, key: str, event) -> None:
        """A lease process hears what became of its request: before anything else."""
        process = self.process(index, key)
        process.request = None
        process.events = (event, *process.events)
        self.turn(index, process)

    def _happens(self, process: LiveProcess, event) -> None:
        process.events = (*process.events, event)

    def _go_on(self, index: int, process: LiveProcess) -> None:
        """What starts at once where user code is idle: all but batches, which are moves of their
        own. The end of a closed shard is seen as soon as its last record is processed."""
        world = self.shells.world
        while not process.busy:
            if process.delivered >= world.records and world.is_closed(process.key):
                process.delivery.end()
            match process.delivery.next_start(None, self.instant(index)):
                case None:
                    return
                case ConfirmStop():
                    self._happens(process, worker_on.DeliveryStopped())
                case ConfirmEnd():
                    children = world.children_of(process.key)
                    self._happens(process, worker_on.ShardExhausted(children))
                case call:
                    if isinstance(call, worker_commands.CallInitialize):
                        process.delivered = rules.number_of(call.row.checkpoint, world.records)
                        process.is_initialized = True
                    self._happens(process, worker_on.CallReturned())

    def begins_batch(self, index: int, key: str) -> None:
        """User code is given the next record."""
        process = self.process(index, key)
        waiting = self.shells.world.records - process.delivered
        assert process.delivery.next_start(waiting, self.instant(index)) == StartBatch(1)
        process.busy, process.busy_ticks = process.delivered + 1, 0
        process.delivered += 1
        rules.check_batch(self, index, process)
        self._happens(process, worker_on.BatchDelivered(position(process.busy), 1, 0))
        self.turn(index, process)

    def ends_batch(self, index: int, key: str) -> None:
        """User code is done with it."""
        process = self.process(index, key)
        number, process.busy = process.busy, 0
        ledger = self.ledgers[key]
        processed = max(ledger.processed, number)
        self.ledgers = {**self.ledgers, key: ledger._replace(processed=processed)}
        self._happens(process, worker_on.BatchProcessed(position(number)))
        self._go_on(index, process)
        self.turn(index, process)

    def unclean(self, key: str) -> None:
        """What was processed and not checkpointed may come again from here on."""
        self.ledgers = {**self.ledgers, key: self.ledgers[key]._replace(is_unclean=True)}

    def ends(self, index: int, process: LiveProcess, reason: str) -> None:
        """Exited, or killed. A write under way may still arrive."""
        host = self.host(index)
        del host.processes[process.key]
        request = process.request
        if request is not None and request.kind == "write" and request.answer is None:
            host.orphans = (*host.orphans, (request.what, process.number))
        if host.has_manager:
            host.reaps = (*host.reaps, (process.key, process.number, reason))

    def _report(self, index: int, process: LiveProcess, report: Report) -> None:
        if isinstance(report, CoreReport):
            self.feed(index, events.ProcessReported(process.key, report))
