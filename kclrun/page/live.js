// Keeps the page up to date: the server sends an event when it has read something new. Then the same
// page is loaded again, and the elements that differ are changed. Focus, open details and a form that
// is being filled in stay.
"use strict";
(() => {
  // Elements with one key are the same while their content changes: a row by its head, a heading by
  // its text.
  function keyOf(node) {
    if (node.nodeType !== Node.ELEMENT_NODE) return node.nodeName;
    const named = node.nodeName === "TR" ? node.querySelector("th") : node;
    const words = /^(TR|H\d)$/.test(node.nodeName) && named ? named.textContent : "";
    return [node.nodeName, node.id, node.className, words].join("|");
  }

  function change(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    if (old.nodeName === "FORM" && old.contains(document.activeElement)) return;
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    for (const { name, value } of [...fresh.attributes]) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const left = new Map();
    for (const child of old.childNodes) {
      const key = keyOf(child);
      left.has(key) ? left.get(key).push(child) : left.set(key, [child]);
    }
    let place = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const same = left.get(keyOf(child))?.shift();
      if (same) change(same, child);
      const next = same ?? child;
      if (next === place) place = place.nextSibling;
      else old.insertBefore(next, place);
    }
    for (const children of left.values()) children.forEach((child) => child.remove());
  }

  let isLoading = false;

  async function update() {
    if (isLoading || document.hidden) return;
    isLoading = true;
    try {
      const answer = await fetch(location.href, { cache: "no-store", credentials: "omit" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = document.querySelector("main");
      const news = fresh.querySelector("main").dataset.news;
      // Read aloud only if the state of the fleet has changed, not at every change of a number.
      if (news !== main.dataset.news) document.querySelector("#news").textContent = news;
      const focused = document.activeElement;
      change(main, fresh.querySelector("main"));
      // An element loses the focus when it is moved.
      if (focused !== document.activeElement && focused.isConnected) {
        focused.focus({ preventScroll: true });
      }
    } catch {
      // The server is away for a moment: the next event loads it.
    } finally {
      isLoading = false;
    }
  }

  // A browser connects again after a lost connection. It does not after an answer other than 200: a
  // proxy gives one while the server starts, and the server while too many pages listen.
  const AGAIN_MS = 30000;

  function listen() {
    const events = new EventSource("/live");
    events.addEventListener("changed", update);
    events.addEventListener("error", () => {
      if (events.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN_MS);
    });
  }

  listen();
  document.addEventListener("visibilitychange", update);
})();
