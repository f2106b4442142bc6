"""The script that a machine of the stack runs at its first start, run.

With the machine's own folders in a mount namespace, and stand-ins for what needs a network or a
real machine.
"""

import tarfile
from pathlib import Path

import pytest

from tests.deploy.templates import Stack, read_template
from tests.support.programs import needs, run_to_end

DEPLOY = Path(__file__).parents[2] / "config" / "deploy"
NAMES = {
    "Application": "shop",
    "Bundle": "deployments/shop.tar.gz",
    "AWS::Region": "eu-west-1",
    "Stream.Arn": "arn:aws:kinesis:eu-west-1:123456789012:stream/orders",
}
# Each notes how it was called, and does what the script needs of it.
STAND_INS = {
    "dnf": "",
    "useradd": "",
    "systemctl": "",
    "python3.11": 'mkdir -p "$3/bin"; cp "$STANDS/pip" "$3/bin/pip"',
    "pip": "",
    "aws": 'cat "$BUNDLE"',
    "curl": 'case "$*" in *PUT*) echo token-1;; *token-1*) echo eu-west-1b;; *) exit 22;; esac',
}
NAMESPACE = """
mount --bind "$1/etc" /etc
mount --bind "$1/opt" /opt
exec bash -c "umask 077; exec bash" <"$1/script"
"""


class Machine:
    """A machine's folders, and what was asked of its programs."""

    def __init__(self, folder):
        self._folder = folder
        for name in ("etc", "opt", "bin"):
            (folder / name).mkdir()
        self.notes = folder / "notes"
        for name, does in STAND_INS.items():
            program = folder / "bin" / name
            program.write_text(f'#!/bin/bash\necho "{name} $*" >> "{self.notes}"\n{does}\n')
            program.chmod(0o755)

    def start(self, user_data, bundle):
        (self._folder / "script").write_text(user_data)
        stands = self._folder / "bin"
        command = ["unshare", "--mount", "--propagation=private", "bash", "-ec", NAMESPACE, "ns"]
        return run_to_end(
            [*command, self._folder],
            env={"PATH": f"{stands}:/usr/bin:/bin", "STANDS": str(stands), "BUNDLE": str(bundle)},
        )

    def calls(self, program):
        return [line for line in self.notes.read_text().splitlines() if line.startswith(program)]

    def file(self, path):
        return self._folder / path


@pytest.fixture
def machine(tmp_path):
    needs("mount", "unshare")
    tried = run_to_end(
        ["unshare", "--mount", "--propagation=private", "mount", "--bind", tmp_path, "/opt"]
    )
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.strip()}")
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine")


@pytest.fixture
def bundle(tmp_path):
    """Packed as its page has it, by somebody whose files are open to the group."""
    source = tmp_path / "bundle"
    for name in ("app/app.yaml", "app/processors/shop.py", "wheels/kclrun-1-py3-none-any.whl"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("application: shop\n")
        (source / name).chmod(0o664)
    (source / "kclrun.service").write_bytes((DEPLOY / "kclrun.service").read_bytes())
    archive = tmp_path / "shop.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source, ".")
    return archive


@pytest.fixture
def user_data():
    stack = Stack(read_template(DEPLOY / "cloudformation.yaml"), {}, NAMES)
    launch = stack.template["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    return stack.value(launch["UserData"])


def test_a_machine_installs_the_bundle_and_starts_it_in_its_zone(machine, bundle, user_data):
    done = machine.start(user_data, bundle)

    assert (done.returncode, done.stderr) == (0, "")
    unit = machine.file("etc/systemd/system/kclrun.service")
    assert unit.read_bytes() == (DEPLOY / "kclrun.service").read_bytes()
    stack = machine.file("etc/systemd/system/kclrun.service.d/stack.conf").read_text()
    assert "--set leases.group=eu-west-1b" in stack
    assert "--set application=shop" in stack
    assert machine.calls("aws")[0].endswith("--region eu-west-1 s3://deployments/shop.tar.gz -")
    assert "/opt/kclrun/wheels/kclrun-1-py3-none-any.whl" in machine.calls("pip")[0]
    assert machine.calls("pip")[0].endswith("--requirement /dev/null")
    assert machine.calls("systemctl")[-1] == "systemctl enable --now --no-block kclrun"


def test_what_is_run_can_be_read_by_all_and_written_by_root_alone(machine, bundle, user_data):
    """kclrun refuses a configuration that others may write."""
    assert machine.start(user_data, bundle).returncode == 0

    for path in ("app/app.yaml", "app/processors/shop.py", "app", "app/processors"):
        mode = machine.file("opt/kclrun").joinpath(path).stat().st_mode & 0o777
        assert mode == (0o755 if machine.file(f"opt/kclrun/{path}").is_dir() else 0o644), path


@pytest.mark.parametrize("broken", ["aws", "dnf", "curl"])
def test_what_fails_ends_the_script_before_anything_is_started(machine, bundle, user_data, broken):
    """Nobody completes the launch hook then, and the group starts another machine."""
    program = machine.file(f"bin/{broken}")
    program.write_text("#!/bin/bash\nexit 1\n")

    assert machine.start(user_data, bundle).returncode != 0
    assert not machine.notes.exists() or machine.calls("systemctl") == []
