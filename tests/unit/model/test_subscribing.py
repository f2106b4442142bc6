"""When a lease process subscribes, and when it polls: the plan, by its instants."""

import math

import pytest

from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    MalformedBody,
    NotFound,
    Throttled,
    Unavailable,
)
from kclrun.model.subscribing import (
    REFUSED_FOR_GOOD_S,
    RENEWED_AFTER_S,
    RENEWED_SPREAD_S,
    RETRY_MAX_S,
    SETTLED_AFTER_S,
    SILENCE_MAX_S,
    SubscriptionPlan,
)
from tests.support.tables import over_rows

BUSY = Unavailable("ResourceInUseException")


def polled(at=100.0):
    plan = SubscriptionPlan()
    plan.polled(at)
    return plan


def subscribed(at=100.0, chance=0.0):
    plan = polled(at)
    plan.began(at, chance)
    return plan


def test_nothing_is_subscribed_before_the_first_page_was_polled():
    plan = SubscriptionPlan()

    assert not plan.is_due(1e9)
    assert plan.next_change_in_s(1e9) == math.inf
    plan.polled(100.0)
    assert plan.is_due(100.0)


def test_a_later_page_puts_a_try_neither_off_nor_forward():
    plan = polled()
    plan.failed(BUSY, 100.0, 0.0)
    due_in = plan.next_change_in_s(100.0)

    plan.polled(100.5)

    assert plan.next_change_in_s(100.5) == due_in - 0.5


def test_while_a_subscription_stands_no_other_one_is_due():
    assert not subscribed().is_due(1e9)


@over_rows(
    ("error", "chance", "pauses"),
    [
        # Another owner's subscription is taken over after five seconds: the fourth try.
        (BUSY, 0.0, [1.0, 2.0, 4.0, 8.0, RETRY_MAX_S / 2, RETRY_MAX_S / 2]),
        (BUSY, 0.5, [1.5, 3.0, 6.0]),
        (Throttled("slow down"), 0.0, [1.0, 2.0]),
        (MalformedBody("cut"), 0.0, [1.0, 2.0]),
        (NotFound("no consumer"), 0.0, [REFUSED_FOR_GOOD_S / 2] * 3),
        (AccessDenied("no permission"), 0.5, [REFUSED_FOR_GOOD_S * 0.75] * 2),
        (InvalidRequest("no such position"), 0.0, [REFUSED_FOR_GOOD_S / 2]),
    ],
)
def test_what_is_refused_is_tried_again_after_a_pause_by_its_kind(error, chance, pauses):
    plan, now = polled(), 100.0
    for pause_s in pauses:
        plan.failed(error, now, chance)
        assert plan.next_change_in_s(now) == pause_s
        now += pause_s
        assert plan.is_due(now)


def test_an_event_ends_the_growth_of_the_pauses():
    plan = polled()
    plan.failed(BUSY, 100.0, 0.0)
    plan.failed(BUSY, 101.0, 0.0)
    plan.began(110.0, 0.0)
    plan.event_came()

    plan.failed(BUSY, 120.0, 0.0)

    assert plan.next_change_in_s(120.0) == 1.0


@pytest.mark.parametrize(
    ("lived_s", "due_in_s"),
    [(300.0, 0.0), (SETTLED_AFTER_S, 0.0), (SETTLED_AFTER_S - 0.1, 1.0), (1.0, 4.0)],
)
def test_after_a_good_end_the_next_is_due_at_once_where_the_service_would_not_refuse_it(
    lived_s, due_in_s
):
    plan = subscribed(100.0)

    plan.ended(100.0 + lived_s, 0.0)

    assert plan.next_change_in_s(100.0 + lived_s) == due_in_s


def test_subscriptions_that_end_at_once_again_and_again_do_not_spin():
    plan, now, pauses = polled(), 100.0, []
    for _ in range(6):
        plan.began(now, 0.0)
        plan.ended(now, 0.0)
        pauses.append(plan.next_change_in_s(now))
        now += pauses[-1]

    assert pauses == [5.0, 5.0, 5.0, 8.0, RETRY_MAX_S / 2, RETRY_MAX_S / 2]


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_a_subscription_is_renewed_before_the_service_ends_it(chance):
    plan = subscribed(100.0, chance)
    renewed_at = 100.0 + RENEWED_AFTER_S - chance * RENEWED_SPREAD_S

    assert renewed_at < 100.0 + 300.0
    assert plan.next_change_in_s(100.0) == pytest.approx(renewed_at - 100.0)
    assert plan.next_change_in_s(1e9) == 0.0
    assert not plan.is_renewal_due(renewed_at - 0.1)
    assert plan.is_renewal_due(renewed_at)
    plan.ended(renewed_at, 0.0)
    assert not plan.is_renewal_due(renewed_at)


@pytest.mark.parametrize(("lived_s", "due_in_s"), [(0.0, 5.0), (2.0, 3.0), (4.5, 1.0), (9.0, 1.0)])
def test_a_subscription_that_breaks_early_is_not_replaced_while_the_service_would_refuse(
    lived_s, due_in_s
):
    plan = subscribed(100.0)

    plan.failed(BUSY, 100.0 + lived_s, 0.0)

    assert plan.next_change_in_s(100.0 + lived_s) == due_in_s


def test_silence_of_two_heartbeats_is_the_end_and_an_event_between_begins_anew():
    plan = subscribed()

    assert not plan.is_silent(SILENCE_MAX_S - 0.5)
    plan.event_came()
    assert not plan.is_silent(SILENCE_MAX_S - 0.5)
    assert plan.is_silent(0.5)


@over_rows(
    ("claim", "events", "is_slow"),
    [
        ("each is late, and the lag grows", [(20_000 + 4_000 * n, 4.0) for n in range(4)], True),
        ("the lag stays", [(40_000, 4.0)] * 4, True),
        ("it catches up", [(40_000 - 1_000 * n, 4.0) for n in range(9)], False),
        ("it is hardly behind", [(10_000, 4.0)] * 9, False),
        (
            "it waited for room, not for events",
            [(40_000 + 1_000 * n, 0.0) for n in range(9)],
            False,
        ),
        ("its lag is not known", [(None, 4.0)] * 9, False),
        (
            "it was slow, and caught up",
            [(40_000, 4.0), (40_000, 4.0), (0, 4.0), (40_000, 4.0)],
            False,
        ),
    ],
)
def test_a_subscription_that_is_behind_and_does_not_catch_up_is_slow(claim, events, is_slow):
    plan = subscribed()
    for behind_ms, waited_s in events:
        plan.is_silent(waited_s / 2)
        plan.event_came(behind_ms, waited_s / 2)

    assert plan.is_slow is is_slow, claim


def test_a_slow_subscription_is_tried_again_after_pauses_that_grow():
    plan, now, pauses = polled(), 100.0, []
    for _ in range(4):
        plan.began(now, 0.0)
        plan.event_came(40_000, 20.0)
        assert plan.is_slow
        now += 20.0
        plan.failed(BUSY, now, 0.0)
        pauses.append(plan.next_change_in_s(now))
        now += pauses[-1]

    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]


def test_silence_of_a_former_subscription_does_not_count_for_the_next():
    plan = subscribed()
    plan.is_silent(SILENCE_MAX_S - 0.5)
    plan.failed(BUSY, 110.0, 0.0)
    plan.began(111.0, 0.0)

    assert not plan.is_silent(SILENCE_MAX_S - 0.5)
