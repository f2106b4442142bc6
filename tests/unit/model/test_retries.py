"""How long a request is repeated, and which modules say their limits there."""

import ast

import pytest

from kclrun import errors
from kclrun.model.retries import PASSING_OF_WRITES, Retries, repeated
from tests.architecture.sources import our_modules

# Each module that repeats a request because a service throttles or is away. A loop that is new
# takes its decision from `Retries`, too, and is listed here.
CALLERS = {
    "kclrun/aws/changes/stream.py",
    "kclrun/aws/patience.py",
    "kclrun/aws/put_records.py",
    "kclrun/cli/lag.py",
    "kclrun/codec/record_sizes.py",
    "kclrun/observe/publishing.py",
    "kclrun/spark/executor/reading.py",
    "kclrun/spark/offset_planner.py",
    "kclrun/spark/requests.py",
    "kclrun/spark/sink/shards.py",
}
# These do not repeat it themselves: a poll goes on, or the answer is an event of a core.
ASKERS = {
    "kclrun/aws/outputs/dynamodb.py",
    "kclrun/aws/outputs/state_items.py",
    "kclrun/aws/table_setup.py",
    "kclrun/model/subscribing.py",
    "kclrun/manager/instance_watch.py",
    "kclrun/page/acting.py",
    "kclrun/producing/kinesis_producer.py",
    "kclrun/outputs/message_output.py",
}
THROTTLED = errors.Throttled("slow down")
AWAY = errors.Unavailable("no answer")


def names_of(source):
    return {
        alias.name
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and node.module == "kclrun.model.retries"
        for alias in node.names
    }


def rules_of_their_own(source):
    """The handlers and checks that list the passing failures again."""
    for node in source.nodes:
        match node:
            case ast.ExceptHandler(type=ast.AST() as kinds):
                pass
            case ast.Call(func=ast.Name("isinstance"), args=[_, kinds]):
                pass
            case _:
                continue
        named = {ast.unparse(name) for name in ast.walk(kinds) if isinstance(name, ast.expr)}
        plain = {name.removeprefix("errors.") for name in named}
        if {"Throttled", "Unavailable"} <= plain:
            yield node.lineno


def test_every_module_that_repeats_a_request_takes_its_limits_from_retries():
    assert {source.name for source in our_modules() if "Retries" in names_of(source)} == CALLERS
    names = {source.name: names_of(source) for source in our_modules()}
    assert {name for name, used in names.items() if used and "Retries" not in used} == ASKERS


def test_no_module_lists_the_passing_failures_again():
    again = [
        f"{source.name}:{line}"
        for source in our_modules()
        if source.name != "kclrun/model/retries.py"
        for line in rules_of_their_own(source)
    ]
    assert again == []


@pytest.mark.parametrize(
    ("retries", "error", "attempt", "elapsed_s", "pause_s"),
    [
        pytest.param(Retries(), AWAY, 1, 0.0, 0.1, id="the first pause"),
        pytest.param(Retries(), THROTTLED, 1_000, 1e9, 3.0, id="without end"),
        pytest.param(Retries(base_s=0.5, max_s=0.5), AWAY, 7, 0.0, 0.5, id="of one length"),
        pytest.param(Retries(attempts_max=3), AWAY, 2, 0.0, 0.2, id="the last attempt is left"),
        pytest.param(Retries(attempts_max=3), AWAY, 3, 0.0, None, id="attempts are spent"),
        pytest.param(Retries(attempts_max=1), AWAY, 1, 0.0, None, id="one attempt"),
        pytest.param(Retries(lasts_s=1.0), AWAY, 1, 0.9, 0.1, id="ends with the limit"),
        pytest.param(Retries(lasts_s=1.0), AWAY, 1, 0.95, None, id="would end after the limit"),
        pytest.param(Retries(), errors.NotFound("?"), 1, 0.0, None, id="does not pass"),
        pytest.param(Retries(), errors.OutcomeUnknown("?"), 1, 0.0, None, id="a write, unknown"),
        pytest.param(
            Retries(passing=PASSING_OF_WRITES), errors.OutcomeUnknown("?"), 1, 0.0, 0.1, id="again"
        ),
        pytest.param(
            Retries(at_once=(errors.NothingListens,)), errors.NothingListens("?"), 1, 0.0, None,
            id="raised at once",
        ),
        pytest.param(
            Retries(lasts_s=1.0, throttled=Retries(base_s=8.0, max_s=8.0, lasts_s=20.0)),
            THROTTLED, 1, 12.0, 8.0, id="limits while throttled",
        ),
        pytest.param(
            Retries(throttled=Retries(attempts_max=1)), AWAY, 5, 0.0, 1.6, id="not throttled",
        ),
    ],
)  # fmt: skip
def test_the_pause_follows_from_the_limits(retries, error, attempt, elapsed_s, pause_s):
    pause = retries.pause_s(error, attempt, 1.0, elapsed_s)

    assert pause == (None if pause_s is None else pytest.approx(pause_s))


def test_a_call_is_repeated_with_growing_pauses_until_it_succeeds():
    answers = [AWAY, THROTTLED, "the answer"]
    now, seen = [5.0], []

    def call():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(pause_s):
        now[0] += pause_s

    value = repeated(
        call,
        Retries(attempts_max=3, lasts_s=1.0),
        wait=wait,
        chance=lambda: 1.0,
        clock=lambda: now[0],
        failed=lambda error, elapsed_s: seen.append((error, round(elapsed_s, 6))),
    )

    assert value == "the answer"
    assert seen == [(AWAY, 0.0), (THROTTLED, 0.1)]
    assert now == [pytest.approx(5.3)]


def test_the_last_error_is_raised_as_it_came():
    errors_left = [AWAY, THROTTLED]
    pauses = []

    def call():
        raise errors_left.pop(0)

    with pytest.raises(errors.Throttled) as caught:
        repeated(call, Retries(attempts_max=2), wait=pauses.append, chance=lambda: 0.0)

    assert caught.value is THROTTLED
    assert pauses == [pytest.approx(0.05)]
