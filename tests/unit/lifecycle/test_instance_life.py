"""What is decided about an instance's life: notices, heartbeats, hooks, and when to leave."""

import pytest

from kclrun.lifecycle import instance as ec2
from kclrun.model.instance import (
    InstanceIdentity,
    InstanceLook,
    Interruption,
    LifecycleAction,
    NoticeKind,
    TargetState,
)

ME = InstanceIdentity("i-0123456789abcdef0", "eu-west-1", "eu-west-1a")
LAUNCH = LifecycleAction("eu-west-1", "orders", "ready", ME.instance_id)
TERMINATION = LifecycleAction("eu-west-1", "orders", "drained", ME.instance_id)
HOOKS = {"group": "orders", "launch_hook": "ready", "termination_hook": "drained"}
WALL = 1_780_000_000.0

ENDED = ec2.Looked(InstanceLook(target_state=TargetState.TERMINATED), WALL)
RECOMMENDED = ec2.Looked(InstanceLook(is_rebalance_recommended=True), WALL)
DONE = ec2.LifecycleAnswer(ec2.LifecycleOutcome.DONE)
GONE = ec2.LifecycleAnswer(ec2.LifecycleOutcome.GONE, "ValidationError", "nothing waits")
LATER = ec2.LifecycleAnswer(ec2.LifecycleOutcome.LATER, "Throttling", "Rate exceeded")
UNKNOWN = ec2.LifecycleAnswer(ec2.LifecycleOutcome.UNKNOWN, "", "no answer")
REFUSED = ec2.LifecycleAnswer(ec2.LifecycleOutcome.REFUSED, "AccessDenied", "no")


def interrupted(action="terminate", in_s=120.0):
    return ec2.Looked(InstanceLook(interruption=Interruption(action, WALL + in_s)), WALL)


def life(**policy):
    made = ec2.InstanceLife(ec2.InstancePolicy(**(HOOKS | policy)))
    made.handle(ec2.Identified(ME), 0.0)
    return made


def acts(commands):
    """The commands that do something; notes are for people."""
    return [each for each in commands if not isinstance(each, ec2.Note)]


def notes(commands):
    return [each.event for each in commands if isinstance(each, ec2.Note)]


@pytest.fixture
def one():
    return life()


# Notices.


@pytest.mark.parametrize(
    ("look", "notice"),
    [
        (ENDED, NoticeKind.GROUP_TERMINATES),
        (interrupted(), NoticeKind.SPOT_INTERRUPTION),
        (RECOMMENDED, NoticeKind.REBALANCE),
    ],
)
def test_each_notice_drains_once_and_says_so_once(look, notice):
    one = life(launch_hook=None, termination_hook=None)

    first = one.handle(look, 1.0)
    second = one.handle(look, 6.0)

    assert [each.notice for each in acts(first)] == [notice]
    [note] = [each for each in first if isinstance(each, ec2.Note)]
    said = {"action": "terminate", "deadline_s": 120.0} if look == interrupted() else {}
    assert note == ec2.Note("instance_notice", {"reason": notice.value, **said})
    assert second == ()


def test_a_look_that_finds_nothing_does_nothing(one):
    assert one.handle(ec2.Looked(InstanceLook(), WALL), 1.0) == ()
    assert (
        one.handle(ec2.Looked(InstanceLook(target_state=TargetState.IN_SERVICE), WALL), 6.0) == ()
    )
    assert one.handle(ec2.Looked(InstanceLook(target_state=TargetState.OTHER), WALL), 11.0) == ()


def test_a_recommendation_may_be_ignored_and_an_interruption_not():
    one = life(drains_on_rebalance=False)

    assert one.handle(RECOMMENDED, 1.0) == ()
    assert [each.notice for each in acts(one.handle(interrupted(), 6.0))] == [
        NoticeKind.SPOT_INTERRUPTION
    ]


def test_a_spot_instance_is_drained_some_seconds_before_its_end():
    [drain] = acts(life().handle(interrupted(in_s=115.0), 1000.0))

    assert drain == ec2.DrainHost(NoticeKind.SPOT_INTERRUPTION, by=1000.0 + 115.0 - 10.0)


@pytest.mark.parametrize(
    ("in_s", "left_s"),
    [(5.0, 2.0), (-3600.0, 2.0), (3600.0, 110.0)],
    ids=["hardly any time", "a clock that is ahead", "a clock that is behind"],
)
def test_the_time_to_drain_is_two_seconds_at_least_and_never_above_the_two_minutes(in_s, left_s):
    [drain] = acts(life().handle(interrupted(in_s=in_s), 0.0))

    assert drain.by == left_s


