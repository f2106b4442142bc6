"""Storms over lease processes with outputs: every row is there, and once where its output keeps the
cursor. The destinations, their faults and both promises: tests/support/storms/outputs.py."""

import random
from collections import Counter

import pytest

from kclrun.errors import InvariantViolation
from kclrun.lease.outputs import OutputCommits
from kclrun.model.output import StoredCursors
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings
from tests.support.storms.outputs import ProcessWithOutputs, S3Chain, SqlTable, rows_of
from tests.support.storms.playing import play
from tests.support.storms.profile import Profile, Strike

STORM_S = 600.0
STRIKES = ("kill_process", "freeze_process", "cut_host", "freeze_host", "kill_host", "move_lease")
KINDS = {
    "sql": ("sql",),
    "s3": ("s3",),
    "both": ("sql", "s3"),
    "all": ("messages", "s3", "sql"),
}


def storm(seed, *kinds, every_s=12.0, java_workers=0, **user_code):
    """Zombies, and requests that arrive late: a strike each few seconds on three hosts."""
    chance = random.Random(seed)
    strikes = tuple(
        Strike(
            at_s=at_s + chance.uniform(0, every_s),
            kind=chance.choice(STRIKES),
            target=chance.randrange(12),
            lasts_s=chance.uniform(2.0, 40.0),
        )
        for at_s in range(20, int(STORM_S), int(every_s))
    )
    profile = Profile(
        seed=seed,
        hosts=3,
        shards=4,
        java_workers=java_workers,
        records_per_s=8.0,
        settings=FleetSettings(checkpoint_every_s=5.0),
        storm_s=STORM_S,
        user_code=UserCode(**user_code),
        strikes=strikes,
    )
    kind = ProcessWithOutputs.of(*kinds, faults_until_s=STORM_S, late=0.15)
    return play(profile, process_kind=kind), rows_of(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("seed", "by_hand"), [(103_100, False), (103_101, False), (103_102, True)])
def test_a_storm_loses_no_row_and_doubles_none_that_an_output_stores(kinds, seed, by_hand):
    played, store = storm(seed, *KINDS[kinds], checkpoints_by_hand=by_hand)

    assert played.records > 1000
    assert store.seen["unknown"]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
def test_a_lease_that_a_java_worker_moved_halts_and_its_outputs_begin_behind_that(kinds):
    """An operator resumes it. Java workers write no rows of what they process."""
    played, store = storm(103_028, *KINDS[kinds], java_workers=2)

    assert store.seen["moved"]
    assert "lease_halted" in played.situations


def test_a_row_made_again_by_hand_halts_its_lease_until_the_token_in_the_database_is_set_back():
    """Swarm storm 103066 beside SQL, made small: rows of a host that was lost are deleted."""
    strikes = [("kill_process", 60.0, 0), ("kill_process", 61.0, 1), ("kill_host", 80.0, 0)]
    strikes += [("delete_row", 81.0 + n / 10, n) for n in range(6)]
    profile = Profile(
        seed=1,
        hosts=2,
        shards=3,
        records_per_s=4.0,
        settings=FleetSettings(checkpoint_every_s=5.0),
        storm_s=120.0,
        strikes=tuple(
            Strike(at_s=at, kind=kind, target=n, lasts_s=40.0) for kind, at, n in strikes
        ),
    )
    kind = ProcessWithOutputs.of("sql", faults_until_s=0.0)
    played = play(profile, process_kind=kind)

    assert rows_of(kind).seen["token above ours"] == 1
    assert played.situations >= {"lease_halted", "lease_resumed"}


@pytest.mark.long
def test_the_storms_reach_what_makes_outputs_hard():
    seen = sum((storm(103_101, *KINDS[kinds])[1].seen for kinds in ("sql", "s3")), Counter())

    assert seen.keys() >= {"adopted", "superseded", "much left", "unknown"}


def _by_token_only(table, token, began, upto, _):
    """V1, V2: SQL conditional on the fencing token, without the position."""
    if token < table.token:
        return False
    table.at = upto
    table.add(began + 1, upto)
    return True


def _replace(chain, _, began, upto, commit_id):
    """V3, V4: an object of another owner is replaced."""
    former = chain.objects.get(began, (began, ""))
    for number in range(began + 1, former[0] + 1):
        chain.rows[number] = 0
    chain.reached = min(chain.reached, began)
    chain.objects[began] = (upto, commit_id)
    chain.add(began + 1, upto)
    return True


def _take_for_done(chain, _, began, upto, commit_id):
    """A 412 on an object that another owner created is taken for success."""
    if began not in chain.objects:
        S3Chain.create(chain, began, upto, commit_id)
    return True


# What is broken, in which storm, and the promise that then breaks.
BROKEN = {
    "V1, V2: the token alone": (SqlTable, "commit", _by_token_only, "sql", "K5"),
    "V3: objects are replaced": (S3Chain, "commit", _replace, "s3", "I13"),
    "K8: another owner's object counts as ours": (S3Chain, "commit", _take_for_done, "s3", "I13"),
    "V7: the row has no cursor of each output": (
        *(StoredCursors, "of", lambda *_: None, "both", "K5"),
    ),
    "I13: a checkpoint does not wait": (
        *(OutputCommits, "covered", lambda _, wanted, *__: wanted, "s3", "I13"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_rule_is_caught(name, monkeypatch):
    kind, attribute, broken, kinds, promise = BROKEN[name]
    monkeypatch.setattr(kind, attribute, broken)

    with pytest.raises(InvariantViolation, match=f"{promise}: "):
        _storms(*KINDS[kinds])


def _storms(*kinds):
    for seed in range(103_100, 103_120):
        storm(seed, *kinds)
