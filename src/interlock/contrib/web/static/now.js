// The view of all names: what is deadlocked, what is stuck, what waits, what moves, what is held.
//
// The rows that are shown are few, and each is made once: a message changes the cells of those rows alone that it names.

import { foreign, h, put } from "./dom.js";
import { many } from "./format.js";
import { state } from "./feed.js";
import { age, mark, motion, nameLink, place, setAge, use, who } from "./parts.js";

const STEP = 100; // rows that are shown at first, and that one press adds
const SLICE = 8; // ms of one frame for making rows
const GROUPS = [
  ["stuck", "Stuck", "Callers wait, and the holder has not changed for much longer than it usually takes"],
  ["waits", "Waiting", "Callers wait, and nobody can tell yet whether it moves"],
  ["moves", "Moving", "It passes from holder to holder"],
  ["held", "Held", "Nobody waits for these"],
  ["rest", "Idle", "Nobody holds these now"],
];

const rows = new Map(); // by number: { row, group, order, element }
let limit = STEP;
let words = "";
let deadlocks = [];
let wanted = false;
const parts = {};

export function show(content) {
  parts.headline = h("p", { class: "headline", role: "status" });
  parts.tiles = h("ul", { class: "tiles", "aria-label": "In numbers" });
  parts.deadlocks = h("section", { "aria-label": "Deadlocks", class: "deadlocks" });
  parts.filter = h("input", { type: "search", id: "filter", placeholder: "name, process or line of code", autocomplete: "off", spellcheck: "false" });
  parts.filter.addEventListener("input", () => {
    words = parts.filter.value.trim().toLowerCase();
    limit = STEP;
    draw();
  });
  parts.count = h("span", { class: "quiet" });
  parts.body = h("div", { class: "groups" });
  parts.more = h("button", { type: "button", class: "more", onclick: () => { limit += STEP; draw(); } }, "Show more");
  put(content, parts.headline, parts.tiles, parts.deadlocks,
    h("p", { class: "filter" }, h("label", { for: "filter" }, "Only"), parts.filter, parts.count), parts.body, parts.more);
  parts.tables = new Map(GROUPS.map(([key, title, about]) => [key, table(key, title, about)]));
  put(parts.body, ...[...parts.tables.values()].map((each) => each.section));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target === document.body) {
      event.preventDefault();
      parts.filter.focus();
    }
  });
}

function table(key, title, about) {
  const body = h("tbody", { role: "rowgroup" });
  const heads = ["Name", "Holder", "Held for", "Waiting", "Moves"];
  const count = h("span", { class: "count" });
  const section = h("section", { class: `group ${key}`, "aria-labelledby": `group-${key}`, hidden: true },
    h("h2", { id: `group-${key}`, tabindex: "-1" }, title, " ", count), h("p", { class: "quiet about" }, about),
    h("table", { role: "table", "aria-labelledby": `group-${key}` },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((each) => h("th", { scope: "col", role: "columnheader" }, each)))), body));
  return { section, body, count, shown: [], rows: [] };
}

export function take(message) {
  if (message.full && message.rows) {
    const there = new Set(message.rows.map((row) => row.id));
    for (const id of [...rows.keys()]) if (!there.has(id)) rows.delete(id);
  }
  for (const row of message.rows ?? []) {
    const known = rows.get(row.id);
    const kept = known && isSame(known.row, row) ? known : { element: null, cells: null };
    kept.row = row;
    kept.changed = true;
    kept.group = groupOf(row);
    kept.order = orderOf(row, kept.group);
    kept.text = null;
    rows.set(row.id, kept);
  }
  for (const id of message.gone ?? []) rows.delete(id);
  if (message.deadlocks) deadlocks = message.deadlocks;
  schedule();
}

// A message may change hundreds of rows that are shown. So a draw sorts first, then makes rows for some milliseconds of each
// frame, and puts them into the tables once all are made.

function schedule() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => {
    wanted = false;
    draw();
  });
}

function prepare(todo) {
  const until = performance.now() + SLICE;
  while (todo.length && performance.now() < until) {
    const kept = todo.pop();
    try {
      if (!kept.element || kept.broken) makeRow(kept);
      if (kept.changed) fillRow(kept);
    } catch (error) {
      console.error(error);
      notMade(kept);
    }
  }
  return !todo.length;
}

/** Whether both rows are of one name: a number means nothing to another process of the page. */
function isSame(one, other) {
  return one.kind === other.kind && one.name === other.name && one.prefix === other.prefix;
}

function groupOf(row) {
  if (row.motion === "stuck") return "stuck";
  if (row.motion === "moves") return "moves";
  if (row.waiting || row.quarantine) return "waits";
  return row.holding ? "held" : "rest";
}

/** The oldest first; what moves has the order of its names, so that nothing jumps. */
function orderOf(row, group) {
  if (group === "stuck") return row.granted ?? 0;
  if (group === "waits") return row.oldest ?? 0;
  if (group === "held") return row.holders?.[0]?.silent || row.holders?.[0]?.gone ? 0 : (row.holders?.[0]?.since ?? Infinity);
  return 0;
}

