// The page: what the server reports, and what the user selects.

import {Drawing} from "./drawing.js";
import {Walk} from "./keys.js";
import {chosen, idOf, layOut} from "./layout.js";
import {answer, listEnds, outline, sharesOf, waysOf} from "./path.js";

const $ = id => document.getElementById(id);
const SENDERS = new Set(["pod", "node", "outside"]);

let picture = {nodes: [], pods: [], services: [], slices: [], problems: [], title: ""};
let counts = {known: false, of: () => ({})};
let totals = null; // What was counted last, and when.
let source = null, target = null, found = null, asking = 0;
let asked = ["", ""]; // Sender and destination as written in the form.

const drawing = new Drawing($("picture"));
const walk = new Walk(drawing, choose, look);

function draw() {
  const unit = parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
  const shown = chosen(picture, $("filter").value);
  if (found) locate();
  const apart = new Set([source, target]);
  const plan = layOut(shown, counts, Math.max($("scroll").clientWidth - 24 * unit, 280 * unit), unit, apart);
  const ways = waysOf(found, source, target, plan, shown.slices);
  for (const [id, share] of sharesOf(ways)) plan.byId.get(id).share = share;
  drawing.show(plan, unit);
  drawing.trace(ways, [source, target].filter(Boolean));
  walk.settle();
  drawing.light(walk.at === document.activeElement?.dataset?.id ? walk.at : null);
  $("empty").hidden = picture.nodes.length + picture.services.length > 0;
  const problems = shown.left ? [...picture.problems, `${shown.left} more are not drawn: narrow it down with Show`] : picture.problems;
  list("problems", problems);
}

function list(name, texts) {
  $(name).hidden = texts.length === 0;
  $(name).replaceChildren(...texts.map(text => option("li", text)));
}

function option(kind, text) {
  const made = document.createElement(kind);
  if (kind === "option") made.value = text;
  else made.textContent = text;
  return made;
}

function offer() {
  const senders = ["outside", ...picture.nodes.map(each => each.key), ...picture.pods.map(each => each.key)];
  $("senders").replaceChildren(...senders.slice(0, 500).map(text => option("option", text)));
  const targets = [
    ...picture.services.flatMap(each => each.ports.map(port => withPort(each.key, port.port))),
    ...picture.nodes.flatMap(each => each.ports.map(port => withPort(each.key, port))),
    ...picture.pods.flatMap(each => each.ports.map(port => withPort(each.key, port))),
  ];
  $("targets").replaceChildren(...targets.slice(0, 500).map(text => option("option", text)));
}

function withPort(key, port) {
  const [number, protocol] = port.split("/");
  return `${key.includes(":") ? `[${key}]` : key}:${number}/${protocol}`;
}

// Choosing in the picture.

function choose(id) {
  const item = drawing.byId.get(id);
  if (!item) return;
  const ended = source && target;
  if (!source || ended) {
    if (item.kind === "crowd") {
      say("These are many pods: narrow the picture down with Show, or write the name of one.", true);
      return;
    }
    if (!SENDERS.has(item.kind)) {
      say(`${item.kind === "service" ? "A Service" : "A slice"} sends nothing: begin with a pod, a node or outside.`, true);
      return;
    }
    clear();
    source = id;
    $("from").value = item.key;
    say(`From ${item.key}. Now choose where the packet goes.`);
    draw();
    return;
  }
  if (id === source) {
    clear();
    return;
  }
  if (item.kind === "slice" || item.kind === "crowd") {
    say(`${item.kind === "slice" ? "A slice has no address" : "These are many pods"}: choose a Service, a pod or a node.`, true);
    return;
  }
  target = id;
  $("to").value = destinationOf(item);
  ask();
}

function destinationOf(item) {
  if (item.kind === "outside") return "outside:80/tcp";
  const ports = item.kind === "service" ? item.thing.ports.map(each => each.port) : item.thing.ports;
  if (ports.length) return withPort(item.key, ports[0]);
  // No port is known: a ping.
  return item.kind === "node" ? `${item.thing.addresses[0] ?? item.key}/icmp` : `${item.key}/icmp`;
}

function clear() {
  source = target = found = null;
  asked = ["", ""];
  asking += 1;
  $("from").value = $("to").value = "";
  reveal(false);
  say("");
  draw();
}

function reveal(found) {
  $("answer").hidden = $("result").hidden = $("steps").hidden = !found;
}

function idFor(text, kinds) {
  const name = text.replace(/\/(tcp|udp|sctp|icmp)$/i, "").replace(/:[^:\]]*$/, "");
  const things = {pod: picture.pods, node: picture.nodes, service: picture.services};
  const ids = kinds.flatMap(kind => [name, `default/${name}`].filter(key => things[kind].some(each => each.key === key)).map(key => idOf(kind, key)));
  return ids[0] ?? null;
}

// The form may be sent before the picture has come.
function locate() {
  source ??= asked[0] === "outside" ? idOf("outside", "outside") : idFor(asked[0], ["pod", "node"]);
  target ??= idFor(asked[1], ["service", "pod", "node"]);
}

