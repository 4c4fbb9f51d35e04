// Where everything of a picture goes. Pure: objects in, boxes and threads out; `unit` is a sixteenth of the letters' size.

const MOST_SERVICES = 150;
const MOST_PODS = 400;
const FEW = 5;
const MOST_APART = 8; // Pods of one Service on one node that have boxes of their own; more are one box.
const MARKS = {
  ready: ["●", "ready"], "not ready": ["○", "waiting"], terminating: ["◐", "leaving"], completed: ["✓", "ready"], failed: ["✕", "waiting"],
};
const TOP = 124; // Where the cluster begins, below what is outside of it.
const LETTER = 0.605; // Width of a letter by its height, in the fonts of one width.

export const idOf = (kind, key) => `${kind} ${key}`;

export const shortName = key => key.startsWith("default/") ? key.slice(8) : key;

export function fit(text, width, size) {
  const most = Math.max(4, Math.floor(width / (size * LETTER)));
  if (text.length <= most) return text;
  const tail = Math.floor((most - 1) * 0.4);
  return `${text.slice(0, most - 1 - tail)}…${text.slice(text.length - tail)}`;
}

// The parts of the drawing whose names contain the text, and everything connected to them.
export function chosen(picture, query) {
  const text = query.trim().toLowerCase();
  const has = thing => thing.key.toLowerCase().includes(text);
  const services = picture.services.filter(has);
  const named = new Set(services.map(each => each.key));
  const slices = picture.slices.filter(each => named.has(each.service) || has(each));
  const led = new Set(slices.flatMap(each => each.endpoints.map(endpoint => endpoint.pod)));
  const pods = picture.pods.filter(each => has(each) || led.has(each.key));
  const shown = {
    nodes: picture.nodes, services: services.slice(0, MOST_SERVICES), pods: pods.slice(0, MOST_PODS), slices: [],
    left: Math.max(0, services.length - MOST_SERVICES) + Math.max(0, pods.length - MOST_PODS),
  };
  const kept = new Set(shown.services.map(each => each.key));
  shown.slices = merged(slices.filter(each => kept.has(each.service)));
  return shown;
}

// Slices of a Service that hold the same pods in another IP family are one.
function merged(slices) {
  const made = new Map();
  for (const each of slices) {
    const pods = each.endpoints.map(endpoint => [endpoint.pod || endpoint.address, endpoint.ready].join(" ")).sort();
    const name = JSON.stringify([each.service, each.ports, pods]);
    const twin = made.get(name);
    if (!twin || twin.families.includes(each.family)) {
      const endpoints = each.endpoints.map(endpoint => ({...endpoint, addresses: [endpoint.address]}));
      made.set(twin ? `${name} ${each.key}` : name, {...each, families: [each.family], endpoints});
      continue;
    }
    twin.families.push(each.family);
    const held = new Map(twin.endpoints.map(endpoint => [endpoint.pod, endpoint]));
    for (const endpoint of each.endpoints) held.get(endpoint.pod).addresses.push(endpoint.address);
  }
  return [...made.values()];
}

// `apart`: ids of pods that have boxes of their own, however many there are. What is in another's box has its id in `homes`.
export function layOut(shown, counts, width, unit, apart = new Set()) {
  const columns = columnsOf(width, unit);
  const items = [{
    kind: "outside", key: "outside", x: 0, y: 26 * unit, w: columns.service, h: 46 * unit,
    lines: [["outside"], ["any client", "small"]], label: "outside, a client beyond the cluster",
  }];
  const threads = [];
  const low = placeServices(shown, counts, columns, unit, items, threads);
  const cards = [], homes = new Map();
  const deep = placeNodes(shown, columns, unit, items, cards, homes, apart);
  const byId = new Map(items.map(each => [idOf(each.kind, each.key), each]));
  return {
    items, byId, homes, cards, width: columns.width, height: Math.max(low, deep) + 8 * unit, rule: 90 * unit,
    heads: [
      {x: 0, y: 14 * unit, text: "Outside the cluster"}, {x: 0, y: 112 * unit, text: "Services"},
      ...(columns.slice ? [{x: columns.sliceAt, y: 112 * unit, text: "EndpointSlices"}] : []),
      {x: columns.nodeAt, y: 112 * unit, text: "Nodes and pods"},
    ],
    threads: joined(threads, byId, homes),
  };
}

