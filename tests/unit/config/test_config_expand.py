import functools

import pytest

from kclrun.config import yaml_reader
from kclrun.config.load import settings_of
from kclrun.config.yaml_reader import Expanded, dotted
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

expand = functools.partial(yaml_reader.expand, secret={"PW": "p@:/%", "URL": "sqlite:///x"}.get)


@over_rows(
    ("text", "expanded"),
    [
        ("${A}", "1"),
        ("x-${A}-${B:-two}", "x-1-two"),
        ("${A:-d}", "1"),
        ("${env:A}${env:B:-d}", "1d"),
        ("${secret:URL}", "sqlite:///x"),
        ("x ${secret:PW}", "x p@:/%"),
        ("db://u:${secret:PW}@h/${A}", "db://u:p%40%3A%2F%25@h/1"),
        ("$${secret:PW}", "${secret:PW}"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY}", ""),
        ("${B:-}", ""),
        ("${B:-a:-b}", "a:-b"),
        ("$${A}", "${A}"),
        ("$A", "$A"),
    ],
)
def test_variables_are_replaced(text, expanded):
    assert expand({"k": [text]}, {"A": "1", "EMPTY": ""}) == {"k": [expanded]}


def test_a_missing_variable_is_named_with_its_path():
    with pytest.raises(SettingsError) as caught:
        expand({"aws": {"region": "${REGION}"}}, {})

    assert str(caught.value).startswith("aws.region: the environment variable REGION is not set")
    assert "${REGION:-default}" in str(caught.value)


@over_rows(
    "text", ["${}", "${1A}", "${A-b}", "${A:b}", "${secret:}", "${secret:../x}", "${secret:a/b}"]
)
def test_what_is_no_variable_is_refused(text):
    with pytest.raises(SettingsError, match="is not a variable"):
        expand({"k": text}, {"A": "1"})


def test_a_value_from_the_environment_is_not_expanded_again():
    assert expand("${A}", {"A": "${B}", "B": "no"}) == "${B}"


def test_what_was_expanded_remembers_what_the_file_said():
    expanded = expand("${A}", {"A": "hidden"})

    assert isinstance(expanded, Expanded)
    assert expanded.source == "${A}"


def test_a_path_is_written_as_a_person_would():
    assert dotted(("embedded", "reshard", 0, "after")) == "embedded.reshard[0].after"
    assert dotted(()) == "the file"


@pytest.mark.parametrize("named", ["KCLRUN_SECRETS", "CREDENTIALS_DIRECTORY"])
def test_a_secret_is_a_file_of_the_folder_and_no_message_has_it(tmp_path, named):
    def settings(value: str) -> dict[str, object]:
        text = f"application: orders\nstream: s\nprocessor: a:B\noptions: {{token: '{value}'}}\n"
        environment = {named: str(tmp_path)}
        return settings_of(text, environment=environment, now=WallTime(1_780_000_000.0)).options

    (tmp_path / "db").write_text("hidden\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "broken").write_bytes(b"\xff")
    assert settings("${secret:db}") == {"token": "hidden"}
    for name, words in (("empty", "is empty"), ("broken", "not UTF-8"), ("none", "cannot read")):
        match = rf"^options\.token: .*{words}.*\nA secret is a file of this name in the folder that"
        with pytest.raises(SettingsError, match=match):
            settings(f"${{secret:{name}}}")