def test_an_interruption_without_a_time_has_the_grace():
    look = ec2.Looked(InstanceLook(interruption=Interruption("hibernate")), WALL)

    assert acts(life().handle(look, 0.0)) == [ec2.DrainHost(NoticeKind.SPOT_INTERRUPTION, None)]


def test_an_interruption_bounds_a_drain_that_a_recommendation_began(one):
    one.handle(RECOMMENDED, 0.0)

    assert acts(one.handle(interrupted(in_s=120.0), 30.0)) == [
        ec2.DrainHost(NoticeKind.SPOT_INTERRUPTION, by=140.0)
    ]


# The launch hook.


def test_the_launch_hook_is_completed_when_the_machine_is_ready_and_not_before(one):
    before = acts(one.handle(ec2.Ticked(), 1.0))
    ready = acts(one.handle(ec2.BecameReady(), 2.0))

    assert before == []
    assert ready == [ec2.Complete(LAUNCH)]
    assert notes(one.handle(ec2.CompletionAnswered(LAUNCH, DONE), 2.1)) == ["lifecycle_completed"]
    assert acts(one.handle(ec2.Ticked(), 60.0)) == []


def test_a_machine_that_was_ready_before_its_metadata_answered_is_put_into_service_then():
    one = ec2.InstanceLife(ec2.InstancePolicy(**HOOKS))

    assert acts(one.handle(ec2.BecameReady(), 1.0)) == []
    assert acts(one.handle(ec2.Identified(ME), 5.0)) == [ec2.Complete(LAUNCH)]


@pytest.mark.parametrize("event", [ec2.StopBegan(), ENDED, interrupted()])
def test_who_is_leaving_is_not_put_into_service(one, event):
    one.handle(event, 1.0)

    assert ec2.Complete(LAUNCH) not in one.handle(ec2.BecameReady(), 2.0)


def test_a_manager_that_starts_again_finds_nothing_waiting_at_the_launch_hook_and_goes_on(one):
    one.handle(ec2.BecameReady(), 0.0)

    reported, now = [], 0.0
    for _ in range(10):
        reported += notes(one.handle(ec2.CompletionAnswered(LAUNCH, GONE), now))
        if reported:
            break
        now += 2.0
        assert acts(one.handle(ec2.Ticked(), now)) == [ec2.Complete(LAUNCH)]

    assert reported == ["lifecycle_gone"]
    assert now <= 4.0
    assert not one.stays


def test_a_machine_that_works_is_put_into_service_even_if_the_group_is_away_for_long(one):
    one.handle(ec2.BecameReady(), 0.0)

    asked, now = 1, 0.0
    while now < 1_800.0:
        assert notes(one.handle(ec2.CompletionAnswered(LAUNCH, LATER), now)) == []
        while not acts(one.handle(ec2.Ticked(), now)):
            now += 0.5
        asked += 1
    reported = notes(one.handle(ec2.CompletionAnswered(LAUNCH, DONE), now))

    assert reported == ["lifecycle_completed"]
    assert asked < 250


def test_a_group_that_is_away_for_an_hour_is_asked_no_more(one):
    one.handle(ec2.BecameReady(), 0.0)

    reported, now = [], 0.0
    while not reported:
        reported = notes(one.handle(ec2.CompletionAnswered(LAUNCH, LATER), now))
        while not reported and not acts(one.handle(ec2.Ticked(), now)):
            now += 0.5

    assert reported == ["lifecycle_not_completed"]
    # Every 8 s at the end; 3,599 s is the last time within the hour.
    assert now == 3_599.0


def test_hooks_without_a_known_group_are_one_warning():
    one = ec2.InstanceLife(ec2.InstancePolicy(launch_hook="ready", termination_hook="drained"))

    first = one.handle(ec2.Identified(ME), 0.0)

    watched, warned = first
    me = {"instance": ME.instance_id, "zone": ME.zone, "hook": "ready, drained"}
    assert watched == ec2.Note("instance_watched", me)
    assert (warned.event, warned.fields["hook"]) == ("lifecycle_not_completed", "ready, drained")
    assert "InstanceMetadataTags" in warned.fields["action"]
    assert acts(one.handle(ec2.BecameReady(), 1.0)) == []
    one.handle(ENDED, 2.0)
    assert acts(one.handle(ec2.Drained(), 3.0)) == []
    assert not one.stays


