"""The Terraform module: the same parameters and outputs as the template that it uses."""

import re

import pytest

from tests.deploy.templates import TEMPLATE, read_template

hcl2 = pytest.importorskip("hcl2")

MODULE = TEMPLATE.parent / "terraform"
# Of the module itself.
OWN = {"name", "tags"}
# "The maximum length of template_body."
TEMPLATE_BYTES_MAX = 51_200


def plain(value):
    """Without the quotes that stand in the file."""
    if isinstance(value, dict):
        return {plain(name): plain(each) for name, each in value.items() if name != "__is_block__"}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.strip('"') if isinstance(value, str) else value


def blocks(kind, file):
    found = plain(hcl2.loads((MODULE / file).read_text()))[kind]
    return {name: body for each in found for name, body in each.items()}


@pytest.fixture(scope="module")
def template():
    return read_template(TEMPLATE)


@pytest.fixture(scope="module")
def stack():
    return blocks("resource", "main.tf")["aws_cloudformation_stack"]["fleet"]


def named(parameter):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", parameter).lower()


def test_each_parameter_of_the_template_is_a_variable_with_its_type_and_default(template):
    variables = blocks("variable", "variables.tf")
    parameters = {named(name): one for name, one in template["Parameters"].items()}

    assert variables.keys() - OWN == parameters.keys()
    for name, one in parameters.items():
        kind = {"Number": "number", "List<AWS::EC2::Subnet::Id>": "list(string)"}
        assert variables[name]["type"].strip("${}") == kind.get(one["Type"], "string"), name
        assert variables[name].get("default") == one.get("Default"), name
        assert variables[name]["description"]


def test_every_variable_reaches_the_stack(template, stack):
    for name in template["Parameters"]:
        assert f"var.{named(name)}" in stack["parameters"][name]
    assert stack["parameters"].keys() == template["Parameters"].keys()


def test_it_makes_the_template_itself_with_the_right_to_make_its_role(stack):
    assert stack["capabilities"] == ["CAPABILITY_IAM"]
    assert "${path.module}/../cloudformation.yaml" in stack["template_body"]
    assert (MODULE / ".." / "cloudformation.yaml").resolve() == TEMPLATE
    assert TEMPLATE.stat().st_size <= TEMPLATE_BYTES_MAX


def test_each_output_is_one_of_the_stack(template):
    outputs = blocks("output", "main.tf")
    given = {
        name: re.search(r'outputs\[\\?"(\w+)', one["value"])[1] for name, one in outputs.items()
    }

    assert given == {named(name): name for name in template["Outputs"]}
