"""Anything may happen to an instance, in any order: what is promised about its hooks holds.

Hypothesis prints the events of a failure, and replays it from its own database.
"""

from hypothesis import given
from hypothesis import strategies as st

from kclrun.lifecycle import instance as ec2
from kclrun.model.instance import InstanceIdentity, InstanceLook, Interruption, TargetState
from tests.examples import examples

WALL = 1_780_000_000.0
OUTCOMES = st.sampled_from(ec2.LifecycleOutcome)
LOOKS = st.builds(
    InstanceLook,
    st.one_of(
        st.none(),
        st.builds(
            Interruption,
            st.sampled_from(["terminate", "stop", "hibernate"]),
            st.one_of(st.none(), st.floats(WALL - 500, WALL + 500)),
        ),
    ),
    st.booleans(),
    st.one_of(st.none(), st.sampled_from(TargetState)),
)
# What the shell may tell: these once, the rest as often as it likes.
ONCE = ("ready", "stop", "drained", "identified")
MOVES = st.lists(
    st.tuples(
        st.sampled_from([*ONCE, "look", "tick", "answer", "answer", "tick"]),
        LOOKS,
        OUTCOMES,
        st.floats(0.0, 40.0),
    ),
    max_size=60,
)
POLICIES = st.builds(
    ec2.InstancePolicy,
    drains_on_rebalance=st.booleans(),
    group=st.sampled_from([None, "orders"]),
    launch_hook=st.sampled_from([None, "ready"]),
    termination_hook=st.sampled_from([None, "drained"]),
)


@examples(400)
@given(POLICIES, MOVES, st.sampled_from([None, "by-tag"]))
def test_whatever_happens_hooks_are_answered_in_turn_and_nobody_stays_for_ever(policy, moves, tag):
    life = ec2.InstanceLife(policy)
    now, reported, open_requests, notices, is_drained, is_ended = 0.0, set(), [], [], False, False

    def happens(event):
        nonlocal is_drained, is_ended
        is_drained = is_drained or isinstance(event, ec2.Drained)
        if isinstance(event, ec2.Looked):
            is_ended = is_ended or event.look.target_state is TargetState.TERMINATED
        for command in life.handle(event, now):
            if isinstance(command, ec2.DrainHost):
                assert command.notice not in notices
                assert command.by is None or now + 2.0 <= command.by <= now + 110.0
                notices.append(command.notice)
            elif isinstance(command, ec2.Heartbeat):
                assert is_ended
                assert not is_drained
                assert command not in open_requests
                open_requests.append(command)
            elif isinstance(command, ec2.Complete):
                is_last = command.action.hook == "drained"
                assert not is_last or (is_drained and is_ended)
                assert is_last or ("ready" in reported and not is_drained)
                assert command not in open_requests
                open_requests.append(command)

    def answer(outcome):
        request = open_requests.pop(0)
        kind = (
            ec2.HeartbeatAnswered if isinstance(request, ec2.Heartbeat) else ec2.CompletionAnswered
        )
        happens(kind(request.action, ec2.LifecycleAnswer(outcome)))

    identity = InstanceIdentity("i-0123456789abcdef0", "eu-west-1", "eu-west-1a", tag)
    events = {
        "ready": ec2.BecameReady(),
        "stop": ec2.StopBegan(),
        "drained": ec2.Drained(),
        "identified": ec2.Identified(identity),
    }
    for what, look, outcome, passed_s in moves:
        now += passed_s
        if what in ONCE:
            if what not in reported:
                reported.add(what)
                happens(events[what])
        elif what == "look" and "identified" in reported:
            happens(ec2.Looked(look, WALL))
        elif what == "answer" and open_requests:
            answer(outcome)
        else:
            happens(ec2.Ticked())

    # The group ends the machine, and never answers: a minute later nothing holds the program.
    for what in ("identified", "drained"):
        if what not in reported:
            reported.add(what)
            happens(events[what])
    happens(ec2.Looked(InstanceLook(target_state=TargetState.TERMINATED), WALL))
    for _ in range(120):
        now += 0.5
        happens(ec2.Ticked())
        while open_requests:
            answer(ec2.LifecycleOutcome.LATER)
    assert not life.stays
