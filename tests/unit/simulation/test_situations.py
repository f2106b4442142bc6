"""Named situations: declared, collected, and reached."""

import pytest

from kclrun.errors import InvariantViolation
from tests.support.storms.coverage import SITUATIONS, STORIES, Situations
from tests.support.storms.dense import (
    cold_start,
    dense_storm,
    expiring_storm,
    rage,
    recreating_storm,
)

# What one seed does not reach the next one does: seventeen are enough, in as many seconds.
STORMS = 30


def test_every_situation_says_in_a_sentence_what_it_is():
    assert len(SITUATIONS) >= 60
    assert all(len(sentence.split()) >= 4 for sentence in STORIES.values())


def test_what_was_seen_is_counted_and_the_rest_is_missing():
    situations = Situations()

    situations.seen("asked")
    situations.seen("asked")

    assert situations.counts["asked"] == 2
    assert situations.names == {"asked"}
    assert situations.missing() == SITUATIONS - {"asked"}


def test_a_name_that_is_not_declared_is_refused():
    with pytest.raises(InvariantViolation, match="no situation is called 'all is well'"):
        Situations().seen("all is well")


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_dense_storms_break_no_promise_and_reach_every_situation():
    """A situation that none of them reaches is a blind spot of the workload."""
    missing = set(SITUATIONS)
    for seed in range(STORMS):
        missing -= cold_start(seed).oracles.situations.names
        missing -= rage(dense_storm(seed)).oracles.situations.names
        missing -= rage(expiring_storm(seed)).oracles.situations.names
        missing -= rage(recreating_storm(seed)).oracles.situations.names
        if not missing:
            return

    assert sorted(missing) == []
