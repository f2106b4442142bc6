"""The files of a starter project: those of ours that are tested here, and a few words.

The processor is the very module that ships as `processors/hello.py`, so that the starter cannot
rot. Look next: `init.py`, which writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import kclrun

__all__ = ["starter_files"]

_PACKAGE_ROOT: Final = Path(kclrun.__file__).resolve().parent

_PROCESSORS: Final = '"""Your processors."""\n'

_TEST: Final = '''\
"""Run it with pytest; it needs no AWS."""

from kclrun.testing import run_processor
from processors.hello import Hello


def test_words_are_counted() -> None:
    run = run_processor(Hello, [b"world", b"moon", b"world"], options={"greeting": "hi"})

    assert {row["word"]: row["times"] for row in run.rows} == {"moon": 1, "world": 2}
'''

_README: Final = """\
# hello

    kclrun --config app.yaml          # runs on an AWS inside kclrun; rows appear in out/
    kclrun check --config app.yaml    # is everything right?
    python -m pytest                  # the processor's test

(In an environment with `pip install 'kclrun[local]' pytest`; from a checkout of kclrun, write the
path of its `bin/kclrun`, and `bin/test` installs pytest beside it.)

`processors/hello.py` is the code, `app.yaml` the configuration. For a stream of yours, remove
`embedded:` and `aws.endpoint` from `app.yaml` and set `stream` and `aws.region`.
"""

# So that `processors` and its test find each other, whatever folder pytest is started in.
_CONFTEST: Final = '"""Its place tells pytest that this folder is the root of the imports."""\n'


def starter_files() -> Mapping[str, str]:
    """The text of each file, by its path inside the project."""
    return {
        "app.yaml": (_PACKAGE_ROOT / "cli" / "starter_app.yaml").read_text(encoding="utf-8"),
        "conftest.py": _CONFTEST,
        "processors/__init__.py": _PROCESSORS,
        "processors/hello.py": (_PACKAGE_ROOT.parent / "processors" / "hello.py").read_text(
            encoding="utf-8"
        ),
        "tests/test_hello.py": _TEST,
        "README.md": _README,
    }
