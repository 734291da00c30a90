// Asking for a revocation: a dialog that says what will happen, and what has become of it.

import { foreign, h, put, seen } from "./dom.js";
import { many } from "./format.js";

const page = document.documentElement.dataset;
const dialog = document.getElementById("dialog");

/** Open the dialog. `parties`: the holders that are meant; none for a quarantine, a latch or a barrier. */
export function askToRevoke(title, row, parties, force) {
  const reason = h("textarea", { id: "reason", required: true, maxlength: "200", "aria-describedby": "effect" });
  const answer = h("p", { role: "status", class: "answer" });
  const act = h("button", { type: "submit", class: force ? "danger" : null }, title);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Leave it");
  const form = h("form", {},
    h("h2", { id: "dialog-title" }, `${title}: `, foreign("span", row.name)),
    h("div", { id: "effect" }, effect(row, parties, force).map((each) => h("p", {}, each))),
    h("label", { for: "reason" }, "Why? Its holder and the audit get this"), reason, answer,
    h("p", { class: "actions" }, act, cancel));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    act.disabled = true;
    answer.textContent = "Asking …";
    const [done, text] = await send(row, parties, reason.value, force);
    answer.textContent = seen(text);
    if (done) {
      act.hidden = true;
      cancel.textContent = "Close";
      cancel.focus();
    } else act.disabled = false;
  });
  put(dialog, form);
  dialog.showModal();
  reason.focus();
}

function effect(row, parties, force) {
  const waiting = row.waiting ? ` ${many(row.waiting, "caller")} wait for it.` : " Nobody waits for it.";
  if (row.kind === "latch" || row.kind === "barrier") return [`It breaks for all that wait for it: each of their calls raises an error.${waiting}`];
  if (!parties.length) return ["It ends the quarantine early. If a lease was lost that is alive, two may be at work at once."];
  const whom = parties.map((each) => `${seen(each.who)} ${seen(each.caller ?? "")}`).join(", ");
  if (force) return [`It is taken from ${whom} at once, and the next waiter gets it.${waiting}`, "Its former holder may still be at work: then two are at work at once, and only guards that check the fence refuse what the former one writes."];
  return [`${whom} is asked to give it back. It learns of that within a second, can renew its lease no more, and should stop.${waiting}`, "If it does not stop, its lease ends by itself."];
}

async function send(row, parties, reason, force) {
  try {
    const reply = await fetch(`${page.root}/revoke`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Interlock-Token": page.token },
      body: JSON.stringify({ kind: row.kind, name: row.name, prefix: row.prefix, tokens: parties.map((each) => each.token), reason, force }),
    });
    const type = reply.headers.get("content-type") ?? "";
    const answer = type.startsWith("application/json") ? await reply.json() : { problem: await reply.text() };
    return [reply.ok, answer.text ?? answer.problem ?? reply.statusText];
  } catch {
    return [false, "No answer: nobody knows whether it was revoked. Look at the audit"];
  }
}
