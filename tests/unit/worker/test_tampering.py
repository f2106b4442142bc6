"""User code that damages the process it shares with kclrun is named as the cause."""

import errno
import os
import time

import pytest

from kclrun.ipc.messages import decode_report
from kclrun.protocol.reports import ProcessBroke
from kclrun.worker import tampering
from kclrun.worker.main import _broke


class Ring:
    def __init__(self):
        self.reports = []

    def put(self, payload):
        self.reports.append(decode_report(payload))


class Doorbell:
    def press(self):
        pass


def words_of(error):
    ring = Ring()
    _broke(error, ring, Doorbell())
    (report,) = ring.reports
    assert isinstance(report, ProcessBroke)
    return report.reason


def test_descriptors_that_were_closed_are_not_a_bug_in_kclrun():
    words = words_of(OSError(errno.EBADF, os.strerror(errno.EBADF)))

    assert "a descriptor that kclrun uses was closed in this process: user code" in words
    assert "bug" not in words


@pytest.mark.parametrize(("module", "name"), [(os, "write"), (os, "getpid"), (time, "monotonic")])
def test_functions_that_were_replaced_are_named(monkeypatch, module, name):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, None)
        changed = tampering.replaced()
    assert changed == (f"{module.__name__}.{name}",)

    with monkeypatch.context() as patch:
        patch.setattr(tampering, "replaced", lambda: changed)
        words = words_of(TypeError("'NoneType' object is not callable"))
    assert f"user code replaced {module.__name__}.{name} in this process" in words
    assert "bug" not in words


def test_a_function_that_was_removed_counts_and_many_are_counted(monkeypatch):
    monkeypatch.setattr(tampering, "replaced", lambda: tuple(f"os.f{n}" for n in range(9)))

    assert "os.f0, os.f1, os.f2, os.f3, os.f4 and 4 more" in words_of(AttributeError("x"))


def test_an_error_that_user_code_does_not_explain_is_a_bug_in_kclrun():
    assert tampering.replaced() == ()
    assert words_of(KeyError("x")) == "a bug in kclrun: KeyError: 'x'"
