"""`kclrun migrate kclpy app.properties`: the script is found, the file written and accepted."""

import pytest

from kclrun.cli.program import run_program

SCRIPT = """
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor


class Consumer(processor.RecordProcessorBase):
    pass


if __name__ == "__main__":
    kcl.KCLProcess(Consumer()).run()
"""
PROPERTIES = """
executableName = {executable}
streamName = orders
applicationName = orders-app
initialPositionInStream = TRIM_HORIZON
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def checked(config):
    return run_program(["check", "--no-environment", "--config", str(config)])


@pytest.mark.parametrize(
    ("script", "executable", "path"),
    [
        ("consumer.py", "consumer.py", None),
        ("consumer.py", "python3.11 -u consumer.py --table orders", None),
        ("consumer.py", "/usr/bin/env python ./consumer.py", None),
        ("src/etl/consumer.py", "src/etl/consumer.py", "src/etl"),
    ],
)
@pytest.mark.usefixtures("user_code_here")
def test_a_script_is_found_and_the_file_is_accepted(folder, capsys, script, executable, path):
    write(folder / script, SCRIPT)
    write(folder / "app.properties", PROPERTIES.format(executable=executable))

    assert run_program(["migrate", "kclpy", "app.properties"]) == 0

    assert "kclrun check --config app.yaml" in capsys.readouterr().out
    text = (folder / "app.yaml").read_text()
    assert "processor: kclpy:consumer.py" in text
    assert ("\npath: " in text) == (path is not None)
    assert checked(folder / "app.yaml") == 0


def test_it_is_written_where_one_says_and_finds_the_script_from_there(folder):
    write(folder / "old" / "consumer.py", SCRIPT)
    write(folder / "old" / "app.properties", PROPERTIES.format(executable="consumer.py"))

    assert run_program(["migrate", "kclpy", "old/app.properties", "new"]) == 0

    assert f"path: {folder / 'old'}" in (folder / "new" / "app.yaml").read_text()
    assert checked(folder / "new" / "app.yaml") == 0


def test_a_comment_need_not_be_utf_8(folder):
    """Java reads properties as Latin-1."""
    write(folder / "app.properties", PROPERTIES.format(executable="consumer.py"))
    text = (folder / "app.properties").read_bytes()
    (folder / "app.properties").write_bytes(b"# Gr\xf6\xdfe\n" + text)

    assert run_program(["migrate", "kclpy", "app.properties"]) == 0


def test_a_script_on_the_path_is_found_there(folder, monkeypatch):
    write(folder / "bin" / "consumer.py", SCRIPT)
    (folder / "bin" / "consumer.py").chmod(0o700)
    write(folder / "etc" / "app.properties", PROPERTIES.format(executable="consumer.py"))
    monkeypatch.setenv("PATH", str(folder / "bin"))

    assert run_program(["migrate", "kclpy", "etc/app.properties"]) == 0

    assert f"path: {folder / 'bin'}" in (folder / "etc" / "app.yaml").read_text()


@pytest.mark.parametrize(
    ("executable", "said"),
    [
        ("gone.py", "Not found beside the properties"),
        ("run.sh", "executableName (run.sh) is not named like a .py script."),
        ("python -m consumer", "executableName (python -m consumer) runs a module."),
        ("", "executableName names no script."),
    ],
)
def test_a_script_that_is_not_there_is_asked_for_in_the_file(folder, executable, said):
    write(folder / "app.properties", PROPERTIES.format(executable=executable))

    assert run_program(["migrate", "kclpy", "app.properties"]) == 0

    assert said in (folder / "app.yaml").read_text()
    assert checked(folder / "app.yaml") == 78


def test_nothing_is_written_over(folder, capsys):
    write(folder / "app.properties", PROPERTIES.format(executable="consumer.py"))
    write(folder / "app.yaml", "mine")

    assert run_program(["migrate", "kclpy", "app.properties"]) == 78

    assert (folder / "app.yaml").read_text() == "mine"
    assert "is there already" in capsys.readouterr().err


def test_properties_that_mean_nothing_write_nothing(folder, capsys):
    write(folder / "app.properties", "executableName = consumer.py\nstreamName = orders\n")

    assert run_program(["migrate", "kclpy", "app.properties"]) == 78

    assert not (folder / "app.yaml").exists()
    assert "app.properties: applicationName is missing" in capsys.readouterr().err


def test_a_folder_is_no_properties_file(folder, capsys):
    (folder / "old").mkdir()

    assert run_program(["migrate", "kclpy", "old"]) == 78

    assert "in it:  old/app.properties" in capsys.readouterr().err


def test_it_reads_no_configuration(folder, capsys):
    assert run_program(["migrate", "kclpy", "a.properties", "--config", "f"]) == 64
    assert run_program(["migrate", "--config", "f", "kclpy", "a.properties"]) == 64
    assert capsys.readouterr().err.count("This verb reads no settings") == 2