def test_the_group_may_be_known_from_the_tag_and_the_settings_go_first():
    tagged = InstanceIdentity(ME.instance_id, ME.region, ME.zone, group="by-tag")
    by_tag = ec2.InstanceLife(ec2.InstancePolicy(launch_hook="ready"))
    by_settings = ec2.InstanceLife(ec2.InstancePolicy(**HOOKS))
    for one in (by_tag, by_settings):
        one.handle(ec2.Identified(tagged), 0.0)

    [watched] = ec2.InstanceLife(ec2.InstancePolicy()).handle(ec2.Identified(tagged), 0.0)
    assert watched.fields["group"] == "by-tag"
    assert "hook" not in watched.fields
    [asked] = acts(by_tag.handle(ec2.BecameReady(), 1.0))
    [set_] = acts(by_settings.handle(ec2.BecameReady(), 1.0))

    assert asked.action.group == "by-tag"
    assert set_.action.group == "orders"


# The termination hook.


def test_the_termination_hook_is_completed_after_the_last_lease_and_never_before(one):
    first = acts(one.handle(ENDED, 0.0))
    draining = acts(one.handle(ec2.Ticked(), 0.5))
    said = one.handle(ec2.Drained(), 1.0)
    drained = acts(said)

    assert notes(said) == [], "the group waits for us, not we for the group"
    assert first == [ec2.DrainHost(NoticeKind.GROUP_TERMINATES), ec2.Heartbeat(TERMINATION)]
    assert draining == []
    assert drained == [ec2.Complete(TERMINATION)]
    assert one.stays
    one.handle(ec2.CompletionAnswered(TERMINATION, DONE), 1.1)
    assert not one.stays


def test_a_drain_that_takes_long_asks_for_more_time_again_and_again(one):
    one.handle(ENDED, 0.0)
    beats = []
    for half_seconds in range(1, 121):
        now = half_seconds / 2
        if beats and not beats[-1][1]:
            one.handle(ec2.HeartbeatAnswered(TERMINATION, DONE), now)
            beats[-1] = (beats[-1][0], True)
        for command in acts(one.handle(ec2.Ticked(), now)):
            assert command == ec2.Heartbeat(TERMINATION)
            beats.append((now, False))
        if half_seconds == 1:
            one.handle(ec2.HeartbeatAnswered(TERMINATION, LATER), now)

    assert [at for at, _ in beats] == [10.0 * each for each in range(1, 7)]


def test_one_heartbeat_is_under_way_at_a_time_and_none_after_the_drain(one):
    one.handle(ENDED, 0.0)

    assert acts(one.handle(ec2.Ticked(), 100.0)) == []
    one.handle(ec2.HeartbeatAnswered(TERMINATION, DONE), 101.0)
    one.handle(ec2.Drained(), 101.5)
    assert ec2.Heartbeat(TERMINATION) not in one.handle(ec2.Ticked(), 200.0)


def test_a_refused_heartbeat_is_reported_once(one):
    one.handle(ENDED, 0.0)
    said = []
    for now in (1.0, 12.0, 23.0):
        said += one.handle(ec2.HeartbeatAnswered(TERMINATION, REFUSED), now)
        assert acts(one.handle(ec2.Ticked(), now + 10.0)) == [ec2.Heartbeat(TERMINATION)]

    fields = {"hook": "drained", "group": "orders", "reason": "no heartbeat"}
    fields |= {"code": "AccessDenied", "error": "no"}
    assert said == [ec2.Note("lifecycle_not_completed", fields)]


@pytest.mark.parametrize("answer", [LATER, UNKNOWN, GONE])
def test_a_heartbeat_that_had_no_effect_is_repeated_and_not_worth_a_line(one, answer):
    one.handle(ENDED, 0.0)

    assert one.handle(ec2.HeartbeatAnswered(TERMINATION, answer), 1.0) == ()
    assert acts(one.handle(ec2.Ticked(), 9.9)) == []
    assert acts(one.handle(ec2.Ticked(), 10.0)) == [ec2.Heartbeat(TERMINATION)]


def test_a_heartbeat_that_the_group_took_is_a_line(one):
    one.handle(ENDED, 0.0)

    said = one.handle(ec2.HeartbeatAnswered(TERMINATION, DONE), 1.0)

    assert said == (ec2.Note("lifecycle_heartbeat", {"hook": "drained", "group": "orders"}),)


def test_who_was_drained_by_a_notice_stays_until_the_group_ends_the_machine(one):
    one.handle(RECOMMENDED, 0.0)

    drained = one.handle(ec2.Drained(), 1.0)

    assert drained == (ec2.Note("lifecycle_awaited", {"hook": "drained", "group": "orders"}),)
    assert one.stays
    assert acts(one.handle(ENDED, 600.0)) == [
        ec2.DrainHost(NoticeKind.GROUP_TERMINATES),
        ec2.Complete(TERMINATION),
    ]
    one.handle(ec2.CompletionAnswered(TERMINATION, DONE), 600.1)
    assert not one.stays


