import ast
from pathlib import Path

import msgspec
import pytest

from kclrun.cli.reports import json_line, print_json, print_json_lines, print_report
from tests.architecture.sources import files_of_the_package

# They print JSON of another form: one object a record, and one line of settings and figures.
OWN_FORMS = {"tail.py", "simulate.py", "reports.py"}


class Facts(msgspec.Struct):
    shard: str
    names: tuple[str, ...] = ()


def print_text(facts):
    print(f"shard {facts.shard}")


@pytest.mark.parametrize(
    ("as_json", "printed"),
    [(False, "shard 2\n"), (True, '{\n  "shard": "2",\n  "names": []\n}\n')],
)
def test_the_facts_are_printed_in_the_form_that_was_chosen(as_json, printed, capsys):
    print_report(Facts("2"), print_text, as_json=as_json)

    assert capsys.readouterr().out == printed


def test_a_verb_may_print_another_json_than_all_fields_of_its_facts(capsys):
    print_report(
        Facts("2"), print_text, as_json=True, in_json=lambda facts: print_json(facts.shard)
    )

    assert capsys.readouterr().out == '"2"\n'


def test_of_many_facts_each_is_one_line_and_foreign_characters_are_escaped(capsys):
    print_json_lines([Facts("a\n\u202e"), Facts("ö")])

    assert capsys.readouterr().out == (
        '{"shard":"a\\n\\u202e","names":[]}\n{"shard":"ö","names":[]}\n'
    )


def test_a_type_that_msgspec_does_not_know_is_encoded_by_the_hook():
    assert json_line({"at": Path("x")}, enc_hook=str) == '{"at":"x"}'


def test_no_other_module_of_the_command_line_encodes_what_it_prints():
    encoding = {
        source.name.removeprefix("kclrun/cli/")
        for source in files_of_the_package()
        if source.name.startswith("kclrun/cli/")
        for node in source.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "echo"
        and any(name in ast.unparse(node) for name in ("json.dumps", "json.encode"))
    }
    assert encoding <= OWN_FORMS
