"""The arithmetic of the bench: a wrong median would praise a slow runtime."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from bench.__main__ import ROWS, main
from bench.figures import NotMeasured, Sample, Target, figure, paired_ratios, percentile
from bench.showing import show
from bench.spark_whole import Mark, whole

from tests.support.programs import needs_spark
from tests.support.tables import over_rows


def test_a_ratio_is_taken_within_a_round():
    # Given a machine that was half as fast in the second round, for both.
    ours, theirs = [100.0, 50.0, 90.0], [10.0, 5.0, 10.0]

    assert paired_ratios(ours, theirs) == [10.0, 10.0, 9.0]


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_ratios([1.0, 2.0], [1.0])


def test_the_middle_is_the_median_and_the_rest_nearest_ranks():
    values = [float(each) for each in range(100, 0, -1)]

    assert percentile(values, 50) == 50.5
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    assert percentile([3.0], 99) == 3.0


def test_the_p99_of_less_than_a_hundred_is_the_greatest():
    assert percentile([float(each) for each in range(60)], 99) == 59.0


def test_a_rate_is_work_over_its_own_cost():
    sample = Sample(work=1000, cpu_s=0.5, wall_s=2.0)

    assert (sample.per_cpu_s, sample.per_wall_s) == (2000, 500)


@over_rows(
    ("target", "values", "is_met"),
    [
        (Target(at_least=20.0), [19.0, 20.0, 30.0], True),
        (Target(at_least=20.0), [19.0, 19.9, 30.0], False),
        (Target(at_most=1.25), [1.0, 1.25, 2.0], True),
        (Target(at_most=1.25), [1.0, 1.26, 2.0], False),
        (None, [1.0], None),
    ],
)
def test_the_median_decides_whether_a_target_is_met(target, values, is_met):
    assert figure("row", "what", "x", values, target=target).is_met is is_met


def test_a_target_on_the_tail_is_judged_by_the_tail():
    values = [0.1] * 98 + [2.0, 2.0]

    judged = figure("crash", "what", "s", values, target=Target(at_most=1.5), judged_percentile=99)

    assert judged.median == 0.1
    assert judged.is_met is False


def test_what_falls_short_is_said_and_what_was_not_measured_too(capsys):
    short = figure("fetch", "ours ÷ stock", "x", [1.0, 2.0, 3.0], target=Target(at_least=20.0))

    show([short, NotMeasured("crash", "no such thing yet")])

    first, second = capsys.readouterr().out.splitlines()
    assert "1/2/3 x (n=3)" in first
    assert first.endswith("target ≥ 20: FALLS SHORT")
    assert second.endswith("not measured: no such thing yet")


@pytest.mark.seconds
def test_every_row_can_be_loaded():
    assert {
        name for name, row in ROWS.items() if not callable(row.load(dict.fromkeys(row.takes)))
    } == set()


@needs_spark  # its version is a line of the report
def test_a_row_that_fails_is_reported_and_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bench.record_path.fetch", lambda rounds: 1 / 0)
    path = tmp_path / "figures.json"

    code = main(["fetch", "--json", str(path)])

    document = json.loads(path.read_text())
    assert code == 1
    assert document["figures"] == []
    assert document["not_measured"] == [
        {"row": "fetch", "reason": "ZeroDivisionError: division by zero"}
    ]
    assert "not measured: ZeroDivisionError" in capsys.readouterr().out


@needs_spark
def test_what_this_machine_does_not_have_is_left_out_and_no_error(monkeypatch, capsys):
    absent = NotMeasured("spark-whole", "no jar", is_left_out=True)
    monkeypatch.setattr("bench.spark_whole.whole", lambda rounds, **_: [absent])

    assert main(["spark-whole"]) == 0

    assert "left out: no jar" in capsys.readouterr().out


def test_the_sizes_that_were_asked_for_are_the_ones_that_the_labels_name(monkeypatch):
    marks = [Mark(1_000_000, 10.0, 5.0), Mark(2_500_000, 15.0, 8.0)]
    server = nullcontext(SimpleNamespace(url=""))
    monkeypatch.setattr("bench.spark_whole.CannedServer", lambda _: server)
    monkeypatch.setattr("bench.spark_whole._run", lambda *_: marks)

    labels = " | ".join(
        each.what for each in whole(1, rows_counted=(500_000, 2_000_000)) if hasattr(each, "what")
    )

    assert "0.5 M rows, start included | kclrun: 2 M rows, start included" in labels
    assert "from 0.5 M rows to 2 M rows" in labels


def test_a_row_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["fetsch"])

    assert "no such row: fetsch" in capsys.readouterr().err
