"""The README says what the code does: expressions, exit codes, verbs, guarantees."""

import re
from pathlib import Path

from kclrun.aws.clauses import AT_LAST, AT_LAST_WHOLE
from kclrun.aws.expressions import CATALOGUE
from kclrun.cli import exit_codes
from kclrun.consuming import fence, loss
from kclrun.leases import assignment, capacity, manager, offers, pacing, policy
from kclrun.leases.doctor.findings import Kind
from kclrun.model.lease import ASK_STALE_AFTER_S
from kclrun.observe.metrics import METRICS
from kclrun.spark import options
from kclrun.spark.sink import options as sink_options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCES = [path.read_text() for path in (ROOT / "kclrun").rglob("*.py")]
TESTS = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]


CROWD = [f"kclrun:g:h{number}:n" for number in range(1000)]
FROM_WHOLE = " from sub 0"


def stands_in_the_readme(mark, lines):
    found = re.search(rf"<!-- {mark}:.*?-->\n(.*?)\n?<!-- /{mark} -->", README, re.DOTALL)
    assert found is not None
    assert found[1].strip() == "\n".join(lines)


def test_every_conditional_expression_stands_in_the_readme_as_the_code_sends_it():
    lines = ["| write | change | condition |", "|---|---|---|"]
    for each in CATALOGUE:
        if each.name.endswith(FROM_WHOLE) and not each.name.startswith("late"):
            continue  # one sentence says how they differ: the test below
        change = f"`{each.update.code}`" if each.update else ""
        lines.append(f"| {each.name} | {change} | `{each.condition}` |")

    stands_in_the_readme("expressions", lines)


def test_a_write_from_sub_0_differs_by_the_one_clause_that_the_readme_names():
    by_name = {each.name: each for each in CATALOGUE}
    whole = [each for each in by_name if each.endswith(FROM_WHOLE) and not each.startswith("late")]

    assert f"`{AT_LAST_WHOLE.code}`" in README
    for name in whole:
        plain = by_name[name.removesuffix(FROM_WHOLE)]
        assert by_name[name].update == plain.update
        assert by_name[name].condition == plain.condition.replace(AT_LAST.code, AT_LAST_WHOLE.code)
    assert len(whole) >= 5


def test_the_timers_of_the_fleet_stand_in_the_readme_as_the_code_has_them():
    settings = policy.ManagerPolicy(me="kclrun:g:h:n", failover_s=10.0)
    renewals = f"every {fence.renew_interval_s(10.0):.3f} s (F/3 - 25 ms)"
    until = fence.fence_instant(0.0, 10.0)
    rows = {
        "a lease is renewed": renewals,
        "a lease process starts no batch": f"{until:.1f} s after sending its last confirmed write",
        "the table is scanned": f"every {settings.scan_every_s:g} s (F/2) by the"
        f" {pacing.FREQUENT_SCANNERS_MAX} owners whose ids have the smallest hash, every"
        f" {settings.seldom_scan_every_s:g} s (2 F) by the others",
        "a manager that asked for leases, or offered some, scans again": "after"
        f" {pacing.scan_delay_s(settings, CROWD, pacing.Pace.MOVE):g} s (F/2), in a large fleet"
        " too",
        "a manager that took free leases scans again": "after"
        f" {pacing.scan_delay_s(settings, CROWD, pacing.Pace.GRAB):g} s (F/10),"
        f" {manager._HASTY_SCANS_MAX} times in a row at most",
        "free leases are taken at once": "as many as are held, and always"
        f" {assignment._TAKES_AT_ONCE_MIN}",
        "expired leases are offered to the others at once": f"{assignment._OFFERS_AT_ONCE_MAX}",
        "the shards are listed": f"by {pacing._LISTINGS_PER_CYCLE} managers a cycle on average,"
        " and whenever the scan shows a hole, a merge that waits or an empty table",
        "at the first start on an empty table": "a random wait of up to"
        f" {manager._EMPTY_TABLE_WAIT_MAX_S:g} s",
        "something asks for a scan at once": f"{manager.SCAN_GAP_MIN_S:g} s after the last at the"
        " earliest",
        "a free lease is taken beyond the target": f"after {settings.overdue_after_s:g} s (3 F)",
        "offered rows are looked for": f"every {offers.find_every_s(1):g} s; with more than"
        f" {offers._FLEET_QUERIES_PER_S // 2} owners, {offers._FLEET_QUERIES_PER_S} times a second"
        " by all together",
        "who may take an offered row": "whom it is meant for at once, others within"
        f" {offers._SPREAD_S:g} s, {offers._AFTER_ASKER_S:g} s later where it is meant for"
        f" another, the giver after {offers._GIVER_WAITS_S:g} s",
        "an offered row is taken beyond the target": f"when it was left for"
        f" {offers.LEFT_LYING_S:g} s",
        "an ask that is not answered is void": f"after {ASK_STALE_AFTER_S:g} s, as each"
        " side has seen it",
        "asks open at a time": f"{policy.MOVES_PER_CYCLE} (`leases.moves_per_cycle`)",
        "`capacity_short` is logged": f"after {capacity._SCANS_IN_A_ROW} scans with unclaimed"
        " leases at `leases.max`",
        "a late checkpoint is tried": f"for {loss.LATE_CHECKPOINT_S:g} s",
        "user code of a lost lease may go on": f"for {loss.LET_GO_S:g} s, then its process is"
        " ended",
    }

    lines = ["| what | when, with F = 10 s |", "|---|---|"]
    stands_in_the_readme("timers", lines + [f"| {what} | {when} |" for what, when in rows.items()])


def test_every_metric_stands_in_the_readme_as_the_code_has_it():
    lines = ["| metric | unit | Prometheus | meaning |", "|---|---|---|---|"]
    for name, kind in METRICS.items():
        lines.append(f"| `{name}` | {kind.unit} | `{kind.prometheus}` | {kind.meaning} |")

    stands_in_the_readme("metrics", lines)


def test_every_finding_of_the_doctor_stands_in_the_readme_as_the_code_has_it():
    lines = ["| finding | gravity | the records | mended by `--yes` |", "|---|---|---|---|"]
    for kind in Kind:
        mended = " yes " if kind.is_mendable else " "
        if kind.needs_consent:
            mended = f" with `--accept {kind.value}` "
        gravity = kind.gravity.name.lower()
        lines.append(f"| `{kind.value}` | {gravity} | {kind.means} |{mended}|")

    stands_in_the_readme("findings", lines)


def test_every_exit_code_of_the_code_stands_in_the_readme():
    codes = {
        value for name, value in vars(exit_codes).items() if name.isupper() and type(value) is int
    }

    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert codes <= documented


def test_every_guarantee_of_the_readme_is_named_in_the_code_and_in_a_test():
    promised = re.findall(r"^\| (I\d+b?|A\d+) \|", README, re.MULTILINE)

    unproven = [
        each
        for each in promised
        if not any(re.search(rf"\b{each}\b", text) for text in SOURCES)
        or not any(re.search(rf"\b{each}\b", text) for text in TESTS)
    ]
    assert promised
    assert unproven == []


def test_every_option_of_source_and_sink_stands_in_the_readme():
    names = {*options.NAMES, *options.ALIASES, *sink_options.NAMES}

    assert [each for each in sorted(names) if f"`{each}`" not in README] == []
