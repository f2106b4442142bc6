"""When a lease process subscribes, and when it polls: the plan, by its instants."""

import pytest

from kclrun.errors import (
    Unavailable,
)
from kclrun.model.subscribing import (
    RENEWED_AFTER_S,
    RENEWED_SPREAD_S,
    RETRY_MAX_S,
    SETTLED_AFTER_S,
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
        plan.waited(waited_s / 2)
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
