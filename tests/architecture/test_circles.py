"""No two modules need each other, also not by an import inside a function or for types alone."""

import ast
import graphlib

from tests.architecture.sources import our_modules


def name_of(source):
    return source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(source, modules):
    """The modules of the product that a module imports anywhere; a name of a package is the
    package's own module."""
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(package), names=names):
                for alias in names:
                    module = f"{package}.{alias.name}"
                    yield module if module in modules else package


def test_modules_of_the_command_line_need_each_other_in_no_circle():
    sources = {name_of(source): source for source in our_modules()}
    rooms = {name for name in sources if name.startswith("kclrun.cli")}
    graph = {
        name: {other for other in imported(sources[name], sources) if other in rooms - {name}}
        for name in rooms
    }

    # Raises CycleError, which names the modules of the circle.
    assert set(graphlib.TopologicalSorter(graph).static_order()) == rooms
