import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.config.yaml_reader import ALIASED_NODES_MAX, read_yaml
from kclrun.errors import SettingsError
from tests.support.tables import over_rows


def test_each_key_has_its_line():
    document = read_yaml("a: 1\nb:\n  c: [x, {d: 2}]\n")

    assert document.value == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert document.lines["a",] == 1
    assert document.lines["b", "c"] == 3
    assert document.lines["b", "c", 1, "d"] == 3
    assert read_yaml("a:\n- 1\n- 2\n").lines == {(): 1, ("a",): 1, ("a", 0): 2, ("a", 1): 3}


def test_an_instant_stays_text():
    assert read_yaml("start: 2026-03-01T06:00:00Z").value == {"start": "2026-03-01T06:00:00Z"}
    assert read_yaml("a: !!timestamp 2026-03-01").value == {"a": "2026-03-01"}
    assert read_yaml("a: !!timestamp soon").value == {"a": "soon"}


def test_a_key_that_yaml_takes_for_a_switch_is_a_word():
    assert read_yaml("on: 1\noff: 2").value == {"on": 1, "off": 2}


@over_rows(
    ("text", "said"),
    [
        ("a: 1\na: 2", "line 2: 'a' appears twice \\(first on line 1\\)"),
        ("x: {b: 1, b: 2}", "line 1: 'b' appears twice"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "line 3: merge keys"),
        ("? [a]\n: 1", "line 1: a key must be a word"),
        ("a: !!python/name:os.system x", "could not determine a constructor"),
        ("a: [", "line 1: not readable"),
        ("a: *nobody", "undefined alias"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("b: 1\na: \x07", "line 2: not readable as YAML: the character U.0007"),
        ("a: !!bool maybe", "line 1: 'maybe' cannot be read as !!bool; if it is a text, put it in"),
        ("a: !!int ''", "line 1: '' cannot be read as !!int"),
        ("a: !!float ''", "line 1: '' cannot be read as !!float"),
        ("a: !!int abc", "line 1: 'abc' cannot be read as !!int"),
        ("b: 1\na: 0b_", "line 2: '0b_' cannot be read as !!int"),
        ("a: {b: ${NAME}}", "got '\\{'\nInside { } and \\[ \\] a variable needs quotes"),
        ("a: [${NAME}, 1]", "a variable needs quotes"),
        ("a: ${NAME}\nb: ]", "line 2: not readable as YAML: [^\n]*\\Z"),
    ],
)
def test_what_is_refused_names_its_line(text, said):
    with pytest.raises(SettingsError, match=said):
        read_yaml(text)


def test_a_foreign_tag_on_a_list_makes_a_plain_list():
    assert read_yaml("a: !!python/object/apply:os.system [ls]").value == {"a": ["ls"]}


def test_aliases_may_repeat_a_little():
    assert read_yaml("a: &x [1, 2]\nb: *x").value == {"a": [1, 2], "b": [1, 2]}


def test_a_billion_laughs_end_at_the_limit():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]

    with pytest.raises(SettingsError, match=f"more than {ALIASED_NODES_MAX:,} values"):
        read_yaml("\n".join(levels))


def test_aliases_may_repeat_a_thousand_values_and_no_more():
    text = f"a: &a [&x x, {', '.join('y' * 98)}]\nb: [{', '.join(['*a'] * 10)}]"

    assert len(read_yaml(text).value["b"]) == 10
    with pytest.raises(SettingsError, match="line 1: aliases repeat more than 1,000 values"):
        read_yaml(f"{text}\nc: *x")


def test_a_cycle_of_aliases_is_refused():
    with pytest.raises(SettingsError, match=r"nested deeper|aliases repeat"):
        read_yaml("a: &x [*x]")


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a: ", "}")])
def test_forty_levels_may_nest_and_no_more(opening, closing):
    def nested(depth: int) -> str:
        return opening * depth + "x" + closing * depth

    read_yaml(nested(40))
    with pytest.raises(SettingsError, match="line 2: nested deeper than 40"):
        read_yaml(f"\n{nested(41)}")
    with pytest.raises(SettingsError, match="not readable as YAML: RecursionError"):
        read_yaml(nested(600))


def test_a_text_of_a_million_bytes_is_read_and_a_longer_one_is_not_parsed():
    text = f"# {'é' * 499_999}"
    assert read_yaml(text).value is None
    with pytest.raises(SettingsError, match="longer than 1,000,000 bytes"):
        read_yaml(f"{text}#")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_our_words(text):
    with contextlib.suppress(SettingsError):
        read_yaml(text)
