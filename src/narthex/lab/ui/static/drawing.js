// Boxes and threads as SVG. What stays is kept, so that the focus stays where it is. All text is set as text.

import {fit} from "./layout.js";

const BREAK = 0.6; // The part of a broken line that is drawn.
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, text = undefined) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Drawing {
  constructor(svg) {
    this.svg = svg;
    this.back = svg.appendChild(element("g", {"aria-hidden": "true"}));
    this.ways = svg.appendChild(element("g", {"aria-hidden": "true"}));
    this.front = svg.appendChild(element("g"));
    this.held = new Map();
    this.plan = {items: [], threads: [], byId: new Map(), homes: new Map()};
    this.byId = this.plan.byId;
  }

  show(plan, unit) {
    this.plan = plan;
    this.unit = unit;
    this.byId = plan.byId;
    // A margin for what is drawn around a box that has the focus.
    const margin = 5 * unit;
    this.svg.setAttribute("viewBox", `${-margin} 0 ${plan.width + 2 * margin} ${plan.height}`);
    this.svg.setAttribute("height", plan.height);
    this.svg.style.width = `${plan.width + 2 * margin}px`;
    this.back.replaceChildren(
      ...plan.heads.map(each => element("text", {class: "head", x: each.x, y: each.y}, each.text)),
      element("path", {class: "rule", d: `M0 ${plan.rule}H${plan.width}`}),
      ...plan.cards.flatMap(each => [
        element("rect", {class: "card", x: each.x, y: each.y, width: each.w, height: each.h, rx: 9 * unit}),
        ...(each.text ? [element("text", {class: "small", x: each.x + 14 * unit, y: each.y + 30 * unit}, each.text)] : []),
      ]),
      ...plan.threads.map(each => this.thread(each)),
    );
    for (const [id, group] of this.held) {
      if (!this.byId.has(id)) {
        group.remove();
        this.held.delete(id);
      }
    }
    let before = null;
    for (const [id, item] of this.byId) {
      const group = this.held.get(id) ?? this.make(id, item);
      this.fill(group, item);
      // Only what is out of place is moved: a moved element loses the focus.
      const after = before ? before.nextSibling : this.front.firstChild;
      if (after !== group) this.front.insertBefore(group, after);
      before = group;
    }
  }

  make(id, item) {
    const group = element("g", {class: `item ${item.kind}`, role: "button", tabindex: -1, "aria-pressed": "false"});
    group.dataset.id = id;
    this.held.set(id, group);
    return group;
  }

  fill(group, item) {
    const u = this.unit, {x, y, w, h} = item;
    const said = JSON.stringify([x, y, w, h, item.lines, item.mark, item.label, item.share, item.flat, u]);
    if (group.said === said) return;
    group.said = said;
    group.setAttribute("aria-label", item.label);
    const left = x + (item.mark ? 26 : 12) * u, room = x + w - left - 10 * u;
    const parts = [
      element("title", {}, item.label),
      element("rect", {class: "box", x, y, width: w, height: h, rx: 6 * u}),
      element("rect", {class: "ring", x: x - 3 * u, y: y - 3 * u, width: w + 6 * u, height: h + 6 * u, rx: 8 * u}),
    ];
    const sideways = item.flat;
    if (item.mark) parts.push(element("text", {class: `state ${item.mark[1]}`, x: x + 10 * u, y: y + (sideways ? 24 : 19) * u}, item.mark[0]));
    item.lines.forEach(([text, kind], number) => {
      const size = (kind ? 11.84 : 12.8) * u;
      const second = sideways && number === 1;
      parts.push(element("text", {
        class: kind ?? "", x: second ? x + w - 10 * u : left, y: y + (sideways ? 24 : 19 + number * 18) * u,
        ...(second ? {"text-anchor": "end"} : {}),
      }, fit(text, sideways ? room / 2 : room - (number === 1 && item.share ? item.share.text.length * 8 * u : 0), size)));
    });
    if (item.share) {
      const place = {x: x + w - 8 * u, y: y + (sideways ? 24 : 37) * u, "text-anchor": "end"};
      parts.push(element("text", {class: `share ${item.share.style}`, ...place}, item.share.text));
    }
    group.replaceChildren(...parts);
  }

  thread(each) {
    const line = element("path", {class: `edge${each.off ? " off" : ""}`, d: curve(this.byId.get(each.from), this.byId.get(each.to))});
    line.dataset.from = each.from;
    line.dataset.to = each.to;
    return line;
  }

  // Threads of what is looked at.
  light(id) {
    const near = new Set([id]);
    if (id?.startsWith("service ")) this.plan.threads.filter(each => each.from === id).forEach(each => near.add(each.to));
    if (id?.startsWith("pod ")) this.plan.threads.filter(each => each.to === id).forEach(each => near.add(each.from));
    for (const line of this.back.querySelectorAll(".edge")) {
      const {from, to} = line.dataset;
      line.classList.toggle("lit", id !== null && (from === id || to === id || (near.has(from) && from.startsWith("slice ") && id.startsWith("service ")) ||
        (near.has(to) && to.startsWith("slice ") && id.startsWith("pod "))));
    }
  }

  // A packet's ways: [{from, to, share, style, broken}]; `pressed`: what was chosen.
  trace(ways, pressed) {
    this.svg.classList.toggle("traced", ways.length > 0);
    const met = new Set(ways.map(each => each.to));
    for (const [id, group] of this.held) {
      group.classList.toggle("met", met.has(id));
      group.classList.toggle("bad", met.has(id) && this.byId.get(id).share?.style === "bad");
      group.setAttribute("aria-pressed", String(pressed.includes(id)));
    }
    this.ways.replaceChildren();
    for (const each of ways) {
      if (this.byId.has(each.from) && this.byId.has(each.to)) this.way(each);
    }
  }

  way({from, to, share, style, broken}) {
    const d = curve(this.byId.get(from), this.byId.get(to)), u = this.unit;
    const line = element("path", {class: `way ${style}`, "stroke-width": (2 + 6 * share) * u, d});
    this.ways.append(line);
    if (!broken) {
      if (style !== "bad") this.ways.append(element("path", {class: "moving", "stroke-width": 2.5 * u, d}));
      return;
    }
    // It is drawn up to the break only; the rest is where it should have gone.
    const whole = line.getTotalLength(), reach = whole * BREAK;
    line.setAttribute("stroke-dasharray", `${reach} ${whole}`);
    const {x, y} = line.getPointAtLength(reach);
    const mark = element("g", {class: `break ${style}`});
    mark.append(
      element("circle", {cx: x, cy: y, r: 9 * u}),
      element("text", {x, y: y + 4.5 * u, "text-anchor": "middle"}, style === "doubt" ? "?" : "✕"),
    );
    this.ways.append(element("path", {class: `rest ${style}`, "stroke-width": 1.5 * u, d}), mark);
  }
}

// From the side of one box to the near side of the other.
function curve(from, to) {
  const forth = to.x >= from.x + from.w, back = to.x + to.w <= from.x;
  const x1 = forth ? from.x + from.w : from.x, y1 = from.y + from.h / 2;
  const x2 = back ? to.x + to.w : to.x, y2 = to.y + to.h / 2;
  if (forth || back) {
    const half = (x1 + x2) / 2;
    return `M${x1} ${y1}C${half} ${y1} ${half} ${y2} ${x2} ${y2}`;
  }
  // One above the other: out to the left, or to the right where there is no room.
  const right = from.x < 20, far = 30;
  const side = right ? Math.max(from.x + from.w, to.x + to.w) : Math.min(from.x, to.x);
  const a = right ? from.x + from.w : from.x, b = right ? to.x + to.w : to.x, out = right ? side + far : side - far;
  return `M${a} ${y1}C${out} ${y1} ${out} ${y2} ${b} ${y2}`;
}
