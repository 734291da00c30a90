// The view of processes: what each has said that it holds and waits for.

import { foreign, h, put } from "./dom.js";
import { many } from "./format.js";
import { age, mark, nameLink, place } from "./parts.js";

let content = null;

export function show(element) {
  content = element;
}

export function take(message) {
  if (message.doc === undefined) return;
  const rows = message.doc;
  const silent = rows.filter((each) => each.silent).length;
  const versions = [...new Set(rows.map((each) => each.version).filter(Boolean))];
  put(content, h("p", { class: "card" }, `${many(rows.length, "process", "processes")} hold something or wait`, silent ? [", ", mark("silent", `${silent} silent`)] : "",
    versions.length ? `. interlock ${versions.join(", ")}${versions.length > 1 ? ": several versions side by side" : ""}` : "", ". As they have said themselves, some seconds ago."),
  rows.length ? table(rows) : null);
}

function table(rows) {
  return h("table", { role: "table", "aria-label": "Processes" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["Process", "Holds", "Waits for"].map((each) => h("th", { scope: "col", role: "columnheader" }, each)))),
    h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row" },
      h("td", { role: "cell", class: "col-name" }, foreign("span", row.who, { class: "who" }), h("span", { class: "line quiet" }, row.version ? `interlock ${row.version}, ` : "", "has reported ", age(row.reported), " ago"),
        row.gone ? mark("silent", "has ended") : row.silent ? mark("silent", "silent: dead, stopped, or cut off") : null),
      h("td", { role: "cell", "data-label": "Holds" }, items(row.holds, row.holding)), h("td", { role: "cell", "data-label": "Waits for" }, items(row.waits, row.waiting))))));
}

function items(found, number) {
  if (!number) return h("span", { class: "quiet" }, "–");
  return h("ul", {}, found.map((each) => h("li", {}, nameLink(each), " ", h("span", { class: "kind" }, each.kind), " for ", age(each.since), place(each.place))),
    number > found.length ? h("li", { class: "quiet" }, `and ${number - found.length} more`) : null);
}
