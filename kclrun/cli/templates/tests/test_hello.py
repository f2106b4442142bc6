"""Run it with pytest; it needs no AWS."""

from kclrun.testing import run_processor
from processors.hello import Hello


def test_words_are_counted() -> None:
    run = run_processor(
        Hello, [b"world", b"moon", b"world"], settings={"options": {"greeting": "hi"}}
    )

    assert {row["word"]: row["times"] for row in run.rows} == {"moon": 1, "world": 2}
