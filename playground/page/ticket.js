// Shows the page that `narthex trace -o html` writes as a part of this page.
//
// That page holds no markup of others, which its own tests show. Only elements and attributes that it needs are copied here
// nonetheless, so that a fault there could not do harm.

const ELEMENTS = new Set([
  "header", "h1", "h2", "h3", "p", "pre", "code", "span", "div", "section", "figure", "dl", "dt", "dd",
  "svg", "g", "rect", "path", "circle", "text", "title", "desc",
]);
const ATTRIBUTES = new Set([
  "class", "x", "y", "rx", "r", "cx", "cy", "d", "width", "height", "viewBox", "role", "aria-labelledby", "id",
]);
// The page has a heading above all these.
const LEVELS = {h1: "h2", h2: "h3", h3: "h4"};

export function showTicket(policy, page, into, word) {
  const parsed = new DOMParser().parseFromString(policy.createHTML(page.replace(/^<!DOCTYPE html>\s*/, "")), "application/xhtml+xml");
  const main = parsed.querySelector("main");
  into.replaceChildren(...[...main.childNodes].flatMap(each => copied(each, word)));
  const picture = into.querySelector(".picture");
  // Those who read it by keyboard can move it where it is wider than the page.
  if (picture) picture.tabIndex = 0;
  return into.querySelector(".result");
}

function copied(node, word) {
  if (node.nodeType === Node.TEXT_NODE) return [document.createTextNode(word(node.data, node.parentNode.localName))];
  if (node.nodeType !== Node.ELEMENT_NODE || !ELEMENTS.has(node.localName)) return [];
  const drawn = node.namespaceURI === "http://www.w3.org/2000/svg";
  const made = drawn
    ? document.createElementNS(node.namespaceURI, node.localName)
    : document.createElement(LEVELS[node.localName] ?? node.localName);
  for (const {name, value} of node.attributes) if (ATTRIBUTES.has(name)) made.setAttribute(name, value);
  if (node.localName in LEVELS) made.classList.add(`was-${node.localName}`);
  // The page announces the result itself.
  if (!drawn) made.removeAttribute("role");
  made.append(...[...node.childNodes].flatMap(each => copied(each, word)));
  return [made];
}