function matches(kept) {
  if (!words) return true;
  kept.text ??= [kept.row.name, kept.row.prefix, kept.row.kind, ...(kept.row.holders ?? []).flatMap((each) => [each.who, each.caller, each.place])].join("\n").toLowerCase();
  return kept.text.includes(words);
}

function draw() {
  const groups = new Map(GROUPS.map(([key]) => [key, []]));
  const numbers = { held: 0, waiting: 0, silent: 0 };
  let shown = 0;
  for (const kept of rows.values()) {
    numbers.held += kept.row.holding ? 1 : 0;
    numbers.waiting += kept.row.waiting ?? 0;
    if (kept.row.holders?.some((each) => each.silent || each.gone)) numbers.silent += 1;
    if (matches(kept)) {
      groups.get(kept.group).push(kept);
      shown += 1;
    }
  }
  const plan = [];
  let left = limit;
  for (const [key, found] of groups) {
    found.sort((a, b) => a.order - b.order || (a.row.name < b.row.name ? -1 : a.row.name > b.row.name ? 1 : a.row.id - b.row.id));
    plan.push([parts.tables.get(key), found.slice(0, left), found.length]);
    left -= Math.min(left, found.length);
  }
  const todo = plan.flatMap(([, found]) => found.filter((each) => !each.element || each.changed));
  const finish = (number) => {
    if (number !== drawing) return; // a newer draw is under way
    if (!prepare(todo)) {
      requestAnimationFrame(() => finish(number));
      return;
    }
    for (const each of plan) drawGroup(...each);
    forget();
    parts.more.hidden = shown <= limit;
    parts.more.textContent = `Show ${Math.min(STEP, Math.max(0, shown - limit))} more of ${(shown - limit).toLocaleString()}`;
    const turn = state.head?.turn ?? 0;
    parts.count.textContent = `${words ? `${shown.toLocaleString()} of ` : ""}${many(rows.size, "name")}${turn > 3 ? `; quiet ones are asked about every ${Math.round(turn)} s` : ""}`;
    drawDeadlocks();
    drawHeadline(groups.get("stuck"), numbers);
  };
  drawing += 1;
  finish(drawing);
}

let drawing = 0;
let standing = new Set(); // the rows that have elements

/** Let go of the elements of rows that are no longer shown: thousands of names would keep theirs. */
function forget() {
  const now = new Set([...parts.tables.values()].flatMap((each) => each.rows));
  for (const kept of standing) {
    if (now.has(kept)) continue;
    kept.element = kept.cells = kept.link = kept.kind = kept.use = kept.heldAge = kept.shown = null;
    kept.changed = true;
  }
  standing = now;
}

function drawGroup(made, found, all) {
  made.section.hidden = !found.length;
  const count = all.toLocaleString();
  if (made.count.textContent !== count) made.count.textContent = count;
  const wantedRows = found.map((each) => each.element);
  const same = wantedRows.length === made.shown.length && wantedRows.every((each, i) => each === made.shown[i]);
  if (!same) arrange(made.body, wantedRows);
  made.shown = wantedRows;
  made.rows = found;
}

/** Put these rows into the table in this order, and touch no row that stands right, so that no focus is lost. */
function arrange(body, wantedRows) {
  const keep = new Set(wantedRows);
  for (const each of [...body.children]) if (!keep.has(each)) each.remove();
  let at = body.firstElementChild;
  for (const each of wantedRows) {
    if (each === at) at = at.nextElementSibling;
    else body.insertBefore(each, at);
  }
}

function makeRow(kept) {
  kept.broken = false;
  kept.shown = null;
  const cell = (name, label) => h("td", { class: name, role: "cell", "data-label": label });
  kept.cells = {
    name: cell("col-name", "Name"), holder: cell("col-holder", "Holder"), held: cell("col-held", "Held for"),
    waiting: cell("col-waiting", "Waiting"), motion: cell("col-motion", "Moves"),
  };
  kept.link = nameLink(kept.row);
  kept.kind = h("span", { class: "kind" }, kept.row.kind);
  kept.use = h("span", { class: "used" });
  kept.cells.name.append(kept.link, " ", kept.kind, kept.use);
  kept.heldAge = age(null);
  kept.cells.held.append(kept.heldAge);
  kept.element = h("tr", { role: "row" }, Object.values(kept.cells));
  standing.add(kept);
}

/** One row that can't be made keeps no other from its place. */
function notMade(kept) {
  kept.element = h("tr", { role: "row" }, h("td", { role: "cell", colspan: "5" }, foreign("span", kept.row.name), " can't be shown: the console of this browser says why"));
  kept.changed = false;
  kept.broken = true;
  standing.add(kept);
}

