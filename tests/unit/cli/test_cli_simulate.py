"""`kclrun simulate`: figures for people and machines, refusals in words, a story when it breaks."""

import contextlib
import io
import json
import shlex
import subprocess
import sys

import pytest

from kclrun.cli.program import run_program
from kclrun.simulation.record import FleetRecord
from kclrun.simulation.stories import RuleBroken

pytestmark = pytest.mark.seconds

SMALL = ["simulate", "--workers", "6", "--shards", "12", "--groups", "3", "--minutes", "4"]
UNEQUAL = ["simulate", "--group-sizes", "4,2,2", "--shards", "20", "--minutes", "1"]
EVERYTHING = [*SMALL, "--lose-group", "b", "--deploy", "rolling", "--reshard", "double"]


@pytest.fixture(scope="module")
def said_of_everything():
    """What `--json` says of all that can befall a fleet, run once for the tests that read it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_program([*EVERYTHING, "--json", "--seed", "7"]) == 0
    return json.loads(out.getvalue())


def test_each_thing_that_befalls_the_fleet_is_a_line_of_the_table(capsys):
    assert run_program(EVERYTHING) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["what", "balanced"]
    starts = ["cold start", "group b lost", "rolling deploy", "shards: double"]
    assert [line[: len(start)] for line, start in zip(lines[1:5], starts, strict=True)] == starts
    assert lines[-1].startswith("24 shards, 4 workers: 6 to 6 each (even: 6); ")


def test_the_json_has_what_was_asked_and_every_figure(said_of_everything):
    said = said_of_everything
    assert said["asked"]["seed"] == 7
    assert said["asked"]["settings"]["failover_s"] == 10
    lost, deployed = said["phases"][1:3]
    # A counter that was last renewed up to F/3 before the loss stands still for F, then L1's bound.
    assert 10 - 10 / 3 < lost["gap_p50_s"] <= lost["gap_max_s"] <= 17
    assert deployed["duplicates"] == 0
    assert deployed["moves"] >= 12
    assert said["write_units"] == pytest.approx(sum(p["write_units"] for p in said["phases"]))
    assert (said["shards_per_owner_min"], said["shards_per_owner_max"]) == (6, 6)


def test_the_same_command_gives_the_same_figures_and_another_seed_others(capsys):
    def said(*more):
        run_program([*UNEQUAL, *more])
        return capsys.readouterr().out

    assert said() == said()
    assert said() != said("--seed", "2")


# Above 16 managers most look at the table seldom; the few that do not tell them what expired.


def phases_of(capsys, *more):
    assert run_program(["simulate", *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["phases"]


@pytest.mark.long
def test_in_a_large_fleet_too_a_lost_group_is_read_again_within_failover_and_7_s(capsys):
    fleet = ["--workers", "24", "--shards", "96", "--groups", "3", "--minutes", "2"]

    _, lost = phases_of(capsys, *fleet, "--lose-group", "b")

    assert lost["gaps"] >= 32
    assert lost["gap_max_s"] <= 17


@pytest.mark.long
def test_children_of_a_stream_that_doubles_are_read_within_a_second_wherever_targets_stand(capsys):
    _, doubled = phases_of(
        capsys, "--workers", "8", "--shards", "96", "--reshard", "double", "--minutes", "2"
    )

    assert doubled["gaps"] >= 192
    assert doubled["gap_max_s"] <= 1


def test_a_fleet_that_starts_on_many_shards_moves_few_of_them_twice(capsys):
    (start,) = phases_of(capsys, "--workers", "20", "--shards", "240", "--minutes", "1")

    assert start["balanced_after_s"] <= 15
    assert start["moves"] <= 60


# Groups of unequal size, and how it went over time.


def test_groups_may_be_of_unequal_size_and_each_gets_its_share_of_the_shards(capsys):
    run_program([*UNEQUAL, "--json"])

    said = json.loads(capsys.readouterr().out)
    owners = said["series"]["owners"].values()
    held = {group: [o["shards"][-1][1] for o in owners if o["group"] == group] for group in "abc"}
    assert said["asked"]["group_sizes"] == [4, 2, 2]
    assert {group: len(shards) for group, shards in held.items()} == {"a": 4, "b": 2, "c": 2}
    assert 9 <= sum(held["a"]) <= 11
    assert sum(map(sum, held.values())) == 20


def test_the_series_has_a_value_for_each_look_and_ends_with_the_figures(said_of_everything):
    said = said_of_everything
    series = {
        name: column for name, column in said["series"].items() if name != "owners" and column
    }
    owners = said["series"]["owners"]
    assert {len(column) for column in series.values()} == {4 * 60 * 2 + 1}
    assert series["at_s"] == sorted(series["at_s"])
    assert (series["moves"][-1], series["unread"][-1]) == (said["moves"], 0)
    assert series["write_units"][-1] == said["write_units"]
    longest = max(series["unread_longest_s"])
    assert longest == pytest.approx(max(p["gap_max_s"] for p in said["phases"]), abs=1.0)
    gone = [owner["left_s"] for owner in owners.values() if owner["left_s"] is not None]
    # Two hosts of the lost group, then the four others, each replaced.
    assert len(gone) == 6
    assert gone.count(60.5) == 2
    assert len(owners) == 10


def test_with_skewed_keys_the_largest_load_is_reported_before_and_after_the_exchanges(capsys):
    skewed = ["simulate", "--workers", "3", "--shards", "24", "--minutes", "8", "--skew", "0.9"]

    assert run_program([*skewed, "--record-bytes", "50000", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert run_program([*skewed, "--record-bytes", "50000", "--balance", "counts"]) == 0
    words = capsys.readouterr().out

    greatest, least = said["series"]["load_greatest"], said["series"]["load_least"]
    assert len(greatest) == len(least) == len(said["series"]["at_s"])
    assert said["load_by_counts"] > greatest[-1] >= least[-1] >= 1.0
    before = f"{said['load_by_counts']:.2f} of the mean with even counts"
    assert f"the largest load of a worker: {before}, {before[:4]} at the end" in words


@pytest.mark.slow
def test_a_picture_is_drawn_of_the_kind_that_its_name_says_and_the_same_each_time(tmp_path, capsys):
    def drawn(asked, name):
        assert run_program([*asked, "--plot", str(tmp_path / name)]) == 0
        assert "cold start" in capsys.readouterr().out
        return (tmp_path / name).read_bytes()

    assert drawn(EVERYTHING, "went.png").startswith(b"\x89PNG")
    svg = drawn(UNEQUAL, "went.svg")
    assert b"<svg" in svg
    assert drawn(UNEQUAL, "again.svg") == svg


def test_without_matplotlib_it_says_how_to_get_it_before_anything_is_run(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("kclrun.simulation.what_if.run_what_if", pytest.fail)

    assert run_program([*SMALL, "--plot", str(tmp_path / "x.png")]) == 78

    assert "pip install 'kclrun[plot]'" in capsys.readouterr().err


def test_without_a_picture_matplotlib_is_not_loaded():
    program = "from kclrun.cli.program import run_program as run; import sys; run(sys.argv[1:])"
    check = "assert not [name for name in sys.modules if name.startswith('matplotlib')]"

    done = subprocess.run(
        [sys.executable, "-c", f"{program}; {check}", *UNEQUAL], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--lose-group", "d"], "the groups are a, b, c"),
        (["--lose-group", "a", "--groups", "1"], "no worker would be left"),
        (["--groups", "7"], "needs at least as many workers"),
        (["--group-sizes", "4,2"], "leave --workers and --groups out"),
        (["--plot", "went.jpg"], "must end with .png or .svg"),
        (["--plot", "nowhere/at/all.png"], "the folder nowhere/at does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_words(more, words, capsys):
    assert run_program([*SMALL, *more]) == 64

    assert words in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["", "4,", "4,0", "4,-1", "four", "1999,2", ",".join("1" * 27)])
def test_group_sizes_that_are_none_are_refused_in_words(sizes, capsys):
    assert run_program(["simulate", "--group-sizes", sizes]) == 64

    assert "such as 8,4,4" in capsys.readouterr().err


def test_a_broken_promise_ends_with_70_the_story_and_a_line_that_replays_it(capsys, monkeypatch):
    def refuse(_, reader):
        raise RuleBroken("I1", reader.key, "planted")

    monkeypatch.setattr(FleetRecord, "shard_exhausted", refuse)

    assert run_program([*EVERYTHING, "--seed", "3"]) == 70

    reported = capsys.readouterr().err
    assert "I1: planted" in reported
    assert "seed 3: at 00:03:0" in reported
    assert "reports LeaseClaimed(" in reported
    replay = next(line for line in reported.splitlines() if "replay: " in line).split("replay: ")[1]
    words = shlex.split(replay)
    assert words[:2] == ["kclrun", "simulate"]
    assert run_program(words[1:]) == 70
    assert capsys.readouterr().err == reported
