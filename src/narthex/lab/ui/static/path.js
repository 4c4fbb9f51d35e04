// What was found of a packet's path: as lines over the picture, as the answer on top, as a list of ends, as an outline.

import {idOf, shortName} from "./layout.js";

const MOST_ENDS = 8;
const GOOD = new Set(["good", "plain"]);
const RANK = {good: 0, plain: 0, doubt: 1, bad: 2};
const SIGNS = {good: "✓", bad: "✕", doubt: "?", plain: "→"};

export const percent = share => `${(share * 100).toFixed(share * 100 % 1 ? 2 : 0)} %`;

// Lines over the picture: [{from, to, share, style, broken}]. To an endpoint they go by way of its slice. A line that only
// failing packets take has their style; the last one of a packet that does not arrive is broken.
export function waysOf(found, source, target, plan, slices) {
  if (!source || !found || found.error) return [];
  const at = id => plan.byId.has(id) ? id : plan.homes.get(id) ?? null;
  const [from, to] = [at(source), target && at(target)];
  if (!from) return [];
  const service = found.service ? at(idOf("service", found.service)) : null;
  const mine = slices.filter(each => each.service === found.service);
  const ways = new Map();
  const add = (start, stop, end, broken) => {
    const name = JSON.stringify([start, stop, broken]);
    const way = ways.get(name) ?? {from: start, to: stop, share: 0, style: end.style, broken};
    way.share += end.probability;
    if (RANK[end.style] < RANK[way.style]) way.style = end.style;
    ways.set(name, way);
  };
  for (const end of found.ends) {
    const there = at(idOf("pod", end.key)) ?? at(idOf("node", end.key)) ?? (service && service !== from ? null : to);
    const stops = service && service !== from ? [from, service] : [from];
    const slice = service && mine.find(each => each.endpoints.some(endpoint => endpoint.addresses.includes(end.address)));
    if (there && slice && plan.byId.has(idOf("slice", slice.key))) stops.push(idOf("slice", slice.key));
    if (there) stops.push(there);
    stops.slice(1).forEach((stop, number) => add(stops[number], stop, end, !end.arrives && number === stops.length - 2));
  }
  return [...ways.values()];
}

// How likely each box is the end: {id: {text, style}}.
export function sharesOf(ways) {
  const sums = new Map();
  for (const each of ways) {
    if (!each.broken && /^(service|slice) /.test(each.to)) continue;
    const before = sums.get(each.to) ?? {share: 0, style: each.style};
    sums.set(each.to, {share: before.share + each.share, style: RANK[each.style] > RANK[before.style] ? each.style : before.style});
  }
  return new Map([...sums].map(([id, {share, style}]) => [id, {
    text: GOOD.has(style) ? percent(share) : `${SIGNS[style]} ${percent(share)}`, style,
  }]));
}

function made(kind, {text = undefined, name = "", parts = []} = {}) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  element.append(...parts);
  return element;
}

// A text in which commands are between backticks.
const withCode = text => text.split("`").map((part, number) => number % 2 ? made("code", {text: part}) : part);

// The verdict, its reasons and causes, and the command whose output is missing.
export function answer(found, $) {
  const {verdict} = found;
  const explains = found.findings.some(each => each.explains);
  $("answer").className = `answer ${verdict.style}`;
  $("verdict").className = verdict.style;
  $("verdict").replaceChildren(
    made("span", {text: `${SIGNS[verdict.style]} ${verdict.word}`, name: "sign"}), `: ${found.packet}`);
  const several = verdict.reasons.length > 1;
  $("reasons").replaceChildren(
    ...verdict.reasons.map(each => made("li", {parts: [
      ...(several ? [made("span", {text: each.share, name: `share ${each.style}`})] : []), each.text,
    ]})),
    ...verdict.doubts.map(text => made("li", {text, name: "doubt"})),
    ...found.differences.map(text => made("li", {text: `plan and rules differ: ${text}`, name: "doubt"})),
  );
  $("causes").replaceChildren(...found.findings.flatMap((each, number) => {
    const word = `${!number && explains ? "Why not" : "Also"}${each.certain ? "" : " (likely)"}`;
    return [
      made("h3", {text: `${word}: ${each.sentence}`}),
      made("ul", {name: "seen", parts: each.evidence.map(text => made("li", {text}))}),
      ...(each.advice ? [made("p", {parts: withCode(each.advice)})] : []),
      made("p", {text: `More in ${each.page}`, name: "hint"}),
    ];
  }));
  $("next").hidden = !verdict.next;
  $("command").textContent = verdict.next;
}

export function listEnds(found, list) {
  const ends = [...found.ends].sort((one, other) => RANK[other.style] - RANK[one.style]);
  const shown = ends.length > MOST_ENDS + 1 ? ends.slice(0, MOST_ENDS) : ends;
  const left = ends.slice(shown.length);
  const lines = shown.map(end => {
    const name = end.endpoint ? (end.key ? shortName(end.key) : end.endpoint) : end.text;
    const sees = end.masquerade ? "sees the node instead of the sender" : "sees the sender itself";
    const more = [end.endpoint, GOOD.has(end.style) ? sees : end.endpoint ? end.text : ""].filter(Boolean).join(", ");
    return made("li", {parts: [
      made("span", {text: percent(end.probability), name: `share ${end.style}`}),
      made("span", {parts: [name, made("small", {text: more})]}),
    ]});
  });
  const together = left.reduce((sum, end) => sum + end.probability, 0);
  if (left.length) {
    lines.push(made("li", {parts: [
      made("span", {text: percent(together), name: "share"}), made("span", {text: `${left.length} more together`}),
    ]}));
  }
  list.replaceChildren(...lines);
}

export function outline(items) {
  return items.map(each => each.groups ? made("ul", {name: "split", parts: each.groups.map(group)}) : row(each));
}

function row({stage, text, style, notes, below}) {
  const place = !stage && style === "strong";
  const end = Object.values(SIGNS).includes(stage);
  const parts = place ? [text] : [
    made("span", {text: stage, name: "stage-name"}),
    made("span", {parts: [text, ...notes.map(note => made("small", {text: note.text, name: note.style}))]}),
  ];
  const line = made("div", {name: `row ${style}${place ? " place" : ""}${end ? " end" : ""}`, parts});
  return below.length ? made("div", {parts: [line, made("div", {name: "below", parts: outline(below)})]}) : line;
}

function group({heads, more, rows}) {
  const style = heads[0]?.style ?? "plain";
  return made("li", {name: `group ${style}`, parts: [
    ...heads.map(each => made("div", {name: "head", parts: [
      made("span", {text: each.share, name: `share ${each.style}`}),
      made("span", {parts: [made("b", {text: each.place}), each.name]}),
    ]})),
    ...(more ? [made("div", {text: more})] : []),
    ...outline(rows),
  ]});
}
