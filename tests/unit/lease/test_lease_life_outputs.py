"""With outputs a checkpoint goes out once all of them have its rows [K2, K3, K5, K12, I13]."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.outputs import LAST_COMMIT_WAIT_S
from kclrun.lease.states import State
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import SHARD_END
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.support.tables import over_rows
from tests.unit.lease.lease_driver import KEY, ME, OTHER, Driver, p

MUST, AT_OWN_PACE = True, False


class WithOutputs(Driver):
    """Two outputs that store their cursors. The test says what they commit; each of their answers
    is to the last command."""

    def __init__(self, mode="auto", **given):
        super().__init__(mode, **({"outputs": "storing", "every_s": 2.0} | given))

    def begin(self, position=None):
        super().begin()
        self.happen(events.OutputsBegan(position or self.row.checkpoint, {}))
        return self

    def commits(self, upto, *, is_asked=True, **cursors):
        asked = self.asked()[-1] if is_asked else None
        known = {name: Cursor(p(at)) for name, at in ({"s3": upto} | cursors).items()}
        upto = SHARD_END if upto == "SHARD_END" else p(upto)
        self.happen(events.OutputsCommitted(upto, known, asked))

    def asked(self):
        return self.of(commands.CommitOutputs)

    def asks(self):
        return [(each.upto, each.must) for each in self.asked()]


def cursors(at, **by_name):
    known = tuple(sorted((name, Cursor(p(each))) for name, each in by_name.items()))
    return StoredCursors(p(at), known)


@pytest.fixture
def driver():
    """Its first batch, up to 20, is processed and not checkpointed."""
    driver = WithOutputs().begin()
    driver.batch(20)
    return driver


def test_no_batch_starts_before_the_outputs_began():
    driver = WithOutputs()
    driver.happen(events.Started())
    assert not driver.of(commands.AllowDelivery)

    driver.happen(events.OutputsBegan(p(10), {}))

    assert len(driver.of(commands.AllowDelivery)) == 1


def test_an_automatic_checkpoint_waits_for_the_outputs_and_names_their_cursors(driver):
    driver.tick(2.0)
    driver.tick(1.0)
    assert driver.asks() == [(p(20), AT_OWN_PACE)]
    assert driver.stored.checkpoint == p(10)
    assert driver.life.commits.waiting_since == driver.now - 1.0

    driver.commits(20, sql=20)

    assert driver.stored.checkpoint == p(20)
    assert driver.stored.outputs == cursors(20, s3=20, sql=20)
    assert driver.life.commits.waiting_since is None


def test_it_follows_the_slowest_output_at_its_own_pace(driver):
    """SQL commits each time, S3 with its roll; what is not asked for counts, too."""
    driver.tick(2.0)
    driver.commits(10, sql=20)
    driver.tick(1.9)
    assert driver.asks() == [(p(20), AT_OWN_PACE)]
    driver.tick(0.1)
    assert driver.asks() == [(p(20), AT_OWN_PACE)] * 2
    assert not driver.sent(changes.Checkpoint)

    driver.commits(15, is_asked=False, sql=20)

    assert driver.stored.outputs == cursors(15, s3=15, sql=20)


def test_the_lease_is_renewed_and_batches_run_while_a_commit_is_under_way(driver):
    driver.tick(2.0)
    counter = driver.stored.counter

    for last in range(30, 100, 10):
        driver.tick(2.98)
        driver.batch(last)

    assert driver.stored.counter == counter + 7
    assert driver.asks() == [(p(20), AT_OWN_PACE)]  # one commit at a time
    driver.happen(events.OutputsNotCommitted(p(20), "no route"))
    driver.happen(events.OutputsNotCommitted(p(20), "no route"))
    assert driver.reports(reports.ProcessWarned) == [reports.ProcessWarned("no route")]


def test_with_manual_checkpoints_nothing_is_asked_and_none_lies_in_between():
    driver = WithOutputs("manual", failover_s=60.0).begin()
    driver.batch(20)
    driver.tick(2.0)
    driver.commits(15, is_asked=False)
    driver.happen(events.CheckpointRequested(1, p(20)))
    driver.commits(17)

    assert not driver.sent(changes.Checkpoint)
    driver.tick(driver.life.next_deadline(driver.now) - driver.now)
    assert driver.asks() == [(p(20), MUST)] * 2


@pytest.mark.parametrize(("mode", "cap"), [("batch", 100), ("auto", 2)])
def test_it_is_forced_where_no_batch_can_start_without_it(mode, cap):
    driver = WithOutputs(mode, cap=cap).begin()
    driver.batch(20, 2)

    assert driver.asks() == [(p(20), MUST)]


def test_an_urgent_request_follows_one_that_is_not(driver):
    driver.tick(2.0)
    driver.happen(events.CheckpointRequested(1, p(20)))
    old, _ = driver.asked()

    driver.happen(events.OutputsCommitted(p(15), {}, old))

    assert driver.asks() == [(p(20), AT_OWN_PACE), (p(20), MUST)]


# The last write.

LEAVING = {
    "offer": (events.DrainRequested("a deploy"), changes.Offer, State.RELEASED),
    "restart": (events.RestartRequested(), changes.Checkpoint, State.RELEASED),
    "halt": (reports.ProcessorFailed("process_records", "E", 1), changes.Checkpoint, State.FAILED),
}


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize(
    ("ends", "at"), [("whole", 20), ("much is left", 15), ("no answer", 10), ("refused", 10)]
)
def test_the_last_write_waits_for_one_answer_and_goes_where_all_outputs_are(how, ends, at):
    reported, kind, after = LEAVING[how]
    driver = WithOutputs(others_in_sight=True).begin()
    driver.batch(20)
    driver.happen(reported)
    assert driver.asked() == [
        commands.CommitOutputs(p(20), must=True, is_leaving=after is State.RELEASED)
    ]
    driver.tick(LAST_COMMIT_WAIT_S / 2)
    assert driver.stored.owner == ME
    assert not driver.life.is_finished

    match ends:
        case "no answer":
            for _ in range(5):
                driver.tick(LAST_COMMIT_WAIT_S / 10)
        case "refused":
            driver.happen(events.OutputsRefused("other columns"))
        case _:
            driver.commits(at)

    assert driver.state is after
    assert driver.stored.checkpoint == p(at)
    assert len(driver.sent(kind)) == (at > 10 or how == "offer")
    assert driver.stored.outputs == (cursors(at, s3=at) if at > 10 else None)
    assert driver.life.has_undone == (at < 20)


def test_the_wait_for_a_last_commit_ends_by_itself():
    """The shell looks in time, and never without end."""
    driver = WithOutputs(others_in_sight=True).begin()
    driver.batch(20)
    driver.happen(events.DrainRequested("a deploy"))
    for _ in range(100):
        deadline = driver.life.next_deadline(driver.now)
        assert deadline > driver.now or driver.life.is_finished
        if driver.life.is_finished:
            break
        driver.tick(deadline - driver.now)

    assert driver.now == pytest.approx(1000.0 + LAST_COMMIT_WAIT_S)


def test_an_orphan_leaves_half_of_its_time_for_the_last_write():
    driver = WithOutputs(others_in_sight=True).begin()
    driver.batch(20)
    fence = driver.life.own.fence
    driver.happen(events.ManagerGone())

    driver.tick((fence - driver.now) / 2)

    assert driver.state is State.RELEASED


def test_a_shard_ends_when_every_output_has_its_last_rows(driver):
    driver.exhaust()
    driver.shards = ()
    driver.life.state = State.ENDING  # its children exist, and shard_ended() returned
    driver.tick(3.0)
    assert driver.asks() == [(SHARD_END, MUST)]
    driver.commits(20)
    driver.tick(3.0)
    assert not driver.sent(changes.End)

    asked = driver.asked()[-1]
    at_end = Cursor(SHARD_END)
    driver.happen(events.OutputsCommitted(SHARD_END, {"s3": at_end}, asked))

    assert driver.state is State.ENDED
    assert driver.stored.outputs == StoredCursors(SHARD_END, (("s3", at_end),))


@over_rows("state", [State.PROCESSING, State.CREATING, State.NAMING, State.CLOSING, State.ENDING])
def test_a_lease_whose_output_refuses_its_rows_halts_in_words(state):
    driver = WithOutputs().begin()
    driver.life.state = state

    driver.happen(events.OutputsRefused("the table has no column carrier"))

    assert driver.state is State.FAILED
    (failed,) = driver.reports(reports.ProcessorFailed)
    assert reports.reason_of(failed) == "output failed once: the table has no column carrier"


# The row is not as this process left it.


def move_by_a_former_owner(driver):
    driver.table.write(changes.LateCheckpoint(KEY, "kclrun::host:gone", p(10), p(15)))


def move_back_by_hand(driver):
    driver.move_row(p(5))


@pytest.mark.parametrize("move", [move_by_a_former_owner, move_back_by_hand])
@pytest.mark.parametrize("shown_by", ["checkpoint", "renewal", "read-back"])
def test_a_position_that_another_program_wrote_is_never_adopted(driver, move, shown_by):
    """R1: an operator sets the row back to 5, and within ten seconds it was at 20 again [K3]."""
    if shown_by != "renewal":
        driver.commits(20, is_asked=False)
    move(driver)
    moved_to = driver.stored.checkpoint
    if shown_by == "read-back":
        driver.faults.append("dropped")
    driver.tick(3.0)

    assert driver.stored.checkpoint == moved_to
    assert driver.state is State.LOST
    assert driver.stored.owner == ME  # its manager goes on from the row
    assert not driver.sent(changes.LateCheckpoint)
    assert driver.reports(reports.LeaseLost) == [], "the row is ours"
    (lost,) = driver.reports(reports.ProcessReplaced)
    assert f"moved from 10 to {moved_to}" in lost.reason


def test_outputs_that_store_nothing_adopt_it_as_before():
    driver = WithOutputs(outputs="plain").begin()
    driver.batch(20)
    driver.commits(20, is_asked=False)
    move_by_a_former_owner(driver)

    driver.tick(2.0)

    assert driver.stored.checkpoint == p(20)


@pytest.mark.parametrize(
    ("outputs", "after"), [("storing", State.FAILED), ("plain", State.PROCESSING)]
)
def test_a_checkpoint_that_the_cursors_were_not_written_with_halts_the_lease(outputs, after):
    driver = WithOutputs(outputs=outputs)
    driver.move_row(p(10), outputs=cursors(7, sql=9))

    driver.happen(events.Started())

    assert driver.state is after
    if after is State.FAILED:
        (failed,) = driver.reports(reports.ProcessorFailed)
        assert "the checkpoint is 10" in failed.error
        assert "(sql) were written with 7" in failed.error
        driver.table.write(changes.ResumeLease(KEY, driver.stored.is_moved_past_outputs))
        assert driver.stored.outputs is None


def test_a_superseded_process_writes_nothing_more_and_keeps_the_lease(driver):
    driver.commits(20, is_asked=False)
    driver.user_returns = False
    writes_before = len(driver.of(commands.SendWrite))
    driver.happen(events.OutputsSuperseded("an object of another owner is there"))
    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert driver.state is State.LOST
    assert len(driver.of(commands.SendWrite | commands.SendLateCheckpoint)) == writes_before
    assert (driver.stored.owner, driver.stored.checkpoint) == (ME, p(10))
    assert driver.reports(reports.LeaseLost) == []
    assert (
        driver.reports(reports.ProcessReplaced)[0].reason == "an object of another owner is there"
    )


@pytest.mark.parametrize(("mode", "saved"), [("auto", 15), ("manual", 10)])
def test_a_late_checkpoint_is_of_rows_that_all_outputs_have(mode, saved):
    driver = WithOutputs(mode, every_s=1000.0).begin()
    driver.batch(20)
    if mode == "manual":
        driver.happen(events.CheckpointRequested(1, p(20)))
    driver.commits(15, is_asked=False)
    driver.steal()

    driver.tick(3.0)

    assert driver.state is State.LOST
    assert (driver.stored.owner, driver.stored.checkpoint) == (OTHER, p(saved))
    assert driver.stored.outputs == (cursors(15, s3=15) if saved == 15 else None)


# The start.


def test_what_every_output_has_is_processed_and_checkpointed_in_time():
    """K12: the destination is ahead of the row."""
    driver = WithOutputs(outputs="storing")
    driver.happen(events.Started(), events.OutputsBegan(p(30), {"sql": Cursor(p(30))}))
    driver.tick(2.0)

    assert driver.asks() == []
    assert driver.stored.outputs == cursors(30, sql=30)


def test_a_lease_given_away_before_its_outputs_began_stays_where_it_is():
    driver = WithOutputs(others_in_sight=True)
    driver.user_returns = False
    driver.happen(events.Started(), events.DrainRequested("a deploy"))
    driver.happen(events.OutputsBegan(p(30), {}), events.DeliveryStopped())
    driver.happen(events.CallReturned())

    assert driver.state is State.RELEASED
    assert driver.stored.checkpoint == p(10)


def drained(driver):
    """A drain with a batch whose rows the outputs lack."""
    driver.batch(30)
    driver.happen(events.DrainRequested("a deploy"))


def past_the_wait(driver):
    for _ in range(11):
        driver.tick(1.0)
    return [warned.detail for warned in driver.reports(reports.ProcessWarned)]


def test_a_drain_says_why_the_last_write_failed_also_if_that_was_said_before(driver):
    driver.happen(events.OutputsNotCommitted(p(20), "output: cannot reach the database"))
    drained(driver)
    driver.happen(events.OutputsNotCommitted(p(30), "output: cannot reach the database"))

    assert past_the_wait(driver) == [
        "output: cannot reach the database",
        "the last write did not succeed: output: cannot reach the database",
    ]
    assert driver.reports(reports.LeaseReleased)


def test_a_drain_says_that_an_output_did_not_answer(driver):
    drained(driver)

    (said,) = past_the_wait(driver)
    assert said.startswith("the last write")
    assert said.endswith("was not answered in time")


def test_a_drain_whose_outputs_have_all_rows_says_nothing(driver):
    driver.happen(events.OutputsNotCommitted(p(20), "no route"))
    drained(driver)
    driver.commits(30)

    assert past_the_wait(driver) == ["no route"]
