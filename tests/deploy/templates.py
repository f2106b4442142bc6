"""A CloudFormation template as Python values, and what its functions give in a made stack."""

import re
from pathlib import Path

import yaml

TEMPLATE = Path(__file__).parents[2] / "config" / "deploy" / "cloudformation.yaml"


class _Loader(yaml.SafeLoader):
    """YAML with the short forms of CloudFormation's functions."""


def _function(loader, suffix, node):
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    return {suffix if suffix in {"Ref", "Condition"} else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _function)


def read_template(path):
    return yaml.load(path.read_text(), Loader=_Loader)


class Stack:
    """`template` with `parameters`; `made` are the physical ids and attributes of resources.

    Knows the functions that our template uses and no other.
    """

    def __init__(self, template, parameters, made):
        self.template = template
        defaults = {
            name: str(one["Default"])
            for name, one in template["Parameters"].items()
            if "Default" in one
        }
        self._names = defaults | parameters | made

    def properties(self, logical_id):
        """A resource's properties, all functions evaluated."""
        return self.value(self.template["Resources"][logical_id]["Properties"])

    def of_type(self, kind):
        """The logical ids of a type whose condition holds."""
        return [
            name
            for name, one in self.template["Resources"].items()
            if one["Type"] == kind and self._holds(one.get("Condition"))
        ]

    def value(self, written):
        if isinstance(written, list):
            values = [self.value(each) for each in written]
            return [each for each in values if each is not _NOTHING]
        if not isinstance(written, dict):
            return written
        if len(written) == 1:
            [(name, argument)] = written.items()
            if name in {"Ref", "Condition"} or name.startswith("Fn::"):
                return self._call(name, argument)
        values = {name: self.value(each) for name, each in written.items()}
        return {name: each for name, each in values.items() if each is not _NOTHING}

    def _call(self, name, argument):
        match name:
            case "Ref" | "Fn::GetAtt":
                return _NOTHING if argument == "AWS::NoValue" else self._names[argument]
            case "Fn::Sub":
                text, own = argument if isinstance(argument, list) else (argument, {})
                names = self._names | {name: self.value(each) for name, each in own.items()}
                return re.sub(r"\$\{([\w:.]+)\}", lambda found: names[found[1]], text)
            case "Fn::Base64":
                return self.value(argument)
            case "Fn::If":
                condition, then, otherwise = argument
                return self.value(then if self._holds(condition) else otherwise)
            case "Fn::And":
                return all(map(self.value, argument))
            case "Condition":
                return self._holds(argument)
            case "Fn::Equals":
                left, right = map(self.value, argument)
                return left == right
            case "Fn::Not":
                return not self.value(argument[0])
        raise NotImplementedError(name)

    def _holds(self, condition):
        return condition is None or self.value(self.template["Conditions"][condition])


_NOTHING = object()
