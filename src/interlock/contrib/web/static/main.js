// Begins the view that the address names.

import { follow, onTick, state } from "./feed.js";
import { seen } from "./dom.js";
import { clock, many, moment } from "./format.js";

const page = document.documentElement.dataset;
const views = { now: "./now.js", lock: "./lock.js", processes: "./processes.js", audit: "./audit.js", health: "./health.js" };
const view = await import(views[page.view]);
const content = document.getElementById("content");
let begun = false;

document.getElementById("title").textContent = seen(document.getElementById("title").textContent);

follow((message) => {
  const whole = message.rows !== undefined || message.doc !== undefined; // not if nobody has answered yet
  if (!begun && whole) {
    begun = true;
    view.show(content);
  }
  if (begun) view.take(message);
});

onTick((now, live) => {
  const { head } = state;
  if (!head) return;
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  document.getElementById("foot").textContent = `${head.url}. ${live ? `The server's clock: ${clock(now)}` : `As of ${now ? moment(now) : "no time yet"}`}, shown for ${zone}. `
    + (head.names === undefined ? "" : `${many(head.names, "name")}, one look takes ${Math.round((head.cost ?? 0) * 1000)} ms of a core.`);
});
