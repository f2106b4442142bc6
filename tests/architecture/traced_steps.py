"""Steps of the two cores that are traced: prepared up to the first `yield`, then taken."""

from kclrun.lease import events
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import Driver, p
from tests.unit.leases.manager_life import ManagerLife, row


def _claim():
    driver = Driver()
    yield
    driver.happen(events.Started())


def _batch():
    driver = Driver().begin()
    driver.happen(events.BatchDelivered(p(20), 1, 100))
    yield
    driver.life.handle(events.BatchProcessed(p(20)), driver.now)


def _checkpoint():
    driver = Driver(every_s=1.0).begin()
    driver.batch(20)
    yield
    driver.tick(1.0)  # within the fence
    assert driver.life.ledger.checkpointed == p(20)


def _scan():
    life = ManagerLife(row("s0"))
    yield
    life.scan()


def _take():
    life = ManagerLife(row("s0"))
    if not life.writes(changes.Take):
        life.scan()
    take = life.writes(changes.Take)[0]
    yield
    life.apply(take)


STEPS = {
    "core 2, a lease is claimed and initialized": _claim,
    "core 2, a batch was processed": _batch,
    "core 2, a checkpoint until it is durable": _checkpoint,
    "core 1, a scan leads to a take": _scan,
    "core 1, the take applied and the process starts": _take,
}