// Threads between boxes that there are, each once; it is off where all its parts are.
function joined(threads, byId, homes) {
  const found = new Map();
  for (const each of threads) {
    const to = homes.get(each.to) ?? each.to;
    if (!byId.has(each.from) || !byId.has(to)) continue;
    const name = JSON.stringify([each.from, to]);
    found.set(name, {from: each.from, to, off: each.off && (found.get(name)?.off ?? true)});
  }
  return [...found.values()];
}

function columnsOf(width, unit) {
  const between = (least, share, most) => Math.min(most * unit, Math.max(least * unit, share * width));
  if (width < 620 * unit) {
    // On a narrow screen the slices are left out.
    return {service: width * 0.45, slice: 0, sliceAt: 0, nodeAt: width * 0.56, node: width * 0.44, width};
  }
  const service = between(190, 0.27, 270), slice = between(130, 0.17, 190), gap = between(34, 0.055, 90);
  const sliceAt = service + gap, nodeAt = sliceAt + slice + gap;
  const whole = Math.max(width, nodeAt + 230 * unit);
  return {service, slice, sliceAt, nodeAt, node: whole - nodeAt, width: whole};
}

function placeServices(shown, counts, columns, unit, items, threads) {
  let y = TOP * unit, below = TOP * unit;
  const slices = Map.groupBy ? Map.groupBy(shown.slices, each => each.service) : grouped(shown.slices);
  for (const service of shown.services) {
    const mine = slices.get(service.key) ?? [];
    const boxes = columns.slice ? mine : [];
    const tall = 84 * unit, pitch = 54 * unit;
    const top = Math.max(y, below + (boxes.length * pitch - 10 * unit - tall) / 2);
    items.push({
      kind: "service", key: service.key, x: 0, y: top, w: columns.service, h: tall, thing: service,
      lines: serviceLines(service, counts), label: serviceLabel(service),
    });
    let at = Math.max(below, top + (tall - boxes.length * pitch + 10 * unit) / 2);
    for (const each of mine) {
      const own = idOf("service", service.key);
      const from = columns.slice ? idOf("slice", each.key) : own;
      if (columns.slice) {
        items.push(sliceItem(each, columns, at, unit));
        threads.push({from: own, to: from, off: false});
        at += pitch;
      }
      for (const endpoint of each.endpoints) {
        if (endpoint.pod) threads.push({from, to: idOf("pod", endpoint.pod), off: !endpoint.ready});
      }
    }
    if (boxes.length) below = at;
    y = top + tall + 12 * unit;
  }
  return Math.max(y, below);
}

function grouped(slices) {
  const found = new Map();
  for (const each of slices) found.set(each.service, [...(found.get(each.service) ?? []), each]);
  return found;
}

function serviceLines(service, counts) {
  const place = service.type === "ExternalName" ? service.name : service.addresses[0] ?? "no address";
  const ports = service.ports.map(each => each.port + (each.nodePort ? ` (${each.nodePort})` : "")).join(", ");
  return [[shortName(service.key)], [`${service.type} ${place}`, "small"], [ports || "no port", "small"], [counted(service, counts), "small"]];
}

function counted(service, counts) {
  if (!counts.known) return `${service.ready} ready`;
  const {total, rate} = counts.of(service.key);
  return total === undefined ? `${service.ready} ready` : `${total} connections` + (rate >= 0.5 ? `, ${Math.round(rate)}/s` : "");
}

function serviceLabel(service) {
  return `Service ${service.key}, ${service.type}, ${service.addresses.join(", ") || "no address"}, ` +
    `${service.ready} ready endpoint${service.ready === 1 ? "" : "s"}`;
}

function sliceItem(each, columns, y, unit) {
  const ready = each.endpoints.filter(endpoint => endpoint.ready).length;
  const said = `${ready} of ${each.endpoints.length} ready`, brief = `${ready}/${each.endpoints.length}`;
  return {
    kind: "slice", key: each.key, x: columns.sliceAt, y, w: columns.slice, h: 44 * unit, thing: each,
    lines: [[shortName(each.key)], [each.families.length > 1 ? `IPv4/6, ${brief}` : `${each.families[0]}, ${brief} ready`, "small"]],
    label: `EndpointSlice ${each.key} of ${each.service}, ${each.families.join(" and ")}, ${said}`,
  };
}

