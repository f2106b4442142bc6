import pytest

from kclrun.config.yaml_reader import Expanded, dotted, expand
from kclrun.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("${A}", "1"),
        ("x-${A}-${B:-two}", "x-1-two"),
        ("${A:-d}", "1"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY}", ""),
        ("${B:-}", ""),
        ("${B:-a:-b}", "a:-b"),
        ("$${A}", "${A}"),
        ("$A", "$A"),
    ],
)
def test_variables_are_replaced(text: str, expanded: str) -> None:
    assert expand({"k": [text]}, {"A": "1", "EMPTY": ""}) == {"k": [expanded]}


def test_a_missing_variable_is_named_with_its_path() -> None:
    with pytest.raises(SettingsError) as caught:
        expand({"aws": {"region": "${REGION}"}}, {})

    assert str(caught.value).startswith("aws.region: the environment variable REGION is not set")
    assert "${REGION:-default}" in str(caught.value)


@pytest.mark.parametrize("text", ["${}", "${1A}", "${A-b}", "${A:b}"])
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is no variable"):
        expand({"k": text}, {"A": "1"})


def test_a_value_from_the_environment_is_not_expanded_again() -> None:
    assert expand("${A}", {"A": "${B}", "B": "no"}) == "${B}"


def test_what_was_expanded_remembers_what_the_file_said() -> None:
    expanded = expand("${A}", {"A": "hidden"})

    assert isinstance(expanded, Expanded)
    assert expanded.source == "${A}"


def test_a_path_is_written_as_a_person_would() -> None:
    assert dotted(("embedded", "reshard", 0, "after")) == "embedded.reshard[0].after"
    assert dotted(()) == "the file"
