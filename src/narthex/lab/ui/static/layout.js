// Where everything of a picture goes. Pure: objects in, boxes and threads out; `unit` is a sixteenth of the letters' size.

const MOST_SERVICES = 150;
const MOST_PODS = 400;
const FEW = 5;
const MARKS = {ready: ["●", "ready"], "not ready": ["○", "waiting"], terminating: ["◐", "leaving"]};
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
  shown.slices = slices.filter(each => kept.has(each.service));
  return shown;
}

export function layOut(shown, counts, width, unit) {
  const columns = columnsOf(width, unit);
  const items = [{
    kind: "outside", key: "outside", x: 0, y: 26 * unit, w: columns.service, h: 46 * unit,
    lines: [["outside"], ["a client beyond the cluster", "small"]], label: "outside, a client beyond the cluster",
  }];
  const threads = [];
  const heads = [
    {x: 0, text: "Services"}, {x: columns.sliceAt, text: "EndpointSlices"}, {x: columns.nodeAt, text: "Nodes and pods"},
  ];
  const low = placeServices(shown, counts, columns, unit, items, threads);
  const cards = [];
  const deep = placeNodes(shown, columns, unit, items, cards);
  const there = new Set(items.map(each => idOf(each.kind, each.key)));
  return {
    items, cards, heads, width: columns.width, height: Math.max(low, deep) + 8 * unit,
    threads: threads.filter(each => there.has(each.from) && there.has(each.to)),
  };
}

function columnsOf(width, unit) {
  const between = (least, share, most) => Math.min(most * unit, Math.max(least * unit, share * width));
  const service = between(190, 0.27, 270), slice = between(130, 0.17, 190), gap = between(34, 0.055, 90);
  const sliceAt = service + gap, nodeAt = sliceAt + slice + gap;
  const whole = Math.max(width, nodeAt + 230 * unit);
  return {service, slice, sliceAt, nodeAt, node: whole - nodeAt, width: whole};
}

function placeServices(shown, counts, columns, unit, items, threads) {
  let y = 90 * unit, below = 90 * unit;
  const slices = Map.groupBy ? Map.groupBy(shown.slices, each => each.service) : grouped(shown.slices);
  for (const service of shown.services) {
    const mine = slices.get(service.key) ?? [];
    const tall = 84 * unit, pitch = 54 * unit;
    const top = Math.max(y, below + (mine.length * pitch - 10 * unit - tall) / 2);
    items.push({
      kind: "service", key: service.key, x: 0, y: top, w: columns.service, h: tall, thing: service,
      lines: serviceLines(service, counts), label: serviceLabel(service),
    });
    let at = Math.max(below, top + (tall - mine.length * pitch + 10 * unit) / 2);
    for (const each of mine) {
      items.push(sliceItem(each, columns, at, unit));
      threads.push({from: idOf("service", service.key), to: idOf("slice", each.key), off: false});
      for (const endpoint of each.endpoints) {
        if (endpoint.pod) {
          threads.push({from: idOf("slice", each.key), to: idOf("pod", endpoint.pod), off: !endpoint.ready});
        }
      }
      at += pitch;
    }
    if (mine.length) below = at;
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
  const said = `${ready} of ${each.endpoints.length} ready`, brief = `${ready}/${each.endpoints.length} ready`;
  return {
    kind: "slice", key: each.key, x: columns.sliceAt, y, w: columns.slice, h: 44 * unit, thing: each,
    lines: [[shortName(each.key)], [`${each.family} · ${brief}`, "small"]],
    label: `EndpointSlice ${each.key} of ${each.service}, ${each.family}, ${said}`,
  };
}

function placeNodes(shown, columns, unit, items, cards) {
  let y = 26 * unit;
  const edge = 10 * unit, tall = 44 * unit, inside = columns.node - 2 * edge;
  const most = Math.max(1, Math.floor((inside + edge) / (205 * unit)));
  const homeless = shown.pods.filter(each => !each.node);
  const homes = homeless.length ? [...shown.nodes, {key: "", ready: false, addresses: [], ports: []}] : shown.nodes;
  for (const node of homes) {
    const pods = shown.pods.filter(each => each.node === node.key);
    // Side by side only where there are many: threads to the second column go behind the first.
    const across = pods.length > FEW ? most : 1;
    const wide = (inside - (across - 1) * edge) / across;
    const rows = Math.ceil(pods.length / across);
    const high = 56 * unit + rows * (tall + edge);
    cards.push({x: columns.nodeAt, y, w: columns.node, h: high});
    if (node.key) {
      items.push({
        kind: "node", key: node.key, x: columns.nodeAt + edge, y: y + edge, w: inside, h: 38 * unit, thing: node,
        lines: [[node.key], [node.addresses[0] ?? "no address", "small"]], mark: node.ready ? MARKS.ready : MARKS["not ready"],
        label: `Node ${node.key}, ${node.ready ? "ready" : "not ready"}, ${node.addresses.join(", ")}`, flat: true,
      });
    } else {
      cards.at(-1).text = "on no node";
    }
    pods.forEach((pod, number) => items.push({
      kind: "pod", key: pod.key, thing: pod, w: wide, h: tall, mark: MARKS[pod.state],
      x: columns.nodeAt + edge + (number % across) * (wide + edge),
      y: y + 56 * unit + Math.floor(number / across) * (tall + edge),
      lines: [[shortName(pod.key)], [pod.addresses[0] ?? "no address yet", "small"]],
      label: `Pod ${pod.key}, ${pod.state}, ${pod.node ? `on ${pod.node}` : "on no node"}, ${pod.addresses.join(", ")}`,
    }));
    y += high + 14 * unit;
  }
  return y;
}
