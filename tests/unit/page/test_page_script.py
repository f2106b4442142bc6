"""The script of the pages, run by Node.js with a browser that the test plays."""

import shutil

import pytest

from kclrun.page import server
from tests.support.programs import run_to_end

BROWSER = """
const log = [];
globalThis.document = { hidden: false, addEventListener() {} };
globalThis.location = { href: "http://127.0.0.1:8080/" };
globalThis.setTimeout = (action, ms) => log.push({ ms, action });
globalThis.fetch = async () => { log.push("fetch"); return { ok: false }; };
class EventSource {
  static CLOSED = 2;
  static made = [];
  constructor(path) { this.path = path; this.listeners = {}; EventSource.made.push(this); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
}
globalThis.EventSource = EventSource;
"""
STEPS = """
const [first] = EventSource.made;
first.readyState = 0;  // the browser connects again
first.listeners.error();
const isLeftToTheBrowser = log.length === 0;
first.readyState = EventSource.CLOSED;  // an answer other than 200
first.listeners.error();
const { ms, action } = log.pop();
action();
const second = EventSource.made[1];
second.listeners.changed();
console.log(JSON.stringify([isLeftToTheBrowser, ms, second.path, log]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_page_whose_events_were_refused_listens_again():
    script = server.routes(None, lambda: None)["/live.js"]({}).body.decode()

    done = run_to_end(["node", "-"], input=BROWSER + script + STEPS, check=True)

    assert done.stdout == '[true,30000,"/live",["fetch"]]\n'
