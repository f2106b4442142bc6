"""Errors as values: each survives a copy and the way out of another process."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kclrun import errors
from kclrun.testing import make_record
from tests.support.tables import over_rows

RECORD = make_record("poison", ordinal=3)
# What the constructors that take more than a text are given.
GIVEN = {
    errors.UndecodableRecord: ("not JSON", RECORD),
    errors.FailedRecords: ([RECORD], "two amounts"),
    errors.RetryLater: (2.5,),
}


def kinds(root=errors.KclrunError):
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


def made(kind):
    if issubclass(kind, errors.ServiceError):
        return kind("Scan: away", operation="Scan", code="Slow")
    return kind(*GIVEN.get(kind, ("what happened",)))


def facts(error):
    return type(error), str(error), error.args, vars(error)


@over_rows("kind", dict.fromkeys(kinds()))
def test_an_error_is_the_same_after_a_copy_and_after_a_pickle(kind):
    error = made(kind)

    assert facts(copy.copy(error)) == facts(error)
    assert facts(copy.deepcopy(error)) == facts(error)
    assert facts(pickle.loads(pickle.dumps(error))) == facts(error)


def test_each_error_of_the_module_is_exported_and_nothing_else():
    assert sorted(errors.__all__) == sorted(
        kind.__name__ for kind in dict.fromkeys(kinds()) if kind.__module__ == errors.__name__
    )


def raise_one(kind):
    raise made(kind)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_an_error_of_a_process_pool_arrives_and_the_pool_goes_on(kind):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for _ in range(2):
            error = pool.submit(raise_one, kind).exception()
            assert facts(error)[:2] == facts(made(kind))[:2]
