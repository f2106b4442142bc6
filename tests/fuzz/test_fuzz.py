"""A while of fuzzing for each target, and every input that ever broke one."""

import time

import pytest

from tests.fuzz.program import FOUND, main
from tests.fuzz.searching import Broken, Search, examine
from tests.fuzz.targets import TARGETS, Target
from tests.seeds import seed_of
from tests.support.tables import over_rows

# A second or so of each on a quiet machine: these read slowly, for they do much.
STEPS = {"settings": 40, "ring": 150, "status-slot": 600}
STEPS_OF_OTHERS = 1500


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_any_bytes_give_a_value_or_a_named_error_within_limits(name):
    seed = seed_of()
    search = Search(TARGETS[name], seed)

    for _ in range(STEPS.get(name, STEPS_OF_OTHERS)):
        search.step()

    assert search.inputs > len(TARGETS[name].corpus)
    assert len(search.reached) > 1


@over_rows("path", sorted(FOUND.glob("*/*")))
def test_what_broke_a_reader_once_or_was_made_to_holds(path):
    examine(TARGETS[path.parent.name], path.read_bytes())


def toy(read, *errors):
    return Target("toy", read, errors, (b"seed",))


def raises_what_nobody_named(data):
    if data.startswith(b"\0"):
        raise KeyError("a byte that nobody thought of")


def spins(_):
    ends = time.process_time() + 0.06
    while time.process_time() < ends:
        pass


def hoards(_):
    hoarded = bytearray(65 * 1024 * 1024)
    # As slow as a busy machine makes it: the memory is the reason that is told.
    spins(_)
    return hoarded


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (raises_what_nobody_named, "KeyError"),
        (spins, "s for 1 bytes"),
        (hoards, "bytes of memory for 1 bytes"),
    ],
)
def test_a_reader_that_breaks_its_promise_is_caught(read, why):
    with pytest.raises(Broken, match=why):
        examine(toy(read), b"\0")


def test_a_named_error_is_an_answer():
    examine(toy(raises_what_nobody_named, KeyError), b"\0")


def test_inputs_that_reach_new_lines_are_built_upon():
    search = Search(TARGETS["kpl-message"], 1)
    before = len(search.corpus)

    for _ in range(500):
        search.step()

    assert len(search.corpus) > before


@pytest.mark.seconds
def test_a_kept_input_is_replayed_by_the_line_that_was_printed(tmp_path, capsys):
    kept = tmp_path / "input"
    kept.write_bytes(b"{}")

    assert main(["get-records", "--replay", str(kept)]) == 0
    assert capsys.readouterr().out == "holds\n"
