"""The `emit` calls of a processor's source, the outputs that they name, and its uses of the state.

The source is read and nothing of it runs: the processor's class, its bases, and those functions and
classes of their modules that they use by name. It finds calls of `emit` on a context, which is an
argument of the runtime's, or is named or annotated as one. It must not know the settings.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.output import MAIN_OUTPUT, no_output

# The usual names of a context, as in `self.context` and `ctx`.
_CONTEXT: Final = re.compile(r"context|ctx", re.IGNORECASE)
_CONTEXTS: Final = frozenset({"context", "_context", "ctx", "_ctx"})
# What of a context needs `state` in the settings.
_OF_STATE: Final = frozenset({"state", "counter", "table", "set_timer"})
# Of every processor that has them, these are called once there are records.
_CALLED: Final = frozenset({"initialize", "process_records", "process_record"})
_LEAVES: Final = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_TYPES: Final = frozenset({"Context", "RecordContext"})
# Which argument of a method is a context, `self` counted.
_ARGUMENTS: Final = {"initialize": 1, "process_record": 2}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class EmitCall(msgspec.Struct, frozen=True):
    """A call in user code. `to` is the output that it names; None if the source does not say."""

    file: str
    line: int
    to: str | None

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def emit_calls(processor: type) -> list[EmitCall]:
    """Every call that is found, in the order of files and lines. A class whose source is not there
    has none."""
    found: set[tuple[str, int, str | None]] = set()
    for file, tree, classes in _sources(processor):
        found |= {(file, line, to) for line, to in _calls_of(tree, classes)}
    return [EmitCall(*call) for call in sorted(found, key=lambda call: (call[0], call[1]))]


def state_uses(processor: type) -> list[str]:
    """Where the methods that kclrun calls use the state of a context, or its timers, whatever their
    options and records are: as file and line. Left out are uses behind a condition, after a way out
    of the method, within a `try`, and in other functions: they may be for other settings."""
    found: set[tuple[str, int]] = set()
    for file, tree, classes in _sources(processor):
        names = _names_of_contexts(_used(tree, classes))
        own = {name.partition(".")[0] for name in classes}
        methods = [
            method
            for kind in tree.body
            if isinstance(kind, ast.ClassDef) and kind.name in own
            for method in kind.body
            if isinstance(method, _Function) and method.name in _CALLED
        ]
        for node in (node for method in methods for node in _unconditional(method.body)):
            if not isinstance(node, ast.Attribute) or node.attr not in _OF_STATE:
                continue
            of = _dotted(node.value)
            if of in names or of.rpartition(".")[2] in _CONTEXTS:
                found.add((file, node.lineno))
    return [f"{file}:{line}" for file, line in sorted(found)]


def refuse_state_uses(places: Collection[str]) -> None:
    """For settings without `state`: the first such use would halt a shard, perhaps days after the
    start. Raises: SettingsError with the file and line of each."""
    if places:
        raise SettingsError(
            f"{', '.join(places)}: context.state needs a place that survives this machine: set"
            " state.store to a folder or to s3://bucket/prefix"
        )


def refuse_unknown_outputs(calls: Collection[EmitCall], known: Collection[str]) -> None:
    """Refuse calls whose rows would have no place: their first row would halt a shard, perhaps days
    after the start. `known` are the outputs of the settings.

    Raises: SettingsError with the file and line of each.
    """
    words: dict[str, list[str]] = {}
    for call in calls:
        # A name that only the run would say may be of a call that is never reached.
        if call.to is not None and call.to not in known:
            words.setdefault(no_output(call.to, known), []).append(call.where)
    if words:
        raise SettingsError(
            "\n".join(f"{', '.join(places)}: {why}" for why, places in words.items())
        )


class _Source(NamedTuple):
    """A module of the processor's class and its bases, and those of them that it has."""

    file: str
    tree: ast.Module
    classes: list[str]


def _sources(processor: type) -> Iterator[_Source]:
    by_module: dict[str, list[str]] = {}
    for kind in processor.__mro__:
        # `Generic` is a base of each processor, and its module has 3,500 lines.
        if kind.__module__.partition(".")[0] not in {"kclrun", "builtins", "abc", "typing"}:
            by_module.setdefault(kind.__module__, []).append(kind.__qualname__)
    for name, classes in by_module.items():
        module = sys.modules.get(name)
        try:
            tree = ast.parse(inspect.getsource(module)) if module is not None else None
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        if tree is not None:
            yield _Source(getattr(module, "__file__", None) or name, tree, classes)


