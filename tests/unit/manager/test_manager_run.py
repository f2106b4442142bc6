"""A manager's run, from its first process to its last word: how it begins and why it ends."""

import errno
import signal

import pytest

from kclrun.errors import HostFailed, HostRefused, NotFound, Throttled, Unavailable
from kclrun.ipc.messages import OthersInSight
from kclrun.leases import commands, events
from kclrun.local.lease_rows import LeaseRows
from kclrun.manager import orphans
from kclrun.manager.forks import ForkRefused
from kclrun.manager.world import ExitReason
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.stream import ONLY_STREAM
from kclrun.protocol.writes import CreateLease, Take
from tests.unit.manager.manager_rig import BEGAN, ManagerRig

TERM, INT, QUIT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP


def owners(rig):
    return {lease.owner for page in rig.table.scan() for lease in page.leases}


# A stop in good order.


@pytest.mark.parametrize("number", [TERM, INT])
def test_the_first_signal_gives_every_lease_up_and_that_is_a_stop_in_good_order(rig, number):
    run = rig(shards=4)
    reported = []
    run.manager.stop_begins = lambda: reported.append(run.seconds)
    run.signal_at(20.0, number)

    assert run.run() is ExitReason.DRAINED

    assert sorted(run.processes.started) == ["s0", "s1", "s2", "s3"]
    assert owners(run) == {None}
    assert sorted(run.processes.reported("drain")) == [
        ("drain", f"s{at}", number.name, pytest.approx(BEGAN + 80.0)) for at in range(4)
    ]
    assert reported == [pytest.approx(20.0)], "once"
    assert run.seconds < 22.0
    assert not run.lines("stop_hurried")
    assert not run.lines("stop_incomplete")
    assert [run.report.shard(f"s{at}", None).restarts for at in range(4)] == [0, 0, 0, 0]


def test_a_signal_that_comes_while_the_manager_says_who_it_is_stops_it_in_good_order(rig):
    run = rig()

    assert run.run(lambda: signal.raise_signal(TERM)) is ExitReason.DRAINED

    assert run.processes.started == []


