"""`amazon_kclpy` is nobody's name between two tests."""

import sys

import pytest

from kclrun.compat.kclpy import stand_in


def _forget():
    for name in [each for each in sys.modules if each.split(".")[0] == "amazon_kclpy"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_stands_in(monkeypatch):
    """Each test imports afresh, and leaves `sys.path` and `sys.argv` as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    _forget()
    yield
    _forget()


@pytest.fixture
def amazon_kclpy():
    """The stand-in's modules: kcl, messages, v2.processor, v3.processor."""
    assert stand_in()
    from amazon_kclpy import kcl, messages
    from amazon_kclpy.v2 import processor as v2
    from amazon_kclpy.v3 import processor as v3

    return kcl, messages, v2, v3
