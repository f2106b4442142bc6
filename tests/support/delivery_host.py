"""The lease process around a `Deliverer`, as a test needs it."""

from types import SimpleNamespace

from kclrun.worker.sharing import daemon_thread

_FOR_EVER = 10.0**12


def delivery_host(**methods):
    """A `DeliveryHost` whose methods are these; the others do nothing, and the lease stays ours."""

    def ignored(*_):
        return None

    host = SimpleNamespace(
        post=ignored,
        report=ignored,
        prepare=ignored,
        broke=ignored,
        keep_letter=ignored,
        settled=ignored,
        sent=ignored,
        fence=lambda: _FOR_EVER,
        make_thread=daemon_thread,
    )
    vars(host).update(methods)
    return host
