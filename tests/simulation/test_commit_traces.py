"""The traces that broke a commit rule as it was first written, step by step: the rule as built
holds, and the former one breaks. V-numbers are those of the model; K-numbers are in
docs/explanation/commits.md. Traces with state are in `test_state_traces.py`.
"""

import pytest

from kclrun.simulation.stories import RuleBroken
from tests.support.storms.outputs import S3Chain, SqlTable

KEY = "shard"


class TokenOnly(SqlTable):
    """Formerly: conditional on the token, which only the commit itself brings."""

    def install(self, token, at):
        return self.at

    def commit(self, token, began, upto, commit_id):
        if token < self.token:
            return False
        self.token, self.at = token, upto
        self.add(began + 1, upto)
        return True


class Replaced(S3Chain):
    """Formerly: an object of another owner is replaced where its ETag is still the one seen."""

    def replace(self, began, upto, seen):
        assert self.objects[began] == seen
        for number in range(began + 1, seen[0] + 1):
            self.rows[number] -= 1
        self.objects[began] = (upto, "p1")
        for number in range(began + 1, upto + 1):
            self.rows[number] += 1


def lacks(destination, checkpoint):
    return [n for n in range(1, checkpoint + 1) if not destination.rows[n]]


@pytest.mark.parametrize(("kind", "holds"), [(SqlTable, True), (TokenOnly, False)])
def test_v1_a_transaction_that_timed_out_lands_after_its_repetition(kind, holds):
    sql = kind(KEY)
    began = sql.install(1, 0)
    assert sql.commit(1, began, 1, "again")

    if holds:
        assert not sql.commit(1, began, 1, "first")  # → the first lands
        assert sql.resolve(1, began, 1)  # what its sender reads: it holds
        assert sql.rows[1] == 1
    else:
        with pytest.raises(RuleBroken, match="twice"):
            sql.commit(1, began, 1, "first")


@pytest.mark.parametrize(("kind", "holds"), [(SqlTable, True), (TokenOnly, False)])
def test_v2_a_zombies_transaction_lands_after_the_next_owner_read_the_cursor(kind, holds):
    sql = kind(KEY)
    zombie_began = sql.install(1, 0)
    began = sql.install(2, 0)

    assert sql.commit(1, zombie_began, 1, "zombie") != holds  # → lands
    if holds:
        assert sql.commit(2, began, 1, "owner")
        assert sql.rows[1] == 1
    else:
        with pytest.raises(RuleBroken, match="twice"):
            sql.commit(2, began, 1, "owner")


def test_v3_v4_an_owner_that_finds_an_object_stops_and_adopts_it():
    s3 = S3Chain(KEY)
    began = s3.install(2, 0)
    s3.commit(1, 0, 2, "p0")  # → p0's PUT 0..2 lands; p0 late-checkpoints 2 [V4]

    assert not s3.commit(2, began, 1, "p1")  # 412: p1 is superseded
    assert s3.commit(1, 0, 2, "p0"), "412 on our own commit id is success"
    assert s3.install(3, 0) == 2  # the next process adopts
    assert lacks(s3, 2) == []


@pytest.mark.parametrize("trace", ["V3", "V4"])
def test_v3_v4_formerly_a_replace_took_rows_below_the_checkpoint_away(trace):
    s3 = Replaced(KEY)
    s3.install(2, 0)
    s3.commit(1, 0, 2, "p0")
    seen = s3.objects[0]
    if trace == "V3":
        assert s3.install(3, 0) == 2  # p2 adopts before p1's replace lands
    s3.replace(0, 1, seen)

    assert lacks(s3, 2) == [2]  # p2, or p0 late, checkpointed 2


@pytest.mark.parametrize("keeps_cursors", [True, False])
def test_v7_an_output_that_is_ahead_is_followed_from_its_own_cursor(keeps_cursors):
    s3, sql = S3Chain(KEY), SqlTable(KEY)
    s3.commit(1, 0, 2, "p0")  # its reply is lost, and p0 is gone
    ahead, began = s3.install(2, 0), sql.install(2, 0)
    assert sql.commit(2, began, 1, "p1")
    checkpoint, cursors = 1, {"s3": ahead, "sql": 1}

    at = s3.install(3, cursors["s3"] if keeps_cursors else checkpoint)  # p2

    if keeps_cursors:
        assert at == 2, "what p2 emits again up to record 2 is dropped"
    else:
        with pytest.raises(RuleBroken, match="twice"):
            s3.commit(3, at, 2, "p2")
