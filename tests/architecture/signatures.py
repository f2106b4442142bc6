"""Public names and their signatures, read from the source by griffe: nothing is imported.

A fact is a line of the snapshot: a public name or a parameter, and what a caller may rely on.
"""

import functools
from pathlib import Path
from types import MappingProxyType

import griffe

from tests.public_names import FIXTURES, MADE_BY_THE_RUNTIME, MODULES, OF_THE_RUNTIME

# Their fields are the parameters of their constructor.
_STRUCTS = {"msgspec.Struct", "typing.NamedTuple"}
_KINDS = {
    griffe.ParameterKind.positional_only: "position only",
    griffe.ParameterKind.positional_or_keyword: "position or name",
    griffe.ParameterKind.keyword_only: "name only",
    griffe.ParameterKind.var_positional: "any further",
    griffe.ParameterKind.var_keyword: "any further by name",
}


class Tree:
    """The modules of the package under `root`, each parsed at its first use. `planted` has texts
    that stand for those of files, by their path under `root`."""

    def __init__(self, root, planted):
        self._root = Path(root)
        self._planted = planted
        self._modules = griffe.ModulesCollection()
        self._lines = griffe.LinesCollection()

    def module(self, path):
        """A module by its dotted path; None if the package has none of this path."""
        return self._loaded(path)

    @functools.cache  # noqa: B019 - a tree lives as long as its test
    def _loaded(self, path):
        place = self._root.joinpath(*path.split("."))
        homes = (place / "__init__.py", place.with_suffix(".py"))
        file = next((home for home in homes if home.is_file()), None)
        if file is None:
            return None
        parent_path, _, name = path.rpartition(".")
        parent = self._loaded(parent_path) if parent_path else None
        module = griffe.visit(
            name or path,
            filepath=file,
            code=self._planted.get(str(file.relative_to(self._root))) or file.read_text(),
            parent=parent,
            modules_collection=self._modules,
            lines_collection=self._lines,
        )
        if parent is None:
            self._modules.set_member(path, module)
        else:
            parent.set_member(name, module)
        return module

    def found(self, path):
        """The object with this dotted path, imports followed; None if it is not of the package."""
        owner, _, name = path.rpartition(".")
        module = self._loaded(owner) if owner else None
        if module is None:
            return self._loaded(path)
        entry = module.members.get(name)
        if entry is None:
            return self._loaded(path)
        return self.found(entry.target_path) if entry.is_alias else entry


# What every class has or may have, and what is of no interest to a caller.
_OF_EVERY_OBJECT = {
    "__all__", "__doc__", "__eq__", "__hash__", "__init__", "__module__", "__post_init__",
    "__reduce__", "__repr__", "__slots__",
}  # fmt: skip


