"""The verdict on a manager: progress, not existence; and only what another machine would repair."""

from kclrun.observe.health import HealthLimits, health_body, judge
from kclrun.observe.sample import LeaseSample, ManagerSample, OutageSample
from tests.support.tables import over_rows

LIMITS = HealthLimits(stall_s=120.0, look_age_max_s=10.0, drain_max_s=70.0, output_lag_max_s=180.0)


def sample(*leases, **fields):
    fields = {"total_leases": len(leases), "uptime_s": 500.0} | fields
    return ManagerSample(application="orders", stream="orders", owner="me", leases=leases, **fields)


def lease(shard="a", state="running", still_s=0.5, note="", **more):
    return LeaseSample(shard=shard, state=state, still_s=still_s, note=note, **more)


def verdict(shown, age_s=1.0):
    return judge(shown, age_s=age_s, limits=LIMITS)


def words(judged):
    return " / ".join(reason.text for reason in judged.reasons)


SCENARIOS = [
    ("a manager whose leases get on is well", sample(lease()), "ok", ""),
    ("a manager without a lease is well: there are fewer shards", sample(), "ok", ""),
    ("it begins", sample(total_leases=None, uptime_s=3.0), "starting", "has not been read yet"),
    (
        "it began long ago and has not read the table",
        sample(total_leases=None, uptime_s=120.0),
        "failing",
        "has not been read yet, 120 s",
    ),
    (
        "a KCL 3 fleet that took the table over lets no kclrun start again",
        sample(lease(), native_mode="CLIENT_VERSION_3X"),
        "degraded",
        "in its own mode (CLIENT_VERSION_3X): the next start of kclrun is refused",
    ),
    ("a stop is under way", sample(lease(), draining_s=20.0), "draining", "for 20 s"),
    ("a stop does not come to its end", sample(draining_s=70.0), "failing", "for 70 s"),
    (
        "a halted lease would halt on the next machine as well",
        sample(lease(state="halted", still_s=None, note="ValueError: x"), lease("b")),
        "degraded",
        "halted: ValueError: x",
    ),
    (
        "one lease that stands still may be its own records' fault",
        sample(lease(still_s=9000.0), lease("b")),
        "degraded",
        "running, and no progress for 9000 s",
    ),
    ("one that stands still for `stall`", sample(lease(still_s=120.0)), "degraded", "for 120 s"),
    (
        "of one shard no page is read",
        sample(lease(still_s=45.0, note="no page was read for 45 s"), lease("b")),
        "degraded",
        "running, and its lag is not known: no page was read for 45 s",
    ),
    ("one that stands still for less", sample(lease(still_s=119.9)), "ok", ""),
    (
        "rows that an output does not take wait on every machine, and are told",
        sample(lease(output_lag_ms=180_000), lease("b", output_lag_ms=400_000)),
        "degraded",
        "rows have waited for an output for 180 s, and no checkpoint passes them; the log says",
    ),
    ("rows that wait for their roll", sample(lease(output_lag_ms=179_999)), "ok", ""),
    (
        "a halted lease is told once",
        sample(lease(state="halted", still_s=None, note="x", output_lag_ms=10**6)),
        "degraded",
        "halted: x",
    ),
    (
        "user code raised, and is called again",
        sample(lease("a", "failing", 3.0, "KeyError: x"), lease("b")),
        "degraded",
        "failing: KeyError: x",
    ),
    (
        "the only lease that stands still may be, too",
        sample(lease(still_s=9000.0)),
        "degraded",
        "no progress for 9000 s",
    ),
    (
        "two leases that stand still since before their restart",
        sample(lease(still_s=240.0), lease("b", still_s=300.0)),
        "failing",
        "none of 2 leases",
    ),
    (
        "two leases whose destination is away: the next machine would wait for it, too",
        sample(
            lease(still_s=240.0, destination_away_s=230.0, output_lag_ms=230_000),
            lease("b", "waiting", still_s=300.0, destination_away_s=290.0, note="output failed"),
        ),
        "degraded",
        "no progress for 240 s",
    ),
    (
        "one whose call waits for a destination",
        sample(lease("b", "waiting", destination_away_s=5.0, note="waits for a destination")),
        "degraded",
        "waiting: waits for a destination",
    ),
    (
        "two that stand still, and a third that moves",
        sample(lease(still_s=240.0), lease("b", still_s=300.0), lease("c")),
        "degraded",
        "no progress for 240 s",
    ),
    (
        "two that stand still, but not for long enough that a restart has failed",
        sample(lease(still_s=130.0), lease("b", still_s=130.0)),
        "degraded",
        "no progress for 130 s",
    ),
    (
        "leases that wait for their parents are not expected to move",
        sample(lease("a", "waiting", None), lease("b", "waiting", None)),
        "ok",
        "",
    ),
    (
        "a lease whose process dies again and again",
        sample(lease("a", "backing off", 30.0, "restarts in 8 s"), lease("b")),
        "degraded",
        "backing off: restarts in 8 s",
    ),
    (
        "the table cannot be scanned for a while",
        sample(lease(), outages=(OutageSample("scan the lease table", "HTTP 500", 30.0),)),
        "degraded",
        "scan the lease table: failing for 30 s: HTTP 500",
    ),
    (
        "the table cannot be scanned for so long that others have our leases",
        sample(outages=(OutageSample("scan the lease table", "HTTP 500", 120.0),)),
        "failing",
        "failing for 120 s",
    ),
    (
        "what only speeds moves up fails for ever: nothing stands still for it",
        sample(
            lease(), outages=(OutageSample("look for offers", "AccessDenied", 9e5, is_vital=False),)
        ),
        "degraded",
        "look for offers",
    ),
    ("the launcher is away", sample(lease(), launcher_away_s=5.0), "degraded", "lease process"),
    (
        "its host runs some leases only",
        sample(
            lease(),
            host_short_s=500.0,
            host_runs=3,
            host_reason="fork: no memory",
            worker_leases_max=64,
        ),
        "degraded",
        "this host runs 3 leases, of 64 at most, and has given others away for 500 s: fork: no",
    ),
    (
        "its host runs none since a moment ago",
        sample(host_short_s=119.9, host_reason="fork: no memory"),
        "degraded",
        "runs 0 leases",
    ),
    (
        "its host runs none",
        sample(host_short_s=120.0, host_reason="fork: no memory"),
        "failing",
        "fork: no memory",
    ),
    ("it stays away", sample(lease(), launcher_away_s=120.0), "failing", "for 120 s"),
]


