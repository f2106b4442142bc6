"""A class of ours takes no private name of a foreign class that it inherits from.

Such names come with any release of Python or of a library: `threading.Thread` of 3.13 sets a
`_handle`, which hid a method of the lease thread, and every lease process died at its start.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap

import pytest

import kclrun
from tests.support.programs import needs_spark

# Machinery of the language: it sets names on each class made with it, the same for all.
SET_ON_CLASSES = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
# Overridden on purpose: the base calls them. If a release does not, it works as it does by itself.
OVERRIDDEN = {"kclrun.aws.sessions.SharedTrust": {"_get_ssl_context", "_setup_ssl_cert"}}
MACHINERY = {"abc", "builtins", "enum", "msgspec", "msgspec._core", "typing", "typing_extensions"}


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def names_set_on_self(cls):
    """Private attributes that the methods of a class assign; none where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and is_private(node.attr)
    }


@functools.cache
def private_names(cls):
    on_class = {name for name in vars(cls) if is_private(name)} - SET_ON_CLASSES
    return on_class | names_set_on_self(cls)


def foreign_bases(cls):
    return [
        base
        for base in cls.__mro__[1:]
        if base.__module__ not in MACHINERY and not base.__module__.startswith("kclrun")
    ]


def classes_of_the_package():
    for module_info in pkgutil.walk_packages(kclrun.__path__, "kclrun."):
        if module_info.name.endswith("__main__") or ".amazon_kclpy" in module_info.name:
            continue  # programs, and the names of another package
        module = importlib.import_module(module_info.name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                yield cls


def taken_names(cls):
    """Each private name that a class shares with a foreign base, as `class: name of base`."""
    mine = private_names(cls) - OVERRIDDEN.get(f"{cls.__module__}.{cls.__qualname__}", set())
    return [
        f"{cls.__module__}.{cls.__qualname__}: {name} of {base.__qualname__}"
        for base in foreign_bases(cls)
        for name in sorted(mine & private_names(base))
    ]


@pytest.mark.seconds
@needs_spark
def test_a_class_takes_no_private_name_of_what_it_inherits_from():
    classes = {cls for cls in classes_of_the_package() if foreign_bases(cls)}
    found = sorted(line for cls in classes for line in taken_names(cls))

    assert len(classes) > 20
    assert not found, "\n".join(found)


def test_a_name_that_a_thread_takes_is_found():
    class Thread:
        def __init__(self):
            self._handle = None

    class LeaseThread(Thread):
        def _handle(self):
            pass

    [found] = taken_names(LeaseThread)
    assert LeaseThread.__qualname__ in found
    assert found.endswith(f": _handle of {Thread.__qualname__}")
