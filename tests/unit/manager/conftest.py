import pytest

from tests.unit.manager.manager_rig import ManagerRig


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**how):
        made.append(ManagerRig(tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()