@pytest.mark.parametrize(
    ("policy", "event"),
    [
        ({"termination_hook": None}, interrupted()),
        ({}, interrupted("stop")),
        ({}, interrupted("hibernate")),
        ({}, ec2.StopBegan()),
    ],
    ids=["no hook", "a stopped instance", "a hibernated instance", "a stop by signal"],
)
def test_nobody_stays_for_what_will_not_come(policy, event):
    one = life(**policy)
    one.handle(event, 0.0)
    one.handle(ec2.Drained(), 1.0)

    assert not one.stays


@pytest.mark.parametrize(
    ("happened", "stays"),
    [
        ([ec2.StopBegan(), interrupted()], False),
        ([RECOMMENDED, ec2.StopBegan()], True),
        ([RECOMMENDED, interrupted("stop")], True),
        ([interrupted()], True),
    ],
    ids=["a stop, then the notice", "a notice, then the stop", "two notices", "one notice"],
)
def test_a_machine_that_is_replaced_stays_unless_it_was_asked_to_stop_before(one, happened, stays):
    for at, event in enumerate([*happened, ec2.Drained()]):
        one.handle(event, float(at))

    assert one.stays is stays


def test_whoever_is_leaving_by_now_asks_no_more_to_be_put_into_service(one):
    one.handle(ec2.BecameReady(), 0.0)
    one.handle(ec2.CompletionAnswered(LAUNCH, LATER), 0.1)
    one.handle(RECOMMENDED, 0.5)

    assert acts(one.handle(ec2.Ticked(), 10.0)) == []


def test_a_stop_by_signal_completes_the_hook_that_the_group_waits_at(one):
    one.handle(ec2.StopBegan(), 0.0)
    one.handle(ENDED, 1.0)

    assert acts(one.handle(ec2.Drained(), 2.0)) == [ec2.Complete(TERMINATION)]


# Answers of the group.


def completing():
    one = life()
    one.handle(ENDED, 0.0)
    one.handle(ec2.HeartbeatAnswered(TERMINATION, DONE), 0.0)
    assert acts(one.handle(ec2.Drained(), 1.0)) == [ec2.Complete(TERMINATION)]
    return one


def answered(one, answers):
    """Give these answers, each as soon as it was asked for; (events told, after how long)."""
    now = 1.0
    for answer in answers:
        reported = notes(one.handle(ec2.CompletionAnswered(TERMINATION, answer), now))
        if reported:
            return reported, now - 1.0
        began = now
        while not acts(one.handle(ec2.Ticked(), now)):
            now += 0.5
            assert now < began + 60.0, "it is never asked again"
    return [], now - 1.0


def test_a_throttled_completion_is_asked_again_slower_each_time():
    assert answered(completing(), [LATER, LATER, LATER, DONE]) == (["lifecycle_completed"], 7.0)


def test_a_group_that_never_answers_holds_the_stop_up_for_half_a_minute_and_no_longer():
    one = completing()

    # 1 + 2 + 4 + 8 + 8 s; eight more would be above 30.
    assert answered(one, [LATER] * 100) == (["lifecycle_not_completed"], 23.0)
    assert not one.stays


def test_the_line_of_an_end_says_which_hook_how_often_it_was_asked_for_and_what_came_last():
    one = completing()
    one.handle(ec2.CompletionAnswered(TERMINATION, LATER), 2.0)
    assert acts(one.handle(ec2.Ticked(), 3.0)) == [ec2.Complete(TERMINATION)]

    [note] = one.handle(ec2.CompletionAnswered(TERMINATION, REFUSED), 5.5)

    assert note == ec2.Note(
        "lifecycle_not_completed",
        {
            "hook": "drained",
            "group": "orders",
            "attempts": 2,
            "seconds": 5.5 - 1.0,
            "code": "AccessDenied",
            "error": "no",
        },
    )


def test_a_hook_that_is_gone_is_asked_for_thrice_because_the_wait_may_begin_late():
    assert answered(completing(), [GONE, DONE]) == (["lifecycle_completed"], 1.0)
    assert answered(completing(), [GONE] * 100) == (["lifecycle_gone"], 3.0)


def test_nothing_waits_after_an_answer_that_was_lost_because_it_was_completed():
    assert answered(completing(), [UNKNOWN, GONE]) == (["lifecycle_completed"], 1.0)


def test_a_refused_completion_is_not_repeated():
    assert answered(completing(), [REFUSED]) == (["lifecycle_not_completed"], 0.0)
