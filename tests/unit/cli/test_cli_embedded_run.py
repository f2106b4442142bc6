"""What a run over the embedded AWS is told about its source."""

from types import SimpleNamespace

from kclrun.cli.run.embedded import EmbeddedRun
from kclrun.local.filling import Filling


def test_without_a_fill_the_source_is_complete_from_the_beginning():
    run = EmbeddedRun(None, None)

    assert run.source_is_done()
    assert run.filling() is None
    assert run.report() is None


def test_with_a_fill_the_source_is_complete_once_the_filler_has_ended():
    filler = SimpleNamespace(is_done=False, filling=Filling(3, 10), result=lambda: "put")
    run = EmbeddedRun(None, filler)

    assert not run.source_is_done()
    assert run.filling() == Filling(3, 10)
    filler.is_done = True
    assert run.source_is_done()
    assert run.report() == "put"
