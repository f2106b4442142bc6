"""What each test file of a package meets in the product, kept from one run to the next.

A file is recorded anew once it, what it shares with its neighbours, or a product file that it met
has changed. So a run after a repair costs the tests that it concerns, and those have passed.
"""

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from tests.simulation.mutants.meeting import IMPORT, Meeting, Order

# A test hangs once it takes ten times what it took without the bug, and a minute more: the load of
# the machine may come meanwhile.
_HANG_FACTOR = 10.0
_HANG_ALLOWANCE_S = 60.0


class Recorded(msgspec.Struct, frozen=True):
    """One test file: the files its record rests on, by their digests, and its tests."""

    inputs: Mapping[str, str]
    meetings: tuple[Meeting, ...]


def recorded(
    root: Path,
    places: Sequence[str],
    kept: Path,
    record: Callable[[list[str]], list[Meeting] | str],
) -> Mapping[str, Recorded] | str:
    """By test file of `places` (folders and files). `record` runs the stale ones, and says so if
    they fail."""
    known = _read(kept)
    there = [
        str(file.relative_to(root))
        for place in places
        for file in sorted([root / place, *(root / place).rglob("*")])
        if file.suffix in {".py", ".yaml"}
    ]
    files = [each for each in there if Path(each).match("test_*.py")]
    stale = [file for file in files if file not in known or not _is_fresh(root, known[file])]
    if stale:
        meetings = record(stale)
        if isinstance(meetings, str):
            return meetings
        without = {file: Recorded({file: _digest(root / file)}, ()) for file in stale}
        known = {**known, **without, **_by_file(root, sorted({*there}.difference(files)), meetings)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(msgspec.json.encode(known))
    return {file: known[file] for file in files}


def files_for(
    source: bytes, file: str, line: int, records: Mapping[str, Recorded]
) -> tuple[tuple[str, ...], Order]:
    """The test files that can notice a change of `line` of `file`, and the order of their tests.

    Those that meet it, the quickest first; then those that start processes, which may meet it, and
    for what makes constants, in a function or outside of one, all others: any test may use them.
    """
    function = _function_at(source, line)
    every = [one for each in records.values() for one in each.meetings]
    if any(one.test.endswith(IMPORT) and (file, function) in one.met for one in every):
        function = None
    meeting, maybe = {}, []
    for tests, each in records.items():
        there = [one for one in each.meetings if _meets(one, file, function)]
        if there:
            meeting[tests] = sorted(there, key=lambda one: one.took_s)
        elif function is None or any(one.starts_processes for one in each.meetings):
            maybe.append(tests)
    ranked = sorted(meeting, key=lambda tests: meeting[tests][0].took_s)
    files = (*ranked, *maybe)
    hung_after_s = {
        one.test: _HANG_ALLOWANCE_S + _HANG_FACTOR * one.took_s
        for tests in files
        for one in records[tests].meetings
    }
    return files, Order(tuple(one.test for at in ranked for one in meeting[at]), hung_after_s)


def _by_file(root: Path, shared: list[str], meetings: list[Meeting]) -> dict[str, Recorded]:
    found = {}
    for file, group in groupby(sorted(meetings, key=lambda each: each.test), key=_file_of):
        own = tuple(group)
        inputs = {file, *shared, *(met[0] for each in own for met in each.met)}
        found[file] = Recorded({each: _digest(root / each) for each in sorted(inputs)}, own)
    return found


def _read(kept: Path) -> dict[str, Recorded]:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=dict[str, Recorded])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _is_fresh(root: Path, record: Recorded) -> bool:
    return all(_digest(root / file) == digest for file, digest in record.inputs.items())


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def _meets(each: Meeting, file: str, function: int | None) -> bool:
    """What stands outside of functions is met first by tests that call anything of the file."""
    return any(met[0] == file and function in {None, met[1]} for met in each.met)


def _function_at(source: bytes, line: int) -> int | None:
    """The first line of the innermost function around `line`, decorators included."""
    around = [
        min([node.lineno, *(each.lineno for each in node.decorator_list)])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, default=None)


def _file_of(each: Meeting) -> str:
    return each.test.partition("::")[0]
