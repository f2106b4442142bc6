"""The security rules that hold today, and where each is proven.

Rule  What it says                                        Proven in
----  --------------------------------------------------  ---------
S1    least privilege: policies name what is called       unit/aws/test_aws_policies.py
      … and a real run calls nothing else                 security/test_security_real_application.py
      … and a missing permission is named                 processes/test_bad_input_services.py
S3    YAML is data: tags, twins, bombs, sizes             unit/config/test_config_yaml_reader.py
      … and in a file, through the program                security/test_security_rules.py
S4    the configuration is code: who may write it         unit/config/test_config_permissions.py
      … what `processor` may look like, and may be        security/test_security_rules.py
      … never from the current folder                     unit/cli/test_cli_bad_inputs.py
S6    no payload, key, iterator, credential is written    security/test_security_real_application.py
      … nor by a line of the log, whatever its text       unit/observe/test_observe_logs.py
      … nor by an error of the wire                       unit/aws/test_aws_wire.py
      … nor a control character to a terminal             processes/test_bad_input_refused.py
S7    hostile bytes: counted before they are parsed       unit/codec/test_kpl.py
      … any bytes give a value or a named error           properties/test_codec_kpl.py
      … bodies are bounded                                unit/codec/test_get_records.py
      … lease rows are bounded                            unit/aws/test_aws_rows.py
      … end to end, in bounded memory                     security/test_security_hostile_bytes.py
S9    a lease process gets few rights and few files       processes/test_manager_lease_processes.py
      … as seen from outside, in a real application       security/test_security_real_application.py
      … and ends with its manager                         processes/test_manager_fleet.py
S13   the folder of locks is its owner's                  security/test_security_real_application.py
      … the report is replaced whole, under no known name  unit/files/test_durable_files.py
      … rows survive a kill at any instruction            unit/outputs/test_emitted_rows_killed.py
"""

import ast
import os
import re
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kclrun.cli.program import run_program
from kclrun.config.load import load_settings, settings_of
from kclrun.config.yaml_reader import TEXT_BYTES_MAX
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.loading import load_processor
from kclrun.manager.locks import state_folder
from kclrun.model.time import WallTime
from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]
LEAST = "application: orders\nstream: orders\nprocessor: mine:Mine\n"
NOW = WallTime(1_800_000_000.0)


def read(text):
    return settings_of(text, environment={}, now=NOW)


# The index.


