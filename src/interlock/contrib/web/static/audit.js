// The view of revocations: who, whom, when, why, and with what result.

import { foreign, h, put, seen } from "./dom.js";
import { moment } from "./format.js";
import { mark, nameLink } from "./parts.js";

let content = null;

export function show(element) {
  content = element;
}

export function take(message) {
  if (message.doc === undefined) return;
  if (message.doc.problem) return put(content, h("p", { class: "card problem", role: "alert" }, seen(message.doc.problem)));
  const rows = message.doc;
  if (!rows.length) return put(content, h("p", { class: "card" }, "Nobody has revoked anything."));
  const heads = ["When", "Name", "Who revoked", "From", "Why", "Result"];
  return put(content, h("table", { role: "table", "aria-label": "Revocations, the newest first" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((each) => h("th", { scope: "col", role: "columnheader" }, each)))),
    h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row" },
      cell("When", moment(row.at)), cell("Name", nameLink(row), " ", h("span", { class: "kind" }, row.kind)), cell("Who revoked", foreign("span", row.by, { class: "who" })),
      cell("From", row.holders.length ? row.holders.map((each) => foreign("span", each, { class: "who line" })) : "those who waited", row.holding > row.holders.length ? ` and ${row.holding - row.holders.length} more` : ""),
      cell("Why", foreign("span", row.reason)), cell("Result", row.forced ? [mark("revoked", "by force"), " "] : "", row.result ? seen(row.result) : "unknown: its process has said nothing since it asked"))))));
}

function cell(label, ...children) {
  return h("td", { role: "cell", "data-label": label }, ...children);
}
