// Keeps the page up to date: asks the server for its state, and where that has changed, for the page; then puts the new
// words and data in place, so that scrolling and choices stay.
(() => {
  "use strict";
  const EVERY = 2000;
  const names = (page, attribute) => [...page.querySelectorAll(`[${attribute}]`)].map((e) => e.getAttribute(attribute)).join(" ");
  const note = document.createElement("p");
  note.className = "live";
  note.setAttribute("role", "status");
  document.body.prepend(note);

  function say(text, lost = false) {
    note.textContent = text;
    note.classList.toggle("lost", lost);
  }

  async function update() {
    const answer = await fetch("/", {cache: "no-store"});
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const [mine, theirs] = [document, fresh].map((page) => page.getElementById("report-data"));
    // Other charts, parts or runs than before: the page is loaded again. So is that of a study, which has no marked parts.
    const same = ["data-chart", "data-live"].every((attribute) => names(document, attribute) === names(fresh, attribute));
    if (!mine || !theirs || !same || !fresh.querySelector("main [data-live]")) {
      location.reload();
      return;
    }
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const old = document.querySelector(`[data-live="${part.dataset.live}"]`);
      const open = [...old.querySelectorAll("details")].map((details) => details.open);
      old.replaceChildren(...part.childNodes);
      old.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
    }
    mine.textContent = theirs.textContent;
    document.body.dataset.state = fresh.body.dataset.state;
    document.title = fresh.title;
    document.dispatchEvent(new Event("fresh"));
  }

  async function ask() {
    try {
      const {state, over} = await (await fetch("/state.json", {cache: "no-store"})).json();
      if (state !== document.body.dataset.state) await update();
      say(over ? "The run is done." : `This page is live; it was up to date at ${new Date().toLocaleTimeString()}.`);
      if (over && state === document.body.dataset.state) return;
    } catch {
      say("The server of this page has stopped; the run may continue. The page shows the last state that it received.", true);
    }
    setTimeout(ask, EVERY);
  }

  say("This page is live.");
  setTimeout(ask, EVERY);
})();
