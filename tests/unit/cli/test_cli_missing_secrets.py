"""A verb that opens no output needs no secret of one: each verb, with settings whose variables and
secrets are missing wherever it does not look."""

import threading
from pathlib import Path

import pytest

from kclrun.cli.program import run_program
from kclrun.config.load import settings_of
from kclrun.errors import SettingsError
from kclrun.local import server
from kclrun.model.time import WallTime
from tests.unit.cli.test_cli_grammar import LEAVES, WITHOUT_SETTINGS

# A value of each kind of section that only a run uses.
OF_A_RUN = """
application: orders
stream: orders
processor: mine:Mine
options: {key: "${secret:api-key}", size: "${SIZE_OF_A_PROCESSOR}"}
outputs:
  rows: {sql: "postgresql+psycopg://me:${secret:database}@db/shop", table: rows}
  more: {sql: "${DATABASE_URL}", table: more, write: upsert, key: [id]}
aws: {region: us-east-1, endpoint: "http://127.0.0.1:9", start_timeout: 0s}
"""
# And of each other section.
ELSEWHERE = """
state: {path: "${STATE_FOLDER}"}
on_error: {then: dead-letter, dead_letter: {sqs: "${LETTERS_QUEUE}"}}
observe: {listen: "${LISTEN}", cloudwatch: {namespace: "${NAMESPACE}"}}
log: {level: "${LOG_LEVEL}"}
checkpoint: {every: "${CHECKPOINT_EVERY}"}
"""
# The verbs that run the processor, or open its outputs.
RUNNING = {"run", "check", "replay", "state rebuild", "dead-letters redrive"}
# The sections that the other verbs use, besides those of the streams and the lease table.
USING = {
    "why": "observe",
    "page": "observe, on_error",
    "reset": "state",
    "state show": "state",
    "state verify": "state",
    "state export": "state",
    "dead-letters list": "on_error",
    "dead-letters show": "on_error",
    "dead-letters drop": "on_error",
    "files verify": "output, outputs",
    "local": "output, outputs, state, embedded",
    "iam": "all names",
}
MORE = {
    "reset": "--to LATEST",
    "leases move": "1 --to x",
    "dead-letters show": "1/0",
    "pause": "--all",
    "resume": "--all",
    "leases pause": "--all",
    "leases resume": "--all",
    "top": "--once",
    "page": "--port 0",
    "iam": "--account 123456789012",
    "migrate spark": "none",
    "replay": "--from 2h --to 1h",
    "lag": "",
    "tail": "--timeout 0s",
    "put": "rows.csv",
}
LEFT_OUT = ("is not set", "cannot read the secret")
LOOKING = sorted(set(LEAVES) - WITHOUT_SETTINGS - RUNNING)


@pytest.fixture
def app(tmp_path, monkeypatch):
    """The file with what only a run needs; no variable and no secret of it is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KCLRUN_SECRETS", str(tmp_path / "secrets"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setattr(server, "run_local", lambda *_, **__: 0)
    ended = threading.Event()
    ended.set()
    monkeypatch.setattr(server, "signal_event", lambda _: ended)
    Path("rows.csv").write_text("a\n1\n")
    file = Path("app.yaml")
    file.write_text(OF_A_RUN)
    file.chmod(0o600)
    return file


def line_of(words):
    needed = ["1"] * sum(p.required for p in LEAVES[words].params)
    return [*words.split(), *(MORE[words].split() if words in MORE else needed)]


@pytest.mark.parametrize("words", LOOKING)
def test_a_verb_that_runs_nothing_needs_no_secret_of_a_run(app, words, capsys):
    run_program(line_of(words))

    reported = capsys.readouterr().err
    assert not any(said in reported for said in LEFT_OUT), reported
    assert "Traceback" not in reported, reported


@pytest.mark.parametrize("words", sorted(set(LOOKING) - set(USING)))
def test_a_verb_needs_no_variable_of_a_section_that_it_does_not_use(app, words, capsys):
    app.write_text(OF_A_RUN + ELSEWHERE)

    run_program(line_of(words))

    reported = capsys.readouterr().err
    assert not any(said in reported for said in LEFT_OUT), reported


@pytest.mark.parametrize("words", sorted(RUNNING))
def test_a_verb_that_runs_the_processor_needs_all(app, words, capsys):
    more = "--folder x" if words == "replay" else ""

    assert run_program([*line_of(words), *more.split()]) == 78
    assert "options.key: cannot read the secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "settings", "named"),
    [
        ("lag", 'aws: {region: "${REGION}"}\nstream: s', "aws.region"),
        ("tail", 'stream: "${STREAM}"', "stream"),
        ("state show", 'stream: s\nstate: {path: "${FOLDER}"}', "state.path"),
        ("dead-letters list", 'stream: s\non_error: {dead_letter: {sqs: "${Q}"}}', "on_error"),
        ("iam", 'stream: s\noutput: {s3: "s3://${BUCKET}/x"}', "output.s3"),
    ],
)
def test_a_variable_that_a_verb_uses_is_named(app, words, settings, named, capsys):
    app.write_text(f"application: orders\nprocessor: mine:Mine\n{settings}\n")

    assert run_program(line_of(words)) == 78
    reported = capsys.readouterr().err
    assert named in reported
    assert "is not set" in reported


def test_what_else_is_wrong_with_the_file_is_still_reported():
    def settings(text):
        return settings_of(text, environment={}, now=WallTime(1e9), used=("state",))

    base = "application: orders\nstream: orders\nprocessor: mine:Mine\n"
    found = settings(base + "options: {a: '${A}', b: 1}\noutput: {sql: '${DATABASE}'}\n")
    assert found.options == {"a": "${A}", "b": 1}
    assert found.output.sql == "${DATABASE}"
    for wrong, named in (
        ("options: {a: '${A}'}\nleases: {max: 0}\n", "leases.max"),
        ("outputs: {one: {sql: '${A}'}, two: {sql: nothing}}\n", "outputs.two"),
        ("outputs: {one: {sqll: '${A}'}}\nlog: {level: loud}\n", "log.level"),
    ):
        with pytest.raises(SettingsError, match=named):
            settings(base + wrong)