async function ask(again = false) {
  const turn = asking += 1;
  const from = $("from").value.trim(), to = $("to").value.trim();
  if (!again) say(`Tracing ${from} to ${to} …`);
  let got;
  try {
    const response = await fetch(`/path?${new URLSearchParams({from, to})}`);
    got = response.ok ? await response.json() : {error: `the server says ${response.status}`};
  } catch {
    got = {error: "the server cannot be reached"};
  }
  if (turn !== asking) return;
  found = got;
  reveal(!found.error);
  if (found.error) {
    say(found.error, true);
  } else {
    answer(found, $);
    listEnds(found, $("ends"));
    $("steps-title").textContent = found.heading[0];
    $("rules").textContent = found.heading[1];
    $("tree").replaceChildren(...outline(found.outline));
    const ends = `${found.ends.length} end${found.ends.length === 1 ? "" : "s"}`;
    say(`${found.packet}: ${found.verdict.word}, ${ends}. ${found.agree ? "Plan and rules agree." : "Plan and rules DIFFER."}`,
      found.verdict.style === "bad");
    if (!again) $("answer").scrollIntoView({block: "nearest"});
  }
  draw();
}

let sayBefore = "";
function say(text, bad = false) {
  if (text !== sayBefore) $("said").textContent = sayBefore = text;
  $("said").classList.toggle("bad", bad);
}

function look(id) {
  drawing.light(id);
  const item = drawing.byId.get(id);
  if (!item) return;
  $("about").hidden = false;
  $("about-title").textContent = `About ${item.key}`;
  $("facts").replaceChildren(...factsOf(item).flatMap(([name, value]) => [option("dt", name), option("dd", value)]));
}

function factsOf({kind, thing}) {
  if (kind === "outside") return [["what", "a client beyond the cluster"]];
  if (kind === "crowd") return [["what", `${thing.pods.length} pods`], ["of", thing.service], ["node", thing.node || "none"], ["ready", `${thing.ready}`]];
  const addresses = ["addresses", thing.addresses?.join(", ") || "none"];
  if (kind === "node") return [["kind", "Node"], ["state", thing.ready ? "ready" : "not ready"], addresses, ["node ports", thing.ports.join(", ") || "none"]];
  if (kind === "pod") return [["kind", "Pod"], ["state", thing.state], ["node", thing.node || "none"], addresses, ["called on", thing.ports.join(", ") || "nothing"]];
  if (kind === "slice") return [["kind", "EndpointSlice"], ["Service", thing.service], ["ports", thing.ports.join(", ")], ["endpoints", thing.endpoints.map(each => `${each.addresses.join(" ")}${each.ready ? "" : each.terminating ? " (going away)" : " (not ready)"}`).join(", ") || "none"]];
  const ports = thing.ports.map(each => `${each.port}${each.name ? ` ${each.name}` : ""}${each.nodePort ? `, node port ${each.nodePort}` : ""}`);
  const {total} = counts.of(thing.key);
  return [["kind", "Service"], ["type", thing.type], thing.name ? ["name", thing.name] : addresses, ["ports", ports.join("; ") || "none"], ["ready", `${thing.ready}`],
    ["connections", counts.known && total !== undefined ? `${total} since the proxies began` : "unknown"]];
}

// What the server reports.

function listen() {
  const stream = new EventSource("/events");
  stream.addEventListener("open", () => live("live", true));
  stream.addEventListener("error", () => live("the connection is lost, trying again …", false));
  stream.addEventListener("picture", event => {
    picture = JSON.parse(event.data);
    $("title").textContent = picture.title;
    document.title = `${picture.title} · Narthex`;
    live(picture.counted ? "live" : "live; connections are not counted here", true);
    offer();
    draw();
    if (found) askSoon();
  });
  stream.addEventListener("counts", event => {
    count(JSON.parse(event.data));
    draw();
  });
  stream.addEventListener("faults", event => {
    list("faults", JSON.parse(event.data));
    if (found) askSoon();
  });
  stream.addEventListener("trouble", event => live(JSON.parse(event.data).message, false));
}

function live(text, good) {
  if ($("live").textContent !== text) $("live").textContent = text;
  $("live").classList.toggle("good", good);
}

function count(reported) {
  const now = performance.now(), before = totals;
  totals = {at: now, services: reported.services};
  counts = {
    known: reported.known,
    of: key => {
      const total = reported.services[key];
      const past = before?.services[key];
      const rate = past === undefined || total === undefined ? 0 : Math.max(0, total - past) / Math.max(0.5, (now - before.at) / 1000);
      return {total, rate};
    },
  };
}

let soon = 0;
function askSoon() {
  clearTimeout(soon);
  soon = setTimeout(() => { if (found && $("from").value && $("to").value) ask(true); }, 400);
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  asked = [$("from").value.trim(), $("to").value.trim()];
  source = target = null;
  locate();
  ask();
});
$("clear").addEventListener("click", clear);
$("filter").addEventListener("input", draw);
addEventListener("keydown", event => {
  if (event.key === "Escape" && event.target !== $("filter") && event.target !== $("theme")) clear();
});
new ResizeObserver(draw).observe($("scroll"));
listen();
