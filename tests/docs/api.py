"""The reference of the Python API, read from the signatures and docstrings of public names."""

import importlib
import inspect
import re

from kclrun import ExtendedSequenceNumber
from tests.public_names import MADE_BY_THE_RUNTIME, MODULES, OF_THE_RUNTIME, public_names

_LINE_MAX = 80
# Values whose representation is longer than their name.
_DEFAULTS = {repr(ExtendedSequenceNumber("TRIM_HORIZON")): "TRIM_HORIZON"}


def python_api():
    """A section for each public module, and in it one for each public name."""
    return "\n\n".join(_module(name, says) for name, says in MODULES.items())


def public_modules():
    """The names of each public module."""
    rows = ["| module | what it has | names |", "|---|---|---|"]
    for name, says in MODULES.items():
        names = ", ".join(f"`{public}`" for public in public_names(name))
        rows.append(f"| `{name}` | {says} | {names} |")
    return "\n".join(rows)


def _module(name, says):
    module = importlib.import_module(name)
    parts = [f"## {name}", says]
    for public in public_names(name):
        parts += _entry(name, public, getattr(module, public))
    return "\n\n".join(parts)


def _entry(module, public, entry):
    yield f"### {module}.{public}"
    if inspect.isclass(entry) and issubclass(entry, BaseException):
        yield f"Subclass of `{entry.__mro__[1].__name__}`."
    elif f"{module}.{public}" not in MADE_BY_THE_RUNTIME:
        yield f"```text\n{public}{_signature(entry)}\n```"
    yield _prose(inspect.getdoc(entry) or "")
    if inspect.isclass(entry) and not issubclass(entry, BaseException):
        for name, method in vars(entry).items():
            if f"{module}.{public}.{name}" in OF_THE_RUNTIME:
                continue
            if not name.startswith(("_", "onQuery")) and _is_documented(method):
                yield f"```text\n{name}{_signature(method)}\n```"
                yield _prose(inspect.getdoc(method))


def _is_documented(method):
    inner = method.fget if isinstance(method, property) else method
    return callable(inner) and bool(inspect.getdoc(inner))


def _signature(entry):
    """The call, as the source spells it; a property has none."""
    if isinstance(entry, property):
        return ""
    try:
        signature = inspect.signature(entry)
    except ValueError:
        return "(…)"
    parts = list(_parameters(signature))
    returned = _annotation(signature.return_annotation)
    result = f" -> {returned}" if returned and not inspect.isclass(entry) else ""
    whole = f"({', '.join(parts)}){result}"
    if len(whole) <= _LINE_MAX:
        return whole
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _parameters(signature):
    is_by_name = False
    for parameter in signature.parameters.values():
        if parameter.name == "self" or parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_by_name:
            is_by_name = True
            yield "*"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = _annotation(parameter.annotation)
        text = f"{stars}{parameter.name}" + (f": {annotation}" if annotation else "")
        if parameter.default is not parameter.empty:
            default = _DEFAULTS.get(repr(parameter.default), repr(parameter.default))
            text += f" = {default}" if annotation else f"={default}"
        yield text


def _annotation(annotation):
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"ForwardRef\('?(\w+)'?\)", r"\1", text)
    # Fields that no body may set have a type of their own at run time.
    text = "" if "OffTheWire" in text else text
    return re.sub(r"\b(?:kclrun|collections|typing|pyspark)(?:\.\w+)*\.(\w+)", r"\1", text)


def _prose(text):
    """Guaranteed, Raises and the like begin paragraphs of their own; examples are fenced."""
    text = re.sub(
        r"(?<!\n)\n(?=(?:Raises|Guaranteed|Must not|Called|Returns):)",
        r"\n\n",
        inspect.cleandoc(text),
    )
    return re.sub(r"^(>>> .*(?:\n.+)*)", r"```text\n\1\n```", text, flags=re.MULTILINE)
