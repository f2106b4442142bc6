"""A `shard_ended` that returns is the last checkpoint of its shard, on every host, overridden or
not, whatever `checkpoint.every` is."""

import pytest

from kclrun.compat.kclpy import adapted
from kclrun.lease.states import State
from kclrun.model.policies import ErrorPolicy
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.processor import RecordProcessor
from kclrun.spark.processors.hosting import ProcessorHost
from kclrun.testing import make_record, run_processor
from tests.contract.user_code_hosts import SHARD, Job
from tests.unit.lease.lease_driver import Driver, child

pytestmark = pytest.mark.filterwarnings("ignore:run_processor:DeprecationWarning")
RECORDS = [make_record("one", ordinal=1), make_record("two", ordinal=2)]


class Silent(RecordProcessor):
    """Does not override `shard_ended`."""

    def process_records(self, batch, checkpointer):
        """Nothing."""


class Overriding(Silent):
    def shard_ended(self, checkpointer):
        """Returns without a checkpoint."""


class Checkpointing(Silent):
    def shard_ended(self, checkpointer):
        checkpointer.checkpoint()


class Raising(Silent):
    def shard_ended(self, checkpointer):
        raise ValueError("the last file cannot be closed")


RETURNING = [Silent, Overriding, Checkpointing]


@pytest.mark.parametrize("kind", RETURNING)
@pytest.mark.parametrize("every", ["auto", "batch"])
def test_the_kit_ends_the_shard(kind, every):
    assert run_processor(kind, RECORDS, checkpoint=every).checkpoints[-1] == SHARD_END


@pytest.mark.parametrize("kind", RETURNING)
def test_the_kit_ends_the_shard_under_manual(kind):
    assert run_processor(kind, RECORDS, checkpoint="manual").checkpoints[-1] == SHARD_END


@pytest.mark.parametrize("kind", RETURNING)
def test_a_task_of_spark_ends_the_shard(kind):
    host = spark_host(kind)
    host.process(RECORDS)
    host.end_shard()

    assert host.done == SHARD_END
    assert host.report().position == str(SHARD_END)


def spark_host(kind):
    job = Job(
        application="app",
        stream="orders",
        processor="coded:Coded",
        paths=(),
        options={"kind": kind},
        batch_max=100,
        uncheckpointed_max=1000,
        on_error=ErrorPolicy(0, 0.0, "halt"),
        run="r1",
    )
    return ProcessorHost(
        job, SHARD, TRIM_HORIZON, 1, keep_letter=lambda _: None, wait=lambda _: None
    )


@pytest.mark.parametrize("every", ["auto", "batch", "manual"])
def test_a_lease_process_ends_the_shard(every):
    driver = Driver(every).begin()
    driver.batch(20)
    driver.exhaust(child("s1"))
    driver.settle()

    assert driver.state is State.ENDED
    assert driver.stored.is_ended


def test_a_shard_ended_that_raises_is_no_checkpoint():
    with pytest.raises(ValueError, match="cannot be closed"):
        run_processor(Raising, RECORDS)
    host = spark_host(Raising)
    host.process(RECORDS)
    with pytest.raises(Exception, match="cannot be closed"):
        host.end_shard()
    assert host.done != SHARD_END


class Kclpy:
    """Of amazon_kclpy, whose contract is another: its checkpoint says that the shard is done."""

    version = 3
    checkpoints = True

    def initialize(self, given):
        """Nothing."""

    process_records = lease_lost = shutdown_requested = initialize

    def shard_ended(self, given):
        if self.checkpoints:
            given.checkpointer.checkpoint()


def test_a_processor_of_amazon_kclpy_ends_its_shard_by_its_checkpoint():
    assert run_processor(adapted(Kclpy), RECORDS, checkpoint="manual").position == SHARD_END


def test_a_processor_of_amazon_kclpy_without_a_checkpoint_has_not_ended_its_shard():
    silent = type("Silent", (Kclpy,), {"checkpoints": False})
    with pytest.raises(Exception, match="without a checkpoint, which the KCL asks for"):
        run_processor(adapted(silent), RECORDS, checkpoint="manual")
