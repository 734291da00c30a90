// Elements, and what becomes of text that somebody else wrote.
//
// Rule. Text gets into the page as text: textContent and attributes, never as markup.

const SVG = "http://www.w3.org/2000/svg";
// Control characters, characters that turn the direction of writing, and characters that nobody sees.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** What somebody else wrote, with what nobody could see made visible. */
export function seen(text) {
  return String(text ?? "").replace(UNSEEN, (each) => `\\u${each.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** An element with these properties and children; a child that is a string becomes text, one that is null is left out. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for a drawing. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const each of children.flat()) if (each !== null && each !== undefined && each !== false) element.append(each);
  return element;
}

/** Put these in place of whatever an element has. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
}

/** A name of somebody else's: its direction of writing does not reach beyond it. */
export function foreign(tag, text, properties = {}) {
  const shown = seen(text);
  return h(tag, { dir: "auto", title: shown.length > 40 ? shown : null, ...properties }, shown);
}
