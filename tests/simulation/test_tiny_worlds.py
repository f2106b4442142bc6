"""Every state of tiny worlds, by the real cores: two managers, their leases' lives, the rows.

`bin/prove worlds` explores all of the worlds, and further; here are those that are small enough to
be seen whole in seconds, the first states of all others, and planted bugs.
"""

from collections import Counter, deque

import msgspec
import pytest

from tests.simulation.tiny_worlds.motions import begin
from tests.simulation.tiny_worlds.moves import moves, step
from tests.simulation.tiny_worlds.planted import BUGS
from tests.simulation.tiny_worlds.program import run
from tests.simulation.tiny_worlds.search import Search, Violation
from tests.simulation.tiny_worlds.shapes import Shapes
from tests.simulation.tiny_worlds.shells import Shells
from tests.simulation.tiny_worlds.stories import tell
from tests.simulation.tiny_worlds.worlds import WORLDS

BY_NAME = {world.name: world for world in WORLDS}
WHOLE = ("calm", "drain", "host", "manager", "restart")
# Far more than any of these worlds takes on a busy machine, of CPU time.
SECONDS_MAX = 100.0
# Far enough that the children of a split shard have rows in some states and not in others.
STATES_COMPARED = 3000


def search(world, states_max=1_000_000):
    return Search(world, states_max=states_max, seconds_max=SECONDS_MAX).run()


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_state_of_a_smallest_world_keeps_the_rules_and_comes_to_rest(name):
    found = search(BY_NAME[name])

    assert found.violation is None, tell(BY_NAME[name], found.violation)
    assert found.is_complete
    assert found.judged > 0


@pytest.mark.parametrize("name", BY_NAME)
def test_the_first_states_of_every_world_keep_the_rules(name):
    found = search(BY_NAME[name], states_max=300)

    assert found.violation is None, tell(BY_NAME[name], found.violation)
    assert found.states >= 300


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.says, marks=[pytest.mark.slow] if bug.moves > 10 else [])
        for bug in BUGS
    ],
)
def test_a_planted_bug_is_found_by_its_shortest_story(bug):
    world = BY_NAME[bug.world]
    if bug.fault is not None:
        world = msgspec.structs.replace(world, faults=frozenset({bug.fault}))

    with bug.plant():
        found = search(world)

        assert found.violation is not None
        assert found.violation.words.startswith(f"{bug.rule}: ")
        assert len(found.violation.places) == bug.moves
        story = tell(world, found.violation)
    assert story.count(found.violation.words) == 2, "the story does not end where the search did"
    assert "PYTHONPATH=. python -m tests.simulation.tiny_worlds.program" in story


def test_a_stuck_world_is_reported():
    world = BY_NAME["calm"]
    stuck = Search(world, states_max=400, seconds_max=SECONDS_MAX)
    stuck.run()
    stuck._calm[:] = bytes(len(stuck._calm))
    stuck._fair[3] = 3

    stuck._follow_all([])

    assert stuck.found.violation is not None
    assert stuck.found.violation.words.startswith("L1: ")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("network", marks=pytest.mark.slow), "end"])
def test_what_follows_from_a_state_does_not_depend_on_what_was_looked_at_before(name):
    shells = Shells(BY_NAME[name])
    shapes = Shapes(shells)
    first = begin(shells)
    seen = {shapes.key(first): first}
    waiting = deque(seen.values())
    while len(seen) < STATES_COMPARED:
        state = waiting.popleft()
        for move in moves(shells, state):
            following = step(shells, state, move)
            if seen.setdefault(shapes.key(following), following) is following:
                waiting.append(following)
    states = list(seen.values())[::7]

    def followings(state):
        return [shapes.key(step(shells, state, move)) for move in moves(shells, state)]

    forwards = [followings(state) for state in states]
    backwards = [followings(state) for state in reversed(states)]

    assert backwards[::-1] == forwards


@pytest.mark.parametrize("name", ["ask-network", "drift-network", "half-merge", "three"])
def test_states_that_are_taken_for_the_same_go_on_alike(name):
    shells = Shells(BY_NAME[name])
    shapes = Shapes(shells)

    def followings(state):
        return Counter(
            (move[0], shapes.key(step(shells, state, move))) for move in moves(shells, state)
        )

    states = {shapes.key(first): first for first in [begin(shells)]}
    waiting = deque(states.values())
    compared = 0
    while len(states) < 300:
        state = waiting.popleft()
        for move in moves(shells, state):
            following = step(shells, state, move)
            same = states.setdefault(shapes.key(following), following)
            if same is following:
                waiting.append(following)
            else:
                compared += 1
                assert followings(same) == followings(following), (move, same, following)
    assert compared > 100


def test_a_state_and_its_mirror_image_are_one():
    shells = Shells(BY_NAME["calm"])
    shapes = Shapes(shells)
    state = begin(shells)

    by_host = {move[1]: shapes.key(step(shells, state, move)) for move in moves(shells, state)}

    assert by_host[0] == by_host[1]


def test_a_limited_run_prints_a_line_a_world_and_a_sum(capsys):
    assert run(states_max=len(WORLDS) * 20, seconds_max=SECONDS_MAX) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [world.name for world in WORLDS]
    assert lines[-1].startswith(f"{len(WORLDS)} worlds, 0 of them complete: ")


def test_a_violation_is_reported_and_fails_the_run(capsys):
    bug = next(bug for bug in BUGS if bug.world == "calm")

    with bug.plant():
        code = run(states_max=100_000, seconds_max=SECONDS_MAX)

    assert code == 1
    assert f"{bug.rule}: s0" in capsys.readouterr().out


def test_a_path_of_moves_is_played_again():
    story = tell(BY_NAME["network"], Violation("as it was", (0, 0, 0)))

    assert "  1. at 0 s: serve host a" in story
    assert "StartProcess(key='s0'" in story
