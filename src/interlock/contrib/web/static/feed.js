// The news of one topic: by server-sent events, or by asking again and again. It knows how old the picture is.
//
// Rule. A picture counts as live only while news arrives and the server of the locks answers. Else every age stands
// still, and the page says since when.

import { h, put, seen } from "./dom.js";
import { span } from "./format.js";

const page = document.documentElement.dataset;
const POLL = 1500; // ms between two questions
const SILENCE = 6; // seconds without a message after which the connection counts as lost
const CLOCKS = 5; // seconds between this device's clock and the page's that are worth a line

export const state = { now: 0, live: false, head: null };
const tickers = new Set();

let last = 0; // when the last message arrived, by performance.now()
let base = 0; // the server's clock at that moment
let broken = false; // whether the page's process refuses, or does not answer
let failed = false; // whether a script of this page has: then nobody knows what the picture lacks
let version = "";

/** Call `on` with each message of this topic. */
export function follow(on) {
  const take = (message) => {
    version = message.v;
    last = performance.now();
    broken = false;
    const ahead = message.ahead ?? state.head?.ahead ?? 0;
    base = message.error ? base || message.live : message.at + ahead;
    state.head = { ...message, rows: undefined, doc: undefined };
    state.old = message.live ? Math.max(0, message.at + ahead - message.live) : null;
    notices(message);
    try {
      on(message);
    } catch (error) {
      console.error(error);
      fail();
    }
    tick();
  };
  if (page.feed === "stream") stream(take);
  else poll(take);
  addEventListener("error", fail);
  addEventListener("unhandledrejection", fail);
  setInterval(tick, 1000);
  document.addEventListener("visibilitychange", tick);
}

/** Call `tick` once a second with the server's clock, and after each message. */
export function onTick(ticker) {
  tickers.add(ticker);
}

const address = () => `${page.root}/feed?topic=${encodeURIComponent(page.topic)}&v=${encodeURIComponent(version)}`;

function stream(take) {
  const source = new EventSource(address());
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => {
    if (source.readyState === EventSource.CONNECTING) return; // each stream ends after a while: the browser asks for the next
    broken = true; // refused, or a bad reply
    tick();
    setTimeout(() => stream(take), 2000);
  };
}

async function poll(take) {
  try {
    const reply = await fetch(address(), { headers: { Accept: "application/json" } });
    if (!reply.ok) throw new Error(reply.statusText);
    for (const message of await reply.json()) take(message);
  } catch {
    broken = true;
    tick();
  }
  setTimeout(() => poll(take), document.hidden ? 4 * POLL : POLL);
}

function fail() {
  if (failed) return;
  failed = true;
  tick();
}

function tick() {
  const silent = (performance.now() - last) / 1000; // or since the page began to load
  const lost = broken || silent > SILENCE;
  const error = state.head?.error ?? "";
  const live = Boolean(last) && !lost && !error && !failed;
  const age = (state.old ?? 0) + silent;
  if (live) state.now = base + silent;
  state.live = live;
  document.body.classList.toggle("stale", Boolean(last) && !live);
  const words = !last ? (lost ? "No connection" : "Connecting") : lost ? "Connection lost" : error ? "No answer from the server" : failed ? "This page has failed: load it again" : "Live";
  const shown = document.getElementById("state");
  if (shown.textContent !== words) shown.textContent = words;
  document.getElementById("live").dataset.state = live ? "live" : last ? "lost" : "wait";
  document.getElementById("age").textContent = !last || live ? "" : `the picture is ${span(age)} old`;
  for (const each of tickers) each(state.now, live);
}

let shownNotices = "";

function notices(message) {
  const found = [...(message.notices ?? [])];
  if (message.error) {
    found.unshift({
      text: message.error,
      advice: message.live ? "What stands below was true before. The page goes on asking" : "The page goes on asking",
    });
  }
  const off = Date.now() / 1000 - message.at;
  if (Math.abs(off) > CLOCKS) {
    found.push({
      text: `This device's clock is ${span(Math.abs(off))} ${off > 0 ? "ahead of" : "behind"} that of the page's machine`,
      advice: "Durations here are right. Times of day are those of the server of the locks",
    });
  }
  const said = JSON.stringify(found);
  if (said === shownNotices) return;
  shownNotices = said;
  put(
    document.getElementById("notices"),
    found.map((each) => h("p", { class: "notice", role: "alert" }, h("strong", {}, seen(each.text)), each.advice ? ` ${seen(each.advice)}.` : "")),
  );
}
