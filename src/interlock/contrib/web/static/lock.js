// The view of one name: who holds it, the queue in order, what has happened since the first viewer came.

import { foreign, h, put, seen, svg } from "./dom.js";
import { clock, many, moment, short } from "./format.js";
import { state } from "./feed.js";
import { age, mark, motion, place, use, who } from "./parts.js";
import { askToRevoke } from "./revoke.js";

const page = document.documentElement.dataset;
const WINDOW = 300; // seconds that the timeline shows
const SHORTEST = 0.001; // seconds: the upper end of the first bucket

const parts = {};
const shown = {};

export function show(content) {
  document.title = `${seen(JSON.parse(page.topic)[2])} · interlock`;
  for (const each of ["problem", "facts", "holders", "queue", "timeline", "holds", "waits", "history"]) parts[each] = h("div");
  put(content, parts.problem, parts.facts, h("div", { class: "pair" }, parts.holders, parts.queue), parts.timeline,
    h("div", { class: "pair" }, parts.holds, parts.waits), parts.history);
}

export function take(message) {
  if (message.doc === undefined) {
    if (parts.past) timeline(parts.past); // time goes on
    return;
  }
  const { problem, row, details, past } = message.doc;
  once("problem", problem, () => put(parts.problem, problem ? h("p", { class: "card problem", role: "alert" }, seen(problem)) : null));
  if (!row) return;
  once("facts", [row, { ...details, holders: null, queue: null }], () => put(parts.facts, facts(row, details)));
  once("holders", [row.state, details.holders, row.holding, row.kind], () => put(parts.holders, holders(row, details)));
  once("queue", [details.queue, row.waiting], () => put(parts.queue, queue(row, details)));
  if (!past) return;
  parts.past = past;
  timeline(past);
  once("holds", past.holds, () => put(parts.holds, histogram("How long it was held", past.holds, row.limit ? "" : "Also the holds between two looks, as their average.")));
  once("waits", past.waits, () => put(parts.waits, histogram("How long callers waited", past.waits, "Of those that a look has seen waiting.")));
  once("history", [past.spans, past.notes], () => put(parts.history, history(past)));
}

function once(name, value, change) {
  const text = JSON.stringify(value ?? null);
  if (shown[name] === text) return;
  shown[name] = text;
  change();
}

function facts(row, details) {
  const found = [["Kind", row.kind], ["State", [row.state, " ", motion(row)]]];
  const used = use(row);
  if (used) found.push([row.kind === "election" ? "Term" : row.ran ? "Runs" : "In use", used]);
  if (row.broken) found.push(["Broken", seen(row.broken)]);
  if (row.granted) found.push(["Newest grant", [age(row.granted), ` ago, ${moment(row.granted)}`]]);
  if (details.fence) found.push(["Fence", h("code", {}, details.fence)]);
  if (details.expires) found.push(["Forgotten", `at ${moment(details.expires)}, unless somebody uses it`]);
  found.push(["Key", foreign("code", details.key)]);
  return h("dl", { class: "facts" }, found.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat());
}

function holders(row, details) {
  const title = row.kind === "election" ? "Leader" : row.holding > 1 ? `Holders (${row.holding})` : "Holder";
  const found = details.holders.map((each) => h("li", { class: "holder" }, h("p", {}, who(each)), each.place ? h("p", {}, "at ", place(each.place)) : null,
    h("p", { class: "quiet" }, each.since ? ["for ", age(each.since), `, since ${moment(each.since)}`] : "since a moment that nobody has told",
      each.permits > 1 ? `, ${each.permits} permits` : "", each.side ? `, to ${each.side}` : ""),
    h("p", { class: "quiet" }, each.ends === null ? "Its lease has no end: a client of another library set none." : each.revoked ? `Its lease ends at ${clock(each.ends)}, since it was revoked: ` : `Its lease ends at ${clock(each.ends)}, unless its process renews it.`, each.revoked ? seen(each.revoked) : ""),
    each.trace ? h("p", { class: "quiet" }, "trace ", h("code", {}, seen(each.trace))) : null,
    page.revoke && details.is_known ? h("p", { class: "actions" },
      each.revoked || each.foreign ? null : button("Ask to give it back", row, [each], false), button("Take it", row, [each], true)) : null));
  const breaks = page.revoke && row.waiting && (row.kind === "latch" || row.kind === "barrier");
  const quarantine = page.revoke && row.quarantine;
  return h("section", { class: "card", "aria-labelledby": "holders" }, h("h2", { id: "holders" }, title),
    found.length ? h("ul", {}, found) : h("p", { class: "quiet" }, row.quarantine ? `Nobody is known to hold it. Until ${moment(row.quarantine)} nobody is granted it, since a lease may have been lost that is alive.` : "Nobody."),
    row.holding > details.holders.length ? h("p", { class: "quiet" }, `and ${row.holding - details.holders.length} more`) : null,
    breaks ? h("p", { class: "actions" }, button("Break it", row, [], false)) : null,
    quarantine ? h("p", { class: "actions" }, button("End the quarantine", row, [], true)) : null);
}

function button(words, row, parties, force) {
  return h("button", { type: "button", class: force ? "danger" : null, onclick: () => askToRevoke(words, row, parties, force) }, words);
}