def test_the_former_handlers_come_back_after_a_run_and_after_a_failure(rig):
    before = [signal.getsignal(number) for number in (TERM, INT, QUIT, HUP)]
    run = rig()
    run.signal_at(1.0, TERM)
    run.run()
    assert [signal.getsignal(number) for number in (TERM, INT, QUIT, HUP)] == before

    with pytest.raises(ZeroDivisionError):
        rig().run(lambda: 1 // 0)
    assert [signal.getsignal(number) for number in (TERM, INT, QUIT, HUP)] == before


def test_on_a_terminal_hang_ups_are_one_stop_in_good_order(rig):
    """A terminal that is closed sends more than one, from the kernel and from the shell."""
    run = rig(shards=4, stop_signals=(TERM, INT, HUP))
    run.processes.is_stuck = True
    for after_s in (20.0, 20.1, 25.0):
        run.signal_at(after_s, HUP)
    run.at(40.0, lambda: setattr(run.processes, "is_stuck", False))
    run.signal_at(40.0, TERM)

    run.run()

    assert [line["reason"] for line in run.lines("draining")] == ["SIGHUP"]
    assert [line["signal"] for line in run.lines("stop_hurried")] == ["SIGTERM"]
    assert not run.lines("signal_ignored")


def test_a_hang_up_is_reported_and_ends_nothing(rig):
    run = rig()
    run.signal_at(5.0, HUP)
    run.at(20.0, lambda: owned.append(owners(run)))
    run.signal_at(30.0, TERM)
    owned = []

    assert run.run() is ExitReason.DRAINED

    assert owned == [{run.identity.id}]
    assert [line["signal"] for line in run.lines("signal_ignored")] == ["SIGHUP"]


def test_a_second_signal_leaves_two_more_seconds_and_begins_no_second_stop(rig):
    run = rig()
    reported = []
    run.manager.stop_begins = lambda: reported.append(run.seconds)
    run.processes.is_stuck = True
    run.signal_at(20.0, TERM)
    run.signal_at(25.0, TERM)

    assert run.run() is ExitReason.CUT_SHORT

    (hurried,) = run.processes.reported("hurry")
    assert hurried[1] == pytest.approx(BEGAN + 27.0)
    assert len(reported) == 1
    (line,) = run.lines("stop_hurried")
    assert (line["signal"], line["action"]) == ("SIGTERM", "two more seconds")


def test_a_grace_that_ends_with_leases_in_hand_leaves_their_rows_to_expire_and_says_so(rig):
    run = rig(shards=4, grace_s=30.0)
    run.processes.is_stuck = True
    run.signal_at(20.0, TERM)

    assert run.run() is ExitReason.CUT_SHORT

    # A second for the stacks, five for the last writes.
    assert run.seconds == pytest.approx(20.0 + 30.0 + 6.0, abs=0.2)
    assert [line["leases"] for line in run.lines("stop_incomplete")] == [4]
    assert owners(run) == {run.identity.id}


def test_quit_ends_every_process_at_once_and_that_is_a_stop_cut_short(rig):
    run = rig()
    run.processes.is_stuck = True
    run.signal_at(20.0, TERM)
    run.signal_at(21.0, QUIT)

    assert run.run() is ExitReason.CUT_SHORT

    assert [at for _, at in run.processes.reported("kill")] == [pytest.approx(BEGAN + 21.0)]
    assert run.seconds == pytest.approx(21.0, abs=0.2)
    (line,) = run.lines("stop_hurried")
    assert (line["signal"], line["action"]) == ("SIGQUIT", "no more patience")
    assert len(run.lines("stop_incomplete")) == 1


def test_quit_cuts_short_what_only_one_process_still_lingered_for(rig):
    run = rig()
    run.at(20.0, lambda: run.processes._counters.update(other=1))
    run.signal_at(20.0, TERM)
    run.signal_at(25.0, QUIT)

    assert run.run() is ExitReason.CUT_SHORT

    assert owners(run) == {None}
    assert run.lines("stop_incomplete") == [], "no row was left to expire"


def test_quit_waits_for_the_dead_and_no_longer_than_six_seconds_for_what_no_signal_ends(rig):
    run = rig()
    run.processes.is_stuck = run.processes.is_unkillable = True
    run.signal_at(20.0, QUIT)

    assert run.run() is ExitReason.CUT_SHORT

    assert run.seconds == pytest.approx(26.0, abs=0.2)


def test_a_stop_for_which_a_process_had_to_be_forced_was_cut_short(rig):
    run = rig()
    run.signal_at(20.0, TERM)
    run.at(20.05, lambda: setattr(run.processes, "has_forced", True))

    assert run.run() is ExitReason.CUT_SHORT

    assert owners(run) == {None}


def test_a_run_waits_for_the_last_process_after_the_last_row_was_given_up(rig):
    run = rig()
    lingering = run.processes._counters
    run.at(20.0, lambda: lingering.update(other=1))
    run.signal_at(20.0, TERM)
    run.at(30.0, lambda: lingering.pop("other"))

    assert run.run() is ExitReason.DRAINED

    assert run.seconds == pytest.approx(30.0, abs=0.1)


@pytest.mark.parametrize(
    ("by_s", "second_by_s", "force_s"), [(90.0, None, 80.0), (40.0, None, 40.0), (50.0, 45.0, 50.0)]
)
def test_a_machine_that_ends_bounds_the_stop_and_a_later_word_only_that_bound(
    rig, by_s, second_by_s, force_s
):
    run = rig(shards=1)
    run.processes.is_stuck = second_by_s is not None
    drain = run.manager.drain
    run.at(20.0, lambda: drain("spot", at_its_end=ExitReason.CAUGHT_UP, by=BEGAN + by_s))
    run.at(21.0, lambda: drain("again"))
    if second_by_s is not None:
        run.at(22.0, lambda: drain("again", by=BEGAN + second_by_s))

    reason = run.run()

    assert run.processes.reported("drain") == [
        ("drain", "s0", "spot", pytest.approx(BEGAN + force_s))
    ]
    hurried = [] if second_by_s is None else [("hurry", pytest.approx(BEGAN + second_by_s))]
    assert run.processes.reported("hurry") == hurried
    assert reason is (ExitReason.CUT_SHORT if second_by_s is not None else ExitReason.CAUGHT_UP)


def test_leases_of_a_stream_that_was_made_again_are_given_up_and_the_end_says_why(rig):
    run = rig(created={ONLY_STREAM: 5.0})
    run.at(20.0, lambda: run.manager._perform(commands.StopRefused("the stream was made again")))

    assert run.run() is ExitReason.ANOTHER_STREAM

    assert owners(run) == {None}
    assert {said[2] for said in run.processes.reported("drain")} == {"the stream was made again"}


# What nobody expects.


def test_an_error_that_nobody_expects_ends_the_run_and_the_first_one_is_reported(rig):
    run = rig()

    def break_twice():
        run.manager.broke(ValueError("the cause"))
        run.manager.broke(ValueError("what followed"))

    run.at(20.0, break_twice)

    with pytest.raises(ValueError, match="the cause"):
        run.run()

    assert run.seconds == pytest.approx(20.0)


def test_a_row_that_breaks_the_shell_ends_the_run_with_that_error(rig):
    class Broken(LeaseRows):
        def scan(self, *, consistent=True):
            raise KeyError("leaseKey")

    with pytest.raises(KeyError, match="leaseKey"):
        rig(table=Broken()).run()


# The lease table is gone.


class Vanishing(LeaseRows):
    """Its scans say that there is no such table, from when it is told to."""

    is_gone = False

    def scan(self, *, consistent=True):
        if self.is_gone:
            raise NotFound("no such table", operation="Scan", code="ResourceNotFoundException")
        return super().scan(consistent=consistent)


@pytest.mark.parametrize("is_unkillable", [False, True])
def test_without_its_table_user_code_gets_two_seconds_and_no_release_is_tried(rig, is_unkillable):
    run = rig(table=Vanishing())
    run.processes.is_stuck, run.processes.is_unkillable = True, is_unkillable
    reported = []
    run.manager.stop_begins = lambda: reported.append(run.seconds)
    run.at(20.0, lambda: setattr(run.table, "is_gone", True))

    assert run.run() is ExitReason.TABLE_GONE

    (line,) = run.lines("table_vanished")
    assert "no such table" in line["error"]
    (vanished,) = reported
    assert [said[3] for said in run.processes.reported("drain")] == [
        pytest.approx(BEGAN + vanished + 2.0)
    ] * 2
    assert [at for _, at in run.processes.reported("kill")] == [
        pytest.approx(BEGAN + vanished + 2.0)
    ]
    lasted = 8.0 if is_unkillable else 2.0
    assert run.seconds == pytest.approx(vanished + lasted, abs=0.2)


def test_one_scan_without_a_table_proves_nothing_also_if_scans_before_it_failed(rig):
    class Doubtful(LeaseRows):
        failures = ()

        def scan(self, *, consistent=True):
            if self.failures:
                error, *self.failures = self.failures
                raise error
            return super().scan(consistent=consistent)

    run = rig(table=Doubtful())
    run.table.failures = (
        Throttled("too many requests", operation="Scan"),
        Unavailable("refused", operation="Scan"),
        NotFound("no such table", operation="Scan"),
    )
    run.signal_at(60.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert not run.table.failures
    assert run.lines("table_vanished") == []


def test_a_table_is_gone_once_and_the_core_decides_nothing_any_more(rig):
    run = rig()
    gone = NotFound("no such table", operation="Scan")

    def vanish():
        run.manager.table_gone(gone)
        run.manager.table_gone(gone)
        run.manager.deliver(events.FormerOwnersProvenGone(frozenset({"kclrun:g:s:n"})))

    scans = []
    run.manager.service_calls.perform = lambda request: scans.append(run.seconds)
    run.at(3.0, vanish)

    assert run.run() is ExitReason.TABLE_GONE

    assert len(run.lines("table_vanished")) == 1
    assert scans == [0.0], "before it was gone"


def test_only_a_scan_proves_the_table_gone_and_never_the_read_of_a_row(rig):
    class Unread(LeaseRows):
        failures = 4

        def read(self, key):
            if self.failures:
                self.failures -= 1
                raise NotFound("no such table", operation="GetItem")
            return super().read(key)

    run = rig(table=Unread())
    run.at(5.0, lambda: run.processes._die("s0", "killed by SIGKILL"))  # its row is read then
    run.signal_at(60.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert run.table.failures == 0
    assert [line["operation"] for line in run.lines("service_unreachable")] == ["read a lease"]
    assert len(run.lines("service_back")) == 1


# Whether this host can run lease processes at all.


def test_no_lease_is_taken_before_a_process_was_forked_as_a_trial(rig):
    run = rig(shards=1)
    run.processes.refusals = [ForkRefused(1, "fork: no memory", errno.ENOMEM)]
    run.at(0.9, lambda: early.append((owners(run), run.manager.is_ready)))
    run.signal_at(20.0, TERM)
    early = []

    assert run.run() is ExitReason.DRAINED

    assert early == [(set(), False)]
    assert run.processes.trials == 2
    assert run.processes.started == ["s0"]
    (line,) = run.lines("start_failed")
    assert line["reason"] == "as a trial: fork: no memory"
    assert run.manager.is_ready


def test_a_host_that_has_no_process_to_give_is_reported_after_three_trials(rig):
    run = rig()
    run.processes.refusals = [ForkRefused(1, "fork: no memory", errno.ENOMEM)] * 3

    with pytest.raises(HostFailed, match="no more to give: fork: no memory"):
        run.run()

    assert run.processes.trials == 3
    assert run.seconds == pytest.approx(2.0, abs=0.1)


def test_a_host_that_refuses_processes_for_good_is_reported_at_once(rig):
    run = rig()
    run.processes.refusals = [ForkRefused(1, "pidfd_open: not permitted", errno.EPERM)]

    with pytest.raises(HostRefused, match="pidfd_open: not permitted"):
        run.run()


def test_a_trial_for_which_there_is_no_channel_is_one_that_failed(rig):
    run = rig()
    run.processes.refusals = [OSError(errno.EMFILE, "Too many open files")]
    run.signal_at(5.0, TERM)

    assert run.run() is ExitReason.DRAINED

    (line,) = run.lines("start_failed")
    assert line["reason"] == "as a trial: a channel: Too many open files"


def test_a_trial_that_fails_during_a_stop_is_not_tried_again(rig):
    run = rig()
    run.processes.refusals = [ForkRefused(1, "the launcher died")] * 5

    run.run(lambda: signal.raise_signal(TERM))

    assert run.processes.trials == 1


# Former owners of this host.


def former_owner(tmp_path):
    """A manager of this host that died, as its lock says, with all it started."""
    former = ManagerRig(tmp_path)
    owner, path = former.identity.id, former.identity.lock.path
    former.identity.retire(is_named=True)
    former.close()
    assert path.exists()
    return owner, path


def test_the_leases_of_a_manager_that_died_here_are_taken_at_once_and_its_file_goes(rig, tmp_path):
    owner, path = former_owner(tmp_path)
    run = rig(shards=1)
    row = Lease(key="s0", checkpoint=TRIM_HORIZON)
    run.table.write(CreateLease(row))
    run.table.write(Take("s0", owner, None, 0, 10.0, "TRIM_HORIZON"))
    run.at(1.0, lambda: early.append((owners(run), path.exists())))
    run.signal_at(30.0, TERM)
    early = []

    assert run.run() is ExitReason.DRAINED

    (line,) = run.lines("former_owners_gone")
    assert (line["count"], line["owners"]) == (1, owner)
    assert early[0][0] == {run.identity.id}, "long before a failover was over"
    assert not path.exists(), "no row names it any more"


def test_the_file_of_a_former_owner_stays_as_long_as_a_row_names_it(rig, tmp_path):
    owner, path = former_owner(tmp_path)
    run = rig(leases_max=1)
    for key in ("s0", "s1"):
        run.table.write(CreateLease(Lease(key=key, checkpoint=TRIM_HORIZON)))
        run.table.write(Take(key, owner, None, 0, 10.0, "TRIM_HORIZON"))
    run.signal_at(40.0, TERM)

    run.run()

    assert owner in owners(run), "one lease is all that this manager takes"
    assert path.exists()


def test_former_owners_are_looked_for_ten_times_a_second_for_a_minute_and_then_each_second(rig):
    run = rig()
    looks = []
    seize = run.identity.seize_former

    def look():
        looks.append(run.seconds)
        return seize()

    run.identity.seize_former = look
    run.signal_at(100.0, TERM)

    run.run()

    early = [at for at in looks if at <= 59.95]
    late = [at for at in looks if 61.5 < at <= 99.95]
    assert len(early) == pytest.approx(600, abs=2)
    assert len(late) == pytest.approx(38, abs=2)


def test_a_lock_file_that_somebody_removed_is_reported_once(rig):
    run = rig()
    run.at(5.0, run.identity.lock.path.unlink)
    run.signal_at(10.0, TERM)

    run.run()

    assert [line["what"] for line in run.lines("lock_file_removed")] == [
        str(run.identity.lock.path)
    ]


def test_the_adopted_dead_are_looked_for_again_until_this_host_lets_them_be_found(rig, monkeypatch):
    run = rig()
    looks, answers = [], [None, None, None]

    def reap(_spared):
        looks.append(run.seconds)
        return answers.pop() if answers else ()

    monkeypatch.setattr(orphans, "reap_adopted", reap)
    run.signal_at(5.0, signal.SIGCHLD)
    run.signal_at(5.1, signal.SIGCHLD)
    run.signal_at(20.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert looks == pytest.approx([5.0, 5.1, 6.0, 7.0], abs=0.05)


# What it passes on.


def test_lease_processes_and_those_to_come_are_told_whether_others_are_in_sight(rig):
    run = rig(shards=1)
    row = Lease(key="x", checkpoint=TRIM_HORIZON, owner="kclrun:g:other:n")
    assert not run.manager.others_in_sight
    run.at(10.0, lambda: run.table.write(CreateLease(row)))
    run.at(20.0, lambda: seen.append(run.manager.others_in_sight))
    run.signal_at(20.0, TERM)
    seen = []

    run.run()

    assert seen == [True]
    assert OthersInSight(True) in run.processes.said


@pytest.mark.parametrize(
    ("event", "key", "has_action"),
    [
        ("lease_halted", "s0", True),
        ("lease_still_halted", "s0", True),
        ("lease_halted", None, False),
        ("draining", "s0", False),
    ],
)
def test_the_line_of_a_halted_lease_and_no_other_says_how_a_person_resumes_it(
    rig, event, key, has_action
):
    run = rig()

    run.manager._note(commands.Note(event, "error", key=key, fields={"reason": "KeyError"}))

    (line,) = run.lines(event)
    assert (line["level"], line["reason"]) == ("error", "KeyError")
    assert ("kclrun leases" in line.get("action", "")) == has_action


# What is left to do for the machine.


def test_a_manager_that_gave_all_up_stays_for_its_machine_until_that_is_done(rig):
    run = rig()
    run.manager.stays = lambda: run.seconds < 50.0
    run.signal_at(20.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert run.seconds == pytest.approx(50.0, abs=1.1)


def test_a_signal_ends_the_stay_and_the_stop_was_in_good_order_all_the_same(rig):
    run = rig()
    run.manager.stays = lambda: True
    run.signal_at(20.0, TERM)
    run.signal_at(30.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert run.seconds == pytest.approx(30.0, abs=0.1)
    (line,) = run.lines("stop_hurried")
    assert (line["signal"], line["action"]) == ("SIGTERM", "the group is not awaited")


def test_a_stop_that_was_hurried_does_not_stay(rig):
    run = rig()
    run.manager.stays = lambda: True
    run.signal_at(20.0, TERM)
    run.signal_at(20.05, TERM)

    run.run()

    assert run.seconds < 22.0


def test_an_error_that_nobody_expects_ends_the_stay_too(rig):
    run = rig()
    run.manager.stays = lambda: True
    run.signal_at(20.0, TERM)
    run.at(30.0, lambda: run.manager.broke(ValueError("of the watch")))

    with pytest.raises(ValueError, match="of the watch"):
        run.run()


def test_each_end_of_a_run_has_the_exit_code_that_units_and_scripts_rely_on():
    assert {reason: reason.exit_code for reason in ExitReason} == {
        ExitReason.DRAINED: 0,
        ExitReason.CAUGHT_UP: 0,
        ExitReason.HALTED: 65,
        ExitReason.TABLE_GONE: 66,
        ExitReason.CUT_SHORT: 75,
        ExitReason.ANOTHER_STREAM: 78,
    }


def test_a_service_that_is_away_for_several_scans_is_an_outage_and_no_lost_table(rig):
    class Away(LeaseRows):
        failures = 4

        def scan(self, *, consistent=True):
            if self.failures:
                self.failures -= 1
                raise Unavailable("refused", operation="Scan")
            return super().scan(consistent=consistent)

    run = rig(table=Away())
    run.signal_at(60.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert run.lines("table_vanished") == []
    assert [line["operation"] for line in run.lines("service_unreachable")] == [
        "scan the lease table"
    ]
