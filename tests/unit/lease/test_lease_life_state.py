"""With keyed state a checkpoint carries the version that was written for it, in the same write, and
is never at another position [K2, K3, K5, K13, K16, P19]."""

import pytest

from kclrun.lease import events
from kclrun.lease.states import State
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.state import OF_PARENTS
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import KEY, ME, child, p
from tests.unit.lease.test_lease_life_outputs import WithOutputs, move_back_by_hand


class WithState(WithOutputs):
    def __init__(self, mode="auto", **given):
        super().__init__(mode, **({"has_keyed_state": True, "state_version": "v0"} | given))

    def begin(self, position=None):
        self.move_row(
            self.stored.checkpoint,
            outputs=StoredCursors(self.stored.checkpoint, ()),
            state_version=self.stored.state_version,
        )
        return super().begin(position)

    def commits_state(self, upto, version, *, is_asked=True):
        asked = self.asked()[-1] if is_asked else None
        upto = SHARD_END if upto == "SHARD_END" else p(upto)
        self.happen(events.OutputsCommitted(upto, {}, asked, version))

    def kept(self):
        row = self.stored
        return row.checkpoint, row.outputs and row.outputs.at, row.state_version


@pytest.fixture
def driver():
    """Its first batch, up to 20, is processed and not checkpointed."""
    driver = WithState().begin()
    driver.batch(20)
    return driver


def test_a_checkpoint_and_the_version_for_it_are_one_write(driver):
    driver.tick(2.0)
    assert driver.kept() == (p(10), p(10), "v0")
    driver.commits_state(20, "v1")
    assert driver.kept() == (p(20), p(20), "v1")


@pytest.mark.parametrize("how", ["DrainRequested", "ManagerGone"])
def test_a_lease_is_given_away_at_the_position_of_its_last_version(driver, how):
    event = getattr(events, how)
    driver.happen(event("drain") if how == "DrainRequested" else event())
    driver.commits_state(15, "v1")
    driver.tick(11.0)
    assert driver.kept() == (p(15), p(15), "v1")


def test_the_end_of_a_shard_has_its_version_and_its_children_begin_with_it(driver):
    driver.happen(events.ShardExhausted((child("c1"), child("c2"))))
    made = driver.table.read("c1")
    assert (made.state_version, made.outputs) == (OF_PARENTS, StoredCursors(TRIM_HORIZON, ()))
    assert driver.stored.checkpoint != SHARD_END
    driver.commits_state("SHARD_END", "v9")
    assert driver.kept() == (SHARD_END, SHARD_END, "v9")
    assert driver.state is State.ENDED


def test_no_late_checkpoint_follows_a_lost_lease(driver):
    """P19 would put a position on the row that has no version."""
    driver.commits_state(20, "v1", is_asked=False)
    driver.move_row(p(10), owner="kclrun::other:b", counter=50)
    driver.tick(3.0)
    assert driver.state in {State.LOSING, State.LOST}
    assert not driver.sent(changes.LateCheckpoint)
    assert driver.stored.checkpoint == p(10)


def test_a_position_that_another_program_wrote_is_not_adopted(driver):
    move_back_by_hand(driver)
    driver.tick(3.0)
    assert driver.state is State.LOST
    assert (driver.stored.checkpoint, driver.stored.owner) == (p(5), ME)


@pytest.mark.parametrize("outputs", [StoredCursors(p(7), ()), None])
def test_a_checkpoint_that_the_version_was_not_written_with_halts_in_words(outputs):
    driver = WithState()
    driver.move_row(p(10), outputs=outputs, state_version="v0")
    driver.happen(events.Started())

    assert driver.state is State.FAILED
    (failed,) = driver.reports(reports.ProcessorFailed)
    assert failed.where == "state"
    assert "the checkpoint is 10, and the state on the row was written with" in failed.error
    assert not driver.stored.may_forget_outputs
    driver.table.write(changes.ResumeLease(KEY, driver.stored.may_forget_outputs))
    assert driver.stored.is_moved_past_outputs, "a resume makes no state for this position"
