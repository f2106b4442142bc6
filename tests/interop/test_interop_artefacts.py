"""What Maven says decides between a test that cannot run here and one that fails."""

import pytest

from tests.interop.rig.artefacts import NotToBeHad, maven_failure

CENTRAL = "central (https://repo.maven.apache.org/maven2)"


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        (f"[ERROR] Could not transfer artifact a:b:pom:1 from/to {CENTRAL}: refused", NotToBeHad),
        (
            f"\x1b[0m[ERROR] No plugin found for prefix 'dependency' in [{CENTRAL}]\n[ERROR] \n",
            NotToBeHad,
        ),
        (f"[ERROR] Cannot access {CENTRAL} in offline mode and the artifact is not", NotToBeHad),
        ("[ERROR] Fatal error compiling: error: invalid target release: 17", NotToBeHad),
        (
            "[ERROR] COMPILATION ERROR :\n[ERROR] LedgerConsumer.java:[9,1] ';' expected",
            RuntimeError,
        ),
        (f"[ERROR] Could not find artifact a:b:jar:9 in {CENTRAL}", RuntimeError),
    ],
    ids=["transfer", "plugin", "offline", "old-jdk", "source", "version"],
)
def test_what_cannot_be_fetched_is_not_what_is_wrong(printed, kind):
    failure = maven_failure(printed + "\n[ERROR] For more information read the articles" * 9)

    assert type(failure) is kind
    assert "\x1b" not in str(failure)
    assert str(failure).count("\n") == 0 or kind is RuntimeError
