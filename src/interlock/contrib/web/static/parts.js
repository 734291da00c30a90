// Pieces that several views show: a party, a place, an age that grows, a bar.

import { foreign, h, seen } from "./dom.js";
import { many, moment, rate, span } from "./format.js";
import { onTick, state } from "./feed.js";

const page = document.documentElement.dataset;

/** Text that has an address: half a surrogate pair has none. */
const whole = (text) => String(text).replace(/[\ud800-\udfff]/gu, "\ufffd");

/** The address of the page of one name. */
export function address(thing) {
  const query = new URLSearchParams();
  let path = encodeURIComponent(whole(thing.name));
  if (/^\.{1,2}$/.test(thing.name)) {
    query.set("name", thing.name); // a path would swallow it
    path = "";
  }
  if (thing.prefix !== "lock:") query.set("prefix", thing.prefix);
  return `${page.root}/lock/${encodeURIComponent(whole(thing.kind))}/${path}${query.size ? `?${query}` : ""}`;
}

/** A name, as a link to its page. */
export function nameLink(thing, properties = {}) {
  const text = thing.prefix === "lock:" ? thing.name : `${thing.prefix}${thing.name}`;
  return foreign("a", text, { href: address(thing), class: "name", ...properties });
}

/** For how long something has lasted; it grows by itself. Of null: nothing. */
export function age(since) {
  const element = h("time", { class: "age", datetime: since ? new Date(since * 1000).toISOString() : null });
  setAge(element, since);
  return element;
}

export function setAge(element, since) {
  element.since = since ?? null;
  if (since) element.title = `since ${moment(since)}`;
  showAge(element, state.now);
}

function showAge(element, now) {
  const text = element.since ? span(now - element.since) : "";
  if (element.textContent !== text) element.textContent = text;
}

onTick((now) => {
  for (const each of document.getElementsByClassName("age")) showAge(each, now);
});

/** A line of somebody's code; its end says most, so that end stays visible. */
export function place(text) {
  if (!text) return null;
  const shown = seen(text);
  const match = /^(.*\/)?([^/]+)$/s.exec(shown);
  return h("span", { class: "place", dir: "ltr", title: shown }, h("span", { class: "folder" }, match?.[1] ?? ""), h("b", {}, match?.[2] ?? shown));
}

/** A mark with an icon and words, so that its colour is not the only sign. */
export function mark(kind, words) {
  const icons = { stuck: "■", silent: "✕", moves: "▶", wait: "…", handing: "→", revoked: "!", quarantine: "◆", free: "○", held: "●" };
  return h("span", { class: `mark ${kind}` }, h("span", { "aria-hidden": "true" }, icons[kind] ?? "•"), ` ${words}`);
}

/** Who holds or waits, in one line. */
export function who(party) {
  const parts = [foreign("span", party.who, { class: "who" })];
  if (party.caller) parts.push(" ", foreign("span", party.caller, { class: "caller" }));
  if (party.owner) parts.push(" ", foreign("span", `owner ${party.owner}`, { class: "caller" }));
  if (party.handing) parts.unshift(mark("handing", "handing over to"), " ");
  if (party.gone) parts.push(" ", mark("silent", "its process has ended"));
  else if (party.silent) parts.push(" ", mark("silent", "silent"));
  if (party.revoked) parts.push(" ", mark("revoked", "revoked"));
  return parts;
}

/** A bar: so much of so much. */
export function bar(used, limit, words, kind = "") {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${limit ? Math.min(100, (100 * used) / limit) : 0}%`;
  return h("span", { class: `use ${kind}` }, h("span", { class: "bar", "aria-hidden": "true" }, fill), h("span", { class: "words" }, words));
}

/** What a name of this kind has besides a holder. */
export function use(row) {
  if (row.limit) return bar(row.used ?? 0, row.limit, `${row.used ?? 0} of ${many(row.limit, "permit")}`, (row.used ?? 0) >= row.limit ? "full" : "");
  if (row.writers) return bar(1, 1, "1 writer", "full");
  if (row.readers) return bar(row.readers, row.readers + (row.waiting ?? 0), many(row.readers, "reader"));
  if (row.count !== undefined) return bar(row.count - (row.left ?? 0), row.count, `${row.left ?? 0} of ${row.count} left`);
  if (row.parties !== undefined) {
    const made = bar(row.waiting ?? 0, row.parties, `${row.waiting ?? 0} of ${row.parties} arrived`);
    if (row.generation !== undefined) made.append(h("span", { class: "words" }, `generation ${row.generation}`));
    return made;
  }
  if (row.kind === "election" && row.holders?.[0]?.fence) return h("span", { class: "words", title: "each term is higher than the one before" }, `term ${row.holders[0].fence}`);
  if (row.ran) return lastRun(row);
  return null;
}

/** The last run of a once. */
export function lastRun(row) {
  const ended = row.ran.ended ? Date.parse(row.ran.ended) / 1000 : null;
  const by = row.ran.by ? [" by ", foreign("span", row.ran.by, { class: "who" })] : [];
  return h("span", { class: "words" }, ended ? ["last run ended ", age(ended), " ago"] : "runs, or its end is not known", by,
    row.next ? `, next not before ${moment(row.next)}` : "");
}

/** Whether it moves, in words. */
export function motion(row) {
  if (row.quarantine) return mark("quarantine", `quarantine until ${moment(row.quarantine)}`);
  if (row.motion === "stuck") return h("span", { class: "mark stuck" }, h("span", { "aria-hidden": "true" }, "■"), " stuck for ", age(row.granted));
  if (row.motion === "moves") return mark("moves", row.rate ? `${rate(row.rate)} a second` : "moves");
  if (row.broken) return mark("revoked", "broken");
  return row.waiting ? mark("wait", "waits") : null;
}