function fillRow(kept) {
  const { row, cells } = kept;
  const before = kept.shown ?? {};
  const first = row.holders?.[0];
  const oldest = row.oldest ?? null;
  once("use", JSON.stringify([row.used, row.limit, row.readers, row.writers, row.count, row.left, row.parties, row.generation, row.ran, row.kind === "election" && first?.fence, row.parties && row.waiting]), () => put(kept.use, use(row)));
  once("holder", JSON.stringify([row.holders, row.holding, row.state]), () => put(cells.holder, holderCell(row)));
  once("waiting", `${row.waiting} ${row.processes} ${oldest}`, () => put(cells.waiting, row.waiting ? [h("b", {}, many(row.waiting, "caller")), row.processes > 1 ? ` in ${row.processes} processes` : "", oldest ? [", oldest ", age(oldest)] : null].flat() : h("span", { class: "quiet" }, "–")));
  once("motion", `${row.motion} ${row.rate} ${row.granted} ${row.quarantine} ${row.broken} ${Boolean(row.waiting)}`, () => put(cells.motion, motion(row) ?? h("span", { class: "quiet" }, "–")));
  if (kept.heldAge.since !== (first?.since ?? null)) setAge(kept.heldAge, first?.since);
  kept.element.classList.toggle("silent", Boolean(first?.silent || first?.gone));
  kept.shown = before;
  kept.changed = false;

  function once(cell, value, change) {
    if (before[cell] === value) return;
    before[cell] = value;
    change();
  }
}

function holderCell(row) {
  const first = row.holders?.[0];
  if (!first) return [h("span", { class: "quiet" }, row.state === "quarantine" ? "nobody: quarantine" : row.state === "unknown" ? "the server does not tell" : "nobody")];
  const more = row.holding - 1;
  return [h("span", { class: "line" }, who(first), more > 0 ? h("span", { class: "quiet" }, ` and ${more} more`) : null), place(first.place) ?? null];
}

// What somebody in a hurry reads first

let said = "";

function drawHeadline(stuck, numbers) {
  const tiles = [
    [deadlocks.length, "deadlock", "deadlocks", "bad"], [stuck.length, "stuck", "stuck", "bad"],
    [numbers.waiting, "caller waits", "callers wait", ""], [numbers.held, "held", "held", ""],
    [numbers.silent, "silent holder", "silent holders", "warn"],
  ];
  const text = JSON.stringify([tiles, stuck[0]?.row.id, stuck[0]?.row.waiting, deadlocks[0]?.title, rows.size === 0]);
  if (text === said) return;
  said = text;
  put(parts.tiles, tiles.map(([number, one, more, kind]) => h("li", { class: number && kind ? `tile ${kind}` : "tile" }, h("b", {}, number.toLocaleString()), ` ${number === 1 ? one : more}`)));
  put(parts.headline, headline(stuck));
  parts.headline.className = `headline ${deadlocks.length || stuck.length ? "bad" : "good"}`;
  document.title = `${deadlocks.length ? "Deadlock" : stuck.length ? `${stuck.length} stuck` : "Now"} · interlock`;
}

function headline(stuck) {
  if (deadlocks.length) {
    const first = deadlocks[0];
    return [mark("stuck", first.title), ": ", first.members.map((each, i) => [i ? ", " : "", nameLink(each.waits)]).flat(), first.members.length === 2 ? " wait for each other's holders." : ".", " Revoke one of them to let the others go on."].flat();
  }
  if (stuck.length) {
    const { row } = stuck[0];
    const first = row.holders?.[0];
    return [mark("stuck", "stuck"), " ", nameLink(row), ": ", h("b", {}, many(row.waiting, "caller")), " wait, and nobody was granted it for ", age(row.granted), ". ",
      first ? [first.gone || first.silent ? "Its holder does not answer: " : "It is held by ", foreign("span", first.who, { class: "who" }), first.place ? [" at ", place(first.place)] : ""].flat() : "", "."].flat();
  }
  return [mark("held", rows.size ? "Nothing is stuck." : "Nobody holds anything, and nobody waits.")];
}

// Deadlocks, drawn as a ring

let drawn = "";

function drawDeadlocks() {
  const text = JSON.stringify(deadlocks);
  if (text === drawn) return;
  drawn = text;
  put(parts.deadlocks, deadlocks.map((each) => ring(each)));
}

export function ring(found) {
  const members = found.members.map((member, i) => {
    const next = found.members[(i + 1) % found.members.length];
    return h("li", { class: "member" },
      h("div", { class: "box" }, foreign("p", member.who, { class: "who" }),
        member.holds.map((held) => h("p", {}, h("span", { class: "verb" }, "holds"), " ", nameLink(held), " ", h("span", { class: "kind" }, held.kind), place(held.place)))),
      h("p", { class: "arrow" }, h("span", { class: "verb" }, "waits for"), " ", nameLink(member.waits), h("span", {}, " for ", age(member.waits.since)), place(member.waits.place),
        h("span", { class: "to" }, h("span", { "aria-hidden": "true" }, i + 1 < found.members.length ? "→ " : "↺ "), "held by ", foreign("span", next.who, { class: "who" }))));
  });
  return h("article", { class: "deadlock" }, h("h2", {}, mark("stuck", found.title), " for ", age(found.since)),
    h("ol", { class: "ring" }, members),
    found.behind ? h("p", {}, `${many(found.behind, "caller")} more wait behind it.`) : null,
    h("p", { class: "quiet" }, "Way out now: open one of these names and revoke its holder. For good: acquire them in the same order everywhere, or all at once with multi()."));
}