function queue(row, details) {
  const found = details.queue.map((each) => h("li", {}, h("span", { class: "line" }, who(each), each.since ? h("span", { class: "quiet" }, " for ", age(each.since)) : null,
    each.permits > 1 ? ` wants ${each.permits} permits` : "", each.side ? ` to ${each.side}` : ""), place(each.place)));
  return h("section", { class: "card", "aria-labelledby": "queue" }, h("h2", { id: "queue" }, `Queue${row.waiting ? ` (${row.waiting})` : ""}`),
    found.length ? h("div", { class: "scroll", tabindex: "0", role: "group", "aria-labelledby": "queue" }, h("ol", { class: "queue" }, found)) : h("p", { class: "quiet" }, "Nobody waits."),
    row.waiting > details.queue.length ? h("p", { class: "quiet" }, `and ${row.waiting - details.queue.length} more`) : null);
}

// Drawings

function timeline(past) {
  const now = state.now || past.since;
  const from = Math.max(past.since, now - WINDOW);
  const width = 1000;
  const x = (at) => (width * (Math.max(from, Math.min(now, at)) - from)) / Math.max(1, now - from);
  const most = Math.max(1, ...past.samples.map(([, number]) => number));
  const steps = past.samples.map(([at, number], i) => {
    const end = past.samples[i + 1]?.[0] ?? now;
    if (!number || end < from) return null;
    const height = (34 * number) / most;
    return svg("rect", { class: "waiting", x: x(at), y: 84 - height, width: Math.max(1, x(end) - x(at)), height });
  });
  const lanes = [];
  const spans = past.spans.filter(([, , , end]) => (end ?? now) >= from);
  const holds = spans.map(([by, at, start, end, , how], i) => {
    let lane = lanes.findIndex((free) => free <= start + 0.001);
    if (lane < 0) lane = lanes.length < 4 ? lanes.push(0) - 1 : 3;
    lanes[lane] = end ?? Infinity;
    const bad = how && how !== "released";
    return svg("rect", { class: `hold${i % 2 ? " odd" : ""}${bad ? " bad" : ""}`, x: x(start), y: 4 + lane * 10, width: Math.max(1.5, x(end ?? now) - x(start)), height: 9 },
      svg("title", {}, `${seen(by)} ${seen(at)} from ${clock(start)} to ${end ? clock(end) : "now"}${how ? `, ${how}` : ""}`));
  });
  const words = `The last ${Math.round(now - from)} seconds: ${many(spans.length, "hold")} seen, at most ${many(most, "caller")} waiting. The table below has each.`;
  put(parts.timeline, h("section", { class: "card", "aria-labelledby": "timeline" }, h("h2", { id: "timeline" }, "Since the first viewer came"),
    svg("svg", { class: "chart", viewBox: `0 0 ${width} 104`, role: "img", "aria-label": words }, holds, steps,
      svg("line", { class: "axis", x1: 0, y1: 84.5, x2: width, y2: 84.5 }), svg("text", { x: 0, y: 100 }, clock(from)), svg("text", { x: width, y: 100, "text-anchor": "end" }, clock(now))),
    h("p", { class: "quiet" }, `Above: who held it, as looks about once a second have seen. Below: how many waited, ${most} at most. ${many(past.handovers, "handover")} counted.`)));
}

function histogram(title, counts, about) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  const id = title.replaceAll(" ", "-");
  const first = counts.findIndex((each) => each > 0);
  const last = counts.findLastIndex((each) => each > 0);
  const bounds = first < 0 ? [] : counts.slice(first, last + 1).map((count, i) => [count, SHORTEST * 2 ** (first + i)]);
  const most = Math.max(1, ...counts);
  const each = Math.min(90, 1000 / Math.max(1, bounds.length));
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title),
    total ? svg("svg", { class: "chart", viewBox: `0 0 ${Math.max(450, each * bounds.length)} 120`, role: "img", "aria-label": bounds.map(([count, end]) => `up to ${short(end)}: ${count}`).join(", ") },
      bounds.map(([count, end], i) => [
        svg("rect", { class: "count", x: i * each + 2, y: 92 - (76 * count) / most, width: each - 4, height: Math.max(count ? 1.5 : 0, (76 * count) / most) }),
        svg("text", { x: i * each + each / 2, y: 88 - (76 * count) / most, "text-anchor": "middle" }, count ? count.toLocaleString() : ""),
        svg("text", { x: i * each + each / 2, y: 110, "text-anchor": "middle" }, `≤ ${short(end)}`)]).flat()) : h("p", { class: "quiet" }, "None seen yet."),
    about ? h("p", { class: "quiet" }, about) : null);
}

function history(past) {
  const spans = past.spans.map(([by, at, start, end, fence, how]) => [end ?? Infinity, h("tr", { role: "row" },
    cell("From", clock(start)), cell("Until", end ? clock(end) : "now"), cell("Who", foreign("span", by, { class: "who" }), place(at)), cell("Fence", fence), cell("End", how ? (how === "released" ? how : mark("revoked", how)) : ""))]);
  const notes = past.notes.map(([at, what, words]) => [at, h("tr", { role: "row" }, cell("From", clock(at)), cell("Until", ""), cell("Who", seen(words)), cell("Fence", ""), cell("End", mark("revoked", what)))]);
  const rows = [...spans, ...notes].sort((a, b) => b[0] - a[0]).map(([, each]) => each);
  if (!rows.length) return null;
  return h("section", { "aria-labelledby": "history" }, h("h2", { id: "history" }, "Holds that were seen, the newest first"),
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-labelledby": "history" }, h("table", { role: "table", "aria-labelledby": "history" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["From", "Until", "Who", "Fence", "End"].map((each) => h("th", { scope: "col", role: "columnheader" }, each)))), h("tbody", { role: "rowgroup" }, rows))));
}

function cell(label, ...children) {
  return h("td", { role: "cell", "data-label": label }, ...children);
}
