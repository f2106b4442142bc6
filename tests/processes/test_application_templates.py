"""Each template of `kclrun init`, from an empty folder: the commands of its README do what it says.

So each is checked, run to its end over the embedded AWS, its rows or letters are looked at where
they are, and its own test passes.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, text

from kclrun.cli.init import starter_files, templates
from kclrun.cli.program import run_program
from tests.docs.blocks import blocks_of, is_as_shown
from tests.docs.shell import Session
from tests.docs.test_blocks import PORT, free_port
from tests.processes.cli_rig import ended
from tests.support.databases import running_postgres

README_LINES_MAX = 40


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=pytest.mark.long if name == "dead-letters" else pytest.mark.slow)
        for name in templates()
        if name != "hello"
    ],
)
def test_a_template_does_what_its_readme_shows(template, tmp_path):
    project = tmp_path / template
    assert run_program(["init", "--template", template, str(project)]) == 0
    readme = (project / "README.md").read_text()
    typed = [
        replace(block, mark="run") for block in blocks_of(readme) if block.language == "console"
    ]

    transcript = Session(typed, project, {PORT: str(free_port())}).run()

    assert any("kclrun --config" in command.text for command, _, _ in transcript)
    assert any("pytest" in command.text for command, _, _ in transcript)
    for command, code, output in transcript:
        log = (project / "run.log").read_text() if (project / "run.log").exists() else ""
        assert code == 0, f"{command.text} ended with {code}:\n{output}\n{log}"
        assert is_as_shown(command, output), f"{command.text}:\n{output}"


@pytest.mark.parametrize("template", templates())
def test_a_readme_of_a_template_is_short(template):
    assert len(starter_files(template)["README.md"].splitlines()) <= README_LINES_MAX


@pytest.mark.slow
def test_the_template_of_a_database_writes_to_the_one_that_the_environment_names(
    tmp_path, monkeypatch
):
    assert run_program(["init", "--template", "postgres", str(tmp_path)]) == 0
    monkeypatch.chdir(tmp_path)
    with running_postgres() as server:
        monkeypatch.setenv("DATABASE_URL", server.url)

        code, _, said = ended("--config", "app.yaml")

        assert code == 0, said
        with create_engine(server.url, poolclass=NullPool).connect() as database:
            seen = database.execute(text("SELECT count(*), sum(cents) FROM orders")).one()
    assert tuple(seen) == (100, 14_950)
    assert not Path("orders.db").exists()