@over_rows(("shown", "status", "said"), [row[1:] for row in SCENARIOS])
def test_a_manager_is_judged_by_its_progress(shown, status, said):
    judged = verdict(shown)

    assert judged.status == status
    assert said in words(judged)
    assert bool(judged.reasons) == bool(said)
    assert judged.is_healthy == (status != "failing")


def test_a_manager_that_does_not_look_any_more_is_failing_whatever_it_last_showed():
    assert verdict(sample(lease()), age_s=9.9).status == "ok"
    assert verdict(sample(lease()), age_s=10.0).status == "failing"


def test_a_manager_that_has_not_looked_yet_is_starting_but_not_for_ever():
    assert verdict(None, age_s=30.0).status == "starting"
    assert verdict(None, age_s=119.9).status == "starting"
    assert verdict(None, age_s=120.0).status == "failing"
    assert "has not looked after its leases for 120 s" in words(verdict(None, age_s=120.0))


def test_what_makes_it_fail_is_said_first():
    shown = sample(lease("a", "halted", None), launcher_away_s=500.0)

    assert [reason.is_failing for reason in verdict(shown).reasons] == [True, False]


def test_the_body_names_the_shard_of_a_reason_and_the_state_of_each_lease():
    shown = sample(lease("a", "halted", None, "boom"), lease("b", still_s=0.5678), uptime_s=500.09)

    body = health_body(shown, verdict(shown))

    assert body["status"] == "degraded"
    remedy = "fix the cause, then: kclrun leases --config FILE resume a --yes"
    assert body["reasons"] == [{"text": f"halted: boom; {remedy}", "shard": "a"}]
    assert {name: body[name] for name in ("application", "stream", "owner", "uptime_s")} == {
        "application": "orders",
        "stream": "orders",
        "owner": "me",
        "uptime_s": 500.1,
    }
    still = {"shard": "a", "state": "halted", "still_s": None, "note": "boom"}
    moving = {"shard": "b", "state": "running", "still_s": 0.6, "note": ""}
    unknown = {
        "destination_away_s": None,
        "lag_ms": None,
        "output_lag_ms": None,
        "restarts": 0,
        "traffic": None,
        "hot": None,
    }
    assert body["leases"] == [each | unknown for each in (still, moving)]


def test_secrets_in_an_exception_of_user_code_are_cut_out_of_the_body():
    key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    shown = sample(lease("a", "halted", None, f"KeyError: {key}\r\nSet-Cookie: x"))

    text = str(health_body(shown, verdict(shown)))

    assert key not in text
    assert "KeyError: [withheld]" in text
    assert "\r" not in text


def test_words_of_user_code_and_of_the_table_are_short_on_a_page_for_others():
    shown = sample(
        lease("a", "failing", 0.0, "x-" * 200 + "x"),
        native_mode="y-" * 32 + "y",
        host_short_s=1.0,
        host_reason="z-" * 200 + "z",
    )

    mode, host, note = (reason.text for reason in verdict(shown).reasons)

    assert len(note) == len("failing: ") + 400
    assert len(host.partition(" s: ")[2]) == 400
    assert len(mode.partition("(")[2].partition(")")[0]) == 64
    assert len(health_body(shown, verdict(shown))["leases"][0]["note"]) == 400


def test_before_the_first_look_the_body_says_no_more_than_that():
    assert health_body(None, verdict(None)) == {
        "status": "starting",
        "reasons": [{"text": "the manager is starting"}],
    }
