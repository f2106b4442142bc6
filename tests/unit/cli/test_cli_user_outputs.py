"""An output of user code in `kclrun check` and at a start: it is imported and asked in a process of
its own; what is wrong with it is said with the setting, and what is away is tried again."""

import time

import pytest

from kclrun.cli import user_code
from kclrun.cli.config_options import Configuration
from kclrun.cli.destination_checks import output_checks
from kclrun.cli.services import Aws
from kclrun.cli.trial_import import Trial
from kclrun.config.load import settings_of
from kclrun.errors import ProcessorLoadError, SettingsError, Unavailable
from kclrun.model.time import WallTime

SOURCE = """
import os
import msgspec
from kclrun import HaltShard, Output, RecordProcessor

class Mine(RecordProcessor):
    def process_record(self, record, context): ...

class Options(msgspec.Struct):
    queue: str = "q"

class Rows(Output):
    options_as = Options

    def open(self, context):
        self.context = context

    def send(self, rows): ...

    def check(self):
        if self.context.options.queue == "away":
            raise OSError("no route")
        if self.context.options.queue == "wrong":
            raise HaltShard("no such queue")
        return f"{self.context.name} at {self.context.options.queue}"

class Plain: ...
"""


@pytest.fixture
def configured(tmp_path):
    (tmp_path / "own_rows.py").write_text(SOURCE)

    def made(place):
        text = (
            "application: orders\nstream: orders\nprocessor: own_rows:Mine\n"
            f"aws: {{endpoint: 'http://127.0.0.1:9'}}\noutputs: {{late: {{{place}}}}}\n"
        )
        settings = settings_of(text, environment={}, now=WallTime(time.time()))
        return Configuration(settings, tmp_path, tmp_path / "app.yaml", ())

    return made


def check_of(configuration):
    ((name, check),) = output_checks(Aws(configuration.settings), [configuration.folder])
    assert name == "outputs.late"
    return check


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("use: 'own_rows:Plain'", "outputs.late.use: own_rows:Plain is the class Plain, not a sub"),
        ("use: 'own_rows:Gone'", "outputs.late.use: .* defines no Gone"),
        (
            "use: 'own_rows:Rows', options: {qeue: a}",
            "outputs.late: options: Rows takes Options, which has no qeue; did you mean queue",
        ),
        ("use: 'own_rows:Rows', options: {queue: 3}", "outputs.late: options: .*`str`, got `int`"),
    ],
)
def test_a_class_or_an_option_that_is_wrong_ends_the_import(configured, place, words):
    with pytest.raises((ProcessorLoadError, SettingsError), match=words):
        user_code.require_user_code(configured(place))


def test_a_destination_is_said_in_the_words_of_its_class(configured):
    user_code.require_user_code(configured("use: 'own_rows:Rows'"))
    check = check_of(configured("use: 'own_rows:Rows', options: {queue: a}"))
    assert check() == "own_rows:Rows: late at a"


def test_a_destination_that_is_away_is_tried_again_and_a_wrong_one_is_not(configured):
    with pytest.raises(Unavailable, match=r"outputs.late: own_rows:Rows.check raised OSError: no"):
        check_of(configured("use: 'own_rows:Rows', options: {queue: away}"))()
    with pytest.raises(SettingsError, match=r"outputs.late: own_rows:Rows.check .*: no such"):
        check_of(configured("use: 'own_rows:Rows', options: {queue: wrong}"))()


def test_without_the_folders_of_user_code_it_is_not_asked(configured):
    assert output_checks(Aws(configured("use: 'own_rows:Rows'").settings)) == ()


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        (Trial(None, None, ""), "own_rows:Rows.check takes longer than 60 s"),
        (Trial(None, 3, ""), "its check ended with exit code 3"),
        (Trial(None, 1, "MemoryError"), "MemoryError"),
    ],
)
def test_a_check_without_an_answer_is_tried_again(configured, monkeypatch, trial, words):
    monkeypatch.setattr("kclrun.cli.user_code.try_import", lambda *_, **__: trial)
    with pytest.raises(Unavailable, match=f"outputs.late: {words}"):
        check_of(configured("use: 'own_rows:Rows'"))()