function placeNodes(shown, columns, unit, items, cards, homes, apart) {
  let y = TOP * unit;
  const edge = 10 * unit, tall = 44 * unit, inside = columns.node - 2 * edge;
  const most = Math.max(1, Math.floor((inside + edge) / (205 * unit)));
  const flat = inside >= 220 * unit, head = (flat ? 38 : 44) * unit, above = head + 18 * unit;
  const homeless = shown.pods.filter(each => !each.node);
  const places = homeless.length ? [...shown.nodes, {key: "", ready: false, addresses: [], ports: []}] : shown.nodes;
  const served = servedBy(shown.slices);
  for (const node of places) {
    const boxes = boxesOf(node.key, shown.pods.filter(each => each.node === node.key), served, apart, homes);
    // Side by side only where there are many: threads to the second column go behind the first.
    const across = boxes.length > FEW ? most : 1;
    const wide = (inside - (across - 1) * edge) / across;
    const rows = Math.ceil(boxes.length / across);
    const high = above + rows * (tall + edge);
    cards.push({x: columns.nodeAt, y, w: columns.node, h: high});
    if (node.key) {
      items.push({
        kind: "node", key: node.key, x: columns.nodeAt + edge, y: y + edge, w: inside, h: head, thing: node,
        lines: [[node.key], [node.addresses[0] ?? "no address", "small"]], mark: node.ready ? MARKS.ready : MARKS["not ready"],
        label: `Node ${node.key}, ${node.ready ? "ready" : "not ready"}, ${node.addresses.join(", ")}`, flat,
      });
    } else {
      cards.at(-1).text = "on no node";
    }
    boxes.forEach((box, number) => items.push({
      ...box, w: wide, h: tall, x: columns.nodeAt + edge + (number % across) * (wide + edge),
      y: y + above + Math.floor(number / across) * (tall + edge),
    }));
    y += high + 14 * unit;
  }
  return y;
}

// The Services of each pod, as text.
function servedBy(slices) {
  const found = new Map();
  for (const each of slices) {
    for (const {pod} of each.endpoints) {
      if (pod) found.set(pod, (found.get(pod) ?? new Set()).add(each.service));
    }
  }
  return new Map([...found].map(([pod, services]) => [pod, [...services].sort().join(", ")]));
}

// A box for each pod of a node, or one for many of the same Services.
function boxesOf(node, pods, served, apart, homes) {
  const together = new Map();
  for (const pod of pods) {
    const services = apart.has(idOf("pod", pod.key)) ? "" : served.get(pod.key) ?? "";
    if (services) together.set(services, [...(together.get(services) ?? []), pod]);
  }
  const crowded = new Set([...together.values()].filter(held => held.length > MOST_APART).flat());
  const boxes = pods.filter(each => !crowded.has(each)).map(podBox);
  for (const [service, held] of together) {
    if (held.length <= MOST_APART) continue;
    const key = `${node} ${service}`, ready = held.filter(each => each.state === "ready").length;
    const brief = `${ready} of ${held.length} ready`;
    for (const pod of held) homes.set(idOf("pod", pod.key), idOf("crowd", key));
    boxes.push({
      kind: "crowd", key, thing: {pods: held, service, node, ready},
      mark: MARKS[ready === held.length ? "ready" : ready ? "terminating" : "not ready"],
      lines: [[`${held.length} pods of ${shortName(service)}`], [brief, "small"]],
      label: `${held.length} pods of ${service}, ${brief}, ${node ? `on ${node}` : "on no node"}`,
    });
  }
  return boxes;
}

function podBox(pod) {
  return {
    kind: "pod", key: pod.key, thing: pod, mark: MARKS[pod.state],
    lines: [[shortName(pod.key)], [pod.addresses[0] ?? "no address yet", "small"]],
    label: `Pod ${pod.key}, ${pod.state}, ${pod.node ? `on ${pod.node}` : "on no node"}, ${pod.addresses.join(", ")}`,
  };
}
