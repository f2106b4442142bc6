"""`kclrun simulate`: figures for people and machines, refusals in words, a story when it breaks."""

import json
import shlex

import pytest

from kclrun.cli.program import run_program
from kclrun.simulation.oracles import Oracles
from kclrun.simulation.story import RuleBroken

SMALL = ["simulate", "--workers", "6", "--shards", "12", "--groups", "3", "--minutes", "4"]
EVERYTHING = [*SMALL, "--lose-group", "b", "--deploy", "rolling", "--reshard", "double"]


def test_each_thing_that_befalls_the_fleet_is_a_line_of_the_table(capsys):
    assert run_program(EVERYTHING) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["what", "balanced"]
    starts = ["cold start", "group b lost", "rolling deploy", "shards: double"]
    assert [line[: len(start)] for line, start in zip(lines[1:5], starts, strict=True)] == starts
    assert lines[-1].startswith("24 shards, 4 workers: 6 to 6 each (even: 6); ")


def test_the_json_has_what_was_asked_and_every_figure(capsys):
    assert run_program([*EVERYTHING, "--json", "--seed", "7"]) == 0

    said = json.loads(capsys.readouterr().out)
    assert said["asked"]["seed"] == 7
    assert said["asked"]["settings"]["failover_s"] == 10
    lost, deployed = said["phases"][1:3]
    assert 9 < lost["gap_p50_s"] <= lost["gap_max_s"] <= 17
    assert deployed["duplicates"] == 0
    assert deployed["moves"] >= 12
    assert said["write_units"] == pytest.approx(sum(p["write_units"] for p in said["phases"]))
    assert (said["shards_per_owner_min"], said["shards_per_owner_max"]) == (6, 6)


def test_the_same_command_gives_the_same_figures_and_another_seed_others(capsys):
    def said(*more):
        run_program([*SMALL, *more])
        return capsys.readouterr().out

    assert said() == said()
    assert said() != said("--seed", "2")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--lose-group", "d"], "the groups are a, b, c"),
        (["--lose-group", "a", "--groups", "1"], "nobody would be left"),
        (["--groups", "7"], "needs at least as many workers"),
    ],
)
def test_what_cannot_be_is_refused_in_words(more, words, capsys):
    assert run_program([*SMALL, *more]) == 64

    assert words in capsys.readouterr().err


def test_a_broken_promise_ends_with_70_the_story_and_a_line_that_replays_it(capsys, monkeypatch):
    def refuse(_, reader):
        raise RuleBroken("I1", reader.key, "planted")

    monkeypatch.setattr(Oracles, "shard_exhausted", refuse)

    assert run_program([*EVERYTHING, "--seed", "3"]) == 70

    told = capsys.readouterr().err
    assert "I1: planted" in told
    assert "seed 3: at 00:03:0" in told
    assert "reports claimed" in told
    replay = next(line for line in told.splitlines() if "replay: " in line).split("replay: ")[1]
    words = shlex.split(replay)
    assert words[:2] == ["kclrun", "simulate"]
    assert run_program(words[1:]) == 70
    assert capsys.readouterr().err == told
