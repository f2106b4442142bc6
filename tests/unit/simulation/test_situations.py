"""Named situations: declared, collected, and reached."""

import itertools

import pytest

from kclrun.errors import InvariantViolation
from kclrun.simulation.user_code import UserCode
from tests.support.storms.coverage import SITUATIONS, STORIES, Situations
from tests.support.storms.dense import (
    cold_start,
    dense_storm,
    expiring_storm,
    rage,
    recreating_storm,
)

# These reach them all in four seconds. Where the product has moved on and they do not, further
# seeds are searched: print what each reaches, and name here the few that reach all.
KNOWN = (
    ("cold start", 18),
    ("recreating", 0),
    ("recreating", 1),
    ("dense", 18),
    ("expiring", 3),
    ("expiring", 18),
    ("poisoned", 0),
)
STORMS = 30
POISONED = UserCode(poison_every=40, then="dead-letter")
PLAYED = {
    "cold start": cold_start,
    "dense": lambda seed: rage(dense_storm(seed)),
    "poisoned": lambda seed: rage(dense_storm(seed, user_code=POISONED)),
    "expiring": lambda seed: rage(expiring_storm(seed)),
    "recreating": lambda seed: rage(recreating_storm(seed)),
}


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
@pytest.mark.seconds
def test_dense_storms_break_no_promise_and_reach_every_situation():
    """A situation that none of them reaches is a blind spot of the workload."""
    missing = set(SITUATIONS)
    further = ((kind, seed) for seed in range(STORMS) for kind in PLAYED)
    for kind, seed in itertools.chain(KNOWN, further):
        missing -= PLAYED[kind](seed).oracles.situations.names
        if not missing:
            return

    assert sorted(missing) == []