class PublicNames:
    """The public names of the package under `root`.

    `facts` has a line for each name and parameter. `strangers` are the classes of the package that
    a public signature names and that are not public themselves, with the place: a caller gets one,
    or has to pass one, and cannot import it.
    """

    def __init__(self, root, planted=MappingProxyType({})):
        self._tree = tree = Tree(root, planted)
        self.facts = {}
        self.strangers = {}
        self._types = {}
        entries = {
            f"{module}.{name}": tree.found(f"{module}.{name}")
            for module in MODULES
            for name in sorted(map(str, tree.module(module).exports))
        }
        self._public = {entry.canonical_path for entry in entries.values() if entry is not None}
        for path, entry in entries.items():
            self._note(path, entry)
        for name, function in tree.module(FIXTURES).functions.items():
            decorators = [str(decorator.value) for decorator in function.decorators]
            if any("fixture" in text for text in decorators) and not name.startswith("_"):
                self.facts[f"fixture {name}"] = str(function.returns)
        for name, value in sorted(self._types.items()):
            self.facts[f"type {name}"] = value

    def _note(self, path, entry):
        if entry.is_class:
            self._note_class(path, entry)
        elif entry.is_function:
            self._note_function(path, entry)
        else:
            what = "property" if "property" in entry.labels else "attribute"
            self.facts[path] = f"{what}: {self._annotation(path, _annotation_of(entry))}"

    def _note_class(self, path, entry):
        arguments = [str(base) for base in entry.bases]
        arguments += [f"{name}={value}" for name, value in entry.keywords.items()]
        self.facts[path] = f"class({', '.join(arguments)})"
        members = self._members(entry)
        if path not in MADE_BY_THE_RUNTIME:
            self._note_constructor(path, entry, members)
        for name, member in members.items():
            if name.startswith("_") and (name[:2] != "__" or name in _OF_EVERY_OBJECT):
                continue
            if f"{path}.{name}" not in OF_THE_RUNTIME:
                self._note(f"{path}.{name}", member)

    def _members(self, entry):
        """The members of a class, and those that it has from classes that are not public."""
        found = {}
        for base in entry.bases:
            above = self._tree.found(_path_of(base))
            if above is not None and above.canonical_path not in self._public:
                found |= self._members(above)
        return found | dict(entry.members)

    def _note_constructor(self, path, entry, members):
        if "__init__" in members:
            self._note_parameters(path, members["__init__"])
        elif self._is_struct(entry):
            kind = "name only" if entry.keywords.get("kw_only") else "position or name"
            fields = [
                (name, member)
                for name, member in members.items()
                if member.is_attribute and name[0] != "_" and "property" not in member.labels
            ]
            for number, (name, member) in enumerate(fields, 1):
                place = "" if kind == "name only" else f"{number}, "
                annotation = self._annotation(path, member.annotation)
                default = self._default(_default_of_field(member.value))
                self.facts[f"{path}({name})"] = f"{place}{kind}: {annotation}{default}"

    def _is_struct(self, entry):
        if any("dataclass" in str(decorator.value) for decorator in entry.decorators):
            return True
        for base in map(_path_of, entry.bases):
            above = self._tree.found(base)
            if base in _STRUCTS or (above is not None and self._is_struct(above)):
                return True
        return False

    def _note_function(self, path, entry):
        words = sorted(entry.labels & {"async", "classmethod", "staticmethod"})
        returns = self._annotation(path, entry.returns)
        self.facts[f"{path}()"] = " ".join([*words, f"-> {returns}"])
        self._note_parameters(path, entry)
        for number, overload in enumerate(entry.overloads or (), 1):
            self._note_overload(f"{path}() overload {number}", overload)

    def _note_overload(self, path, overload):
        parts = [
            f"{parameter.name}: {self._annotation(path, parameter.annotation)}"
            f"{self._default(parameter.default)}"
            for parameter in _parameters(overload)
        ]
        returns = self._annotation(path, overload.returns)
        self.facts[path] = f"({', '.join(parts)}) -> {returns}"

    def _note_parameters(self, path, entry):
        for number, parameter in enumerate(_parameters(entry), 1):
            unpacked = self._unpacked(parameter)
            if unpacked is not None:
                for name, field in unpacked.attributes.items():
                    annotation = self._annotation(path, field.annotation)
                    self.facts[f"{path}({name})"] = f"may be left out, name only: {annotation}"
                continue
            kind = _KINDS[parameter.kind]
            place = f"{number}, " if "position" in kind else ""
            annotation = self._annotation(path, parameter.annotation)
            default = "" if "further" in kind else self._default(parameter.default)
            self.facts[f"{path}({parameter.name})"] = f"{place}{kind}: {annotation}{default}"

    def _unpacked(self, parameter):
        """The TypedDict whose fields are the further keywords; None for another parameter."""
        annotation = parameter.annotation
        if not isinstance(annotation, griffe.ExprSubscript) or str(annotation.left) != "Unpack":
            return None
        return self._tree.found(annotation.slice.canonical_path)

    def _default(self, value):
        """A default as the source has it, or the value of the constant that it names."""
        if value is None:
            return ""
        if isinstance(value, griffe.ExprName):
            constant = self._tree.found(value.canonical_path)
            if constant is not None and constant.is_attribute and constant.value is not None:
                value = constant.value
        return f" = {value}"

    def _annotation(self, path, annotation):
        """An annotation as the source has it. A name in it that stands for a type, such as one for
        Literal["key"], has a fact of its own: its values are a part of the promise."""
        if annotation is None:
            return "?"
        for name in _names(annotation):
            found = self._tree.found(name.canonical_path)
            if found is None:
                continue
            if found.is_class and found.canonical_path not in self._public:
                self.strangers.setdefault(found.canonical_path, path)
            elif found.is_attribute and found.value is not None:
                self._note_type(path, found)
        return str(annotation)

    def _note_type(self, path, found):
        named = found.canonical_path
        if named not in self._types and "TypeVar" not in str(found.value):
            self._types[named] = str(found.value)
            self._annotation(path, found.value)


def _annotation_of(attribute):
    """That of the attribute, or of the parameter of `__init__` that it is set to."""
    if attribute.annotation is not None or not isinstance(attribute.value, griffe.ExprName):
        return attribute.annotation
    constructor = attribute.parent.members.get("__init__")
    given = {one.name: one for one in (constructor.parameters if constructor else ())}
    named = given.get(attribute.value.name)
    return None if named is None else named.annotation


def _path_of(base):
    named = base.left if isinstance(base, griffe.ExprSubscript) else base
    return getattr(named, "canonical_path", str(named))


def _default_of_field(value):
    """That of `msgspec.field` or `dataclasses.field`, or the value itself."""
    if isinstance(value, griffe.ExprCall) and str(value.function).endswith("field"):
        given = {
            argument.name: argument.value
            for argument in value.arguments
            if isinstance(argument, griffe.ExprKeyword)
        }
        return given.get("default", given.get("default_factory"))
    return value


def _parameters(entry):
    return [
        parameter
        for parameter in entry.parameters
        if parameter.name not in {"self", "cls"} and not parameter.name.startswith("_")
    ]


def _names(annotation):
    if isinstance(annotation, griffe.ExprName):
        yield annotation
    elif isinstance(annotation, griffe.Expr):
        for part in annotation.iterate(flat=True):
            if isinstance(part, griffe.ExprName):
                yield part
