// The view of the server's health: what the doctor finds, and what is in quarantine.

import { h, put, seen } from "./dom.js";
import { moment, span } from "./format.js";
import { nameLink } from "./parts.js";

let content = null;

export function show(element) {
  content = element;
}

export function take(message) {
  if (message.doc === undefined) return;
  const { problem, findings = [], quarantine = [], at } = message.doc;
  put(content,
    problem ? h("p", { class: "card problem", role: "alert" }, seen(problem)) : null,
    h("section", { class: "card", "aria-labelledby": "quarantine" }, h("h2", { id: "quarantine" }, "Quarantine"),
      quarantine.length ? h("ul", {}, quarantine.map((each) => h("li", {}, nameLink(each), ` until ${moment(each.until)}`)))
        : h("p", {}, "No name that this page knows is in quarantine."),
      h("p", { class: "quiet" }, "After a restart or failover that may have lost leases, nothing is granted until each lease that could be alive has run out.")),
    h("section", { class: "card", "aria-labelledby": "findings" }, h("h2", { id: "findings" }, "What the doctor says"),
      h("ul", {}, findings.map((each) => h("li", {}, h("p", {}, h("span", { class: `level ${each.level}` }, each.level), ` ${seen(each.subject)} ${seen(each.text)}`),
        each.advice ? h("p", { class: "quiet" }, `→ ${seen(each.advice)}`) : null))),
      at ? h("p", { class: "quiet" }, `Asked ${moment(at)}; again every ${span(60)}.`) : null));
}