def _unconditional(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a block that run whenever it does, but for loops: their bodies count, too."""
    for statement in statements:
        match statement:
            case ast.For() | ast.AsyncFor() | ast.While() | ast.With() | ast.AsyncWith():
                yield from _expressions(statement)
                yield from _unconditional(statement.body)
            case ast.If() | ast.Try() | ast.TryStar() | ast.Match() | ast.FunctionDef():
                pass
            case _:
                yield from _expressions(statement)
        if any(isinstance(node, _LEAVES) for node in ast.walk(statement)):
            return  # what follows depends on a condition


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a node that are always evaluated."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.IfExp | ast.BoolOp | ast.Lambda):
            yield child
            yield from _expressions(child)


def _calls_of(tree: ast.Module, classes: Collection[str]) -> Iterator[tuple[int, str | None]]:
    used = _used(tree, classes)
    names = _names_of_contexts(used)
    emits = {
        name
        for name, value in _assignments(used)
        if isinstance(value, ast.Attribute) and value.attr == "emit"
        if _is_context(value.value, names)
    }
    for node in _walked(used):
        if isinstance(node, ast.Call) and _is_emit(node.func, names, emits):
            yield node.lineno, _named(node)


def _used(tree: ast.Module, classes: Collection[str]) -> list[ast.stmt]:
    """The classes, and the functions and classes of the module that they use, and so on: another
    processor of the module may be for other settings."""
    tops = {node.name: node for node in tree.body if isinstance(node, _Function | ast.ClassDef)}
    waiting = [name.partition(".")[0] for name in classes]
    used: dict[str, ast.stmt] = {}
    while waiting:
        name = waiting.pop()
        node = tops.get(name)
        if node is None or name in used:
            continue
        used[name] = node
        waiting += [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    return list(used.values())


def _walked(nodes: Collection[ast.stmt]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


def _names_of_contexts(nodes: Collection[ast.stmt]) -> set[str]:
    """The names, as `self.c`, that hold a context without being named so."""
    names: set[str] = set()
    for node in _walked(nodes):
        if isinstance(node, _Function):
            arguments = [*node.args.posonlyargs, *node.args.args]
            at = _ARGUMENTS.get(node.name)
            if at is not None and at < len(arguments):
                names.add(arguments[at].arg)
            names |= {argument.arg for argument in arguments if _is_annotated(argument)}
    names |= {name for name, value in _assignments(nodes) if _is_context(value, names)}
    return names


def _is_annotated(argument: ast.arg) -> bool:
    said = argument.annotation
    text = said.value if isinstance(said, ast.Constant) else said and _dotted(said)
    return isinstance(text, str) and text.rpartition(".")[2] in _TYPES


def _assignments(nodes: Collection[ast.stmt]) -> list[tuple[str, ast.expr]]:
    """The name of each assignment, and its value; `a, b = c, d` as two."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in _walked(nodes):
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            pairs.append((node.target, node.value))
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(target.elts, node.value.elts, strict=False)
            else:
                pairs.append((target, node.value))
    return [(name, value) for target, value in pairs if (name := _dotted(target))]


def _dotted(node: ast.expr) -> str:
    """`self.context` as a text; empty for any other expression than names and their attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _is_context(node: ast.expr, names: Collection[str]) -> bool:
    last = node.attr if isinstance(node, ast.Attribute) else _dotted(node)
    return bool(_CONTEXT.search(last)) or _dotted(node) in names


def _is_emit(function: ast.expr, names: Collection[str], emits: Collection[str]) -> bool:
    if isinstance(function, ast.Attribute) and function.attr == "emit":
        return _is_context(function.value, names) or _dotted(function) in emits
    return _dotted(function) in emits


def _named(call: ast.Call) -> str | None:
    """The output that a call names; None if only its run would say."""
    if any(isinstance(given, ast.Starred) for given in call.args):
        return None
    said = call.args[1] if len(call.args) > 1 else None
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        if keyword.arg == "to":
            said = keyword.value
    if said is None:
        return MAIN_OUTPUT
    return said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else None