def test_every_rule_names_files_that_name_it_or_prove_it():
    named = re.findall(r"\s{2}(\S+\.py)$", __doc__, re.MULTILINE)

    assert len(named) == len(__doc__.strip().splitlines()) - 4
    for name in named:
        functions = [
            node.name
            for node in ast.parse((ROOT / "tests" / name).read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert functions, name


# S3: YAML is data.

BOMBS = {
    "a billion laughs": "\n".join(
        [LEAST + "options:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        + [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    ),
    "a cycle": LEAST + "options: &o {more: [*o]}",
    "a tower": LEAST + "options: " + "[" * 3_000 + "]" * 3_000,
    "twins": LEAST + "stream: others",
    "an object": LEAST + "options: {x: !!python/object/apply:os.system [id]}\nstart: !!int x",
    "a merge": LEAST + "options: &o {a: 1}\nleases:\n  <<: *o",
    "a number without end": LEAST + "stall: " + "9" * 10_000,
    "more than it may be": LEAST + "#" * (TEXT_BYTES_MAX + 1),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_yaml_can_do_beyond_data_is_refused_in_words_and_in_no_time(tmp_path, bomb):
    """S3, from the file on."""
    file = tmp_path / "app.yaml"
    file.write_text(BOMBS[bomb])
    file.chmod(0o600)
    began = time.process_time()

    with pytest.raises(SettingsError) as refused:
        load_settings(file, environment={}, now=NOW)

    # Measured: 40 ms for the tower; a bomb that went off would take minutes or all memory.
    assert time.process_time() - began < 5
    assert len(str(refused.value)) < 2_000


def test_an_override_is_read_with_the_same_limits():
    """S3: the command line may come from elsewhere, too."""
    with pytest.raises(SettingsError, match=r"aliases repeat|nested deeper"):
        settings_of(LEAST, ["options=&o [*o]"], environment={}, now=NOW)


def test_a_variable_is_no_yaml():
    """S3: what stands in the environment is a value and never structure."""
    text = LEAST + "options: {x: '${X}'}"

    settings = settings_of(text, environment={"X": "[1]\nstream: other"}, now=NOW)

    assert settings.options == {"x": "[1]\nstream: other"}
    assert settings.stream == "orders"


# S4: the configuration is code.


@pytest.mark.parametrize(
    "reference",
    [
        "mine",
        "mine:",
        ":Mine",
        "../mine:Mine",
        "/etc/mine:Mine",
        "mine:Mine.process",
        "mine:Mine()",
        "mine;import os:Mine",
        "mine:Mine\nother",
        "mine :Mine",
        ".mine:Mine",
        "mine..more:Mine",
        "__import__('os'):Mine",
    ],
)
def test_only_a_module_and_a_name_in_it_can_be_named(tmp_path, reference):
    """S4: at the configuration, and again where it is imported."""
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    with pytest.raises(SettingsError, match="processor: expected"):
        read(LEAST.replace("mine:Mine", msgspec.json.encode(reference).decode()))
    with pytest.raises(ProcessorLoadError, match="expected module:name"):
        load_processor(reference, [tmp_path])


@pytest.mark.parametrize("reference", ["os:system", "subprocess:Popen", "builtins:eval"])
def test_only_a_record_processor_is_a_processor(reference):
    """S4."""
    with pytest.raises(ProcessorLoadError, match="not a subclass of RecordProcessor"):
        load_processor(reference, [])


def test_a_file_that_others_can_write_is_not_run(tmp_path):
    """S4, through the program: nothing of the file is imported."""
    trace = tmp_path / "imported"
    (tmp_path / "mine.py").write_text(f"open({str(trace)!r}, 'w').close()")
    file = tmp_path / "app.yaml"
    file.write_text(LEAST)
    file.chmod(0o666)

    done = run_to_end([sys.executable, "-P", "-m", "kclrun", "--config", str(file)])

    assert done.returncode == 78
    assert "can be written by everybody (mode 0666)" in done.stderr
    assert "chmod go-w" in done.stderr
    assert not trace.exists()


def test_a_link_is_judged_by_the_file_it_leads_to(tmp_path, capsys):
    """S4: the file that is read is the file that was checked."""
    (tmp_path / "shared.yaml").write_text(LEAST)
    (tmp_path / "shared.yaml").chmod(0o666)
    (tmp_path / "app.yaml").symlink_to("shared.yaml")

    code = run_program(["check", "--no-environment", "--config", str(tmp_path / "app.yaml")])

    assert code == 78
    assert "can be written by everybody" in capsys.readouterr().err


# S13: files.


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o755, 0o700])
def test_the_folder_of_locks_is_narrowed_to_its_owner(tmp_path, mode):
    """S13: whoever can remove a lock file can make us two owners."""
    folder = tmp_path / "orders"
    folder.mkdir()
    folder.chmod(mode)

    made = state_folder("orders", {"KCLRUN_STATE_DIR": str(tmp_path)})

    assert made == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_locks_of_somebody_else_is_refused(tmp_path):
    """S13."""
    (tmp_path / "orders").mkdir()
    os.chown(tmp_path / "orders", 12345, -1)

    with pytest.raises(SettingsError, match="belongs to user 12345"):
        state_folder("orders", {"KCLRUN_STATE_DIR": str(tmp_path)})


def test_no_module_names_a_place_that_everybody_can_write():
    """S13: no predictable name in a shared folder."""
    offending = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "kclrun").rglob("*.py"))
        if re.search(r"/tmp|/dev/shm|temp", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.match(r"/(?:var/)?tmp\b|/dev/shm\b", node.value)
        )
        # Not pytest's `tmp_path_factory`: its folders are this user's alone.
        or (
            isinstance(node, ast.Attribute)
            and node.attr in {"mktemp", "gettempdir"}
            and ast.unparse(node.value) != "tmp_path_factory"
        )
    ]

    assert offending == []
