// What was found of a packet's way: as lines over the picture, as a list, as a tree.

import {idOf, shortName} from "./layout.js";

const WORDS = {
  delivered: "delivered", dropped: "dropped in silence", rejected: "refused at once", unsupported: "not known",
  "not-ours": "no Service rule sends it on: it goes where routing takes it",
};

export const percent = share => `${(share * 100).toFixed(share * 100 % 1 ? 2 : 0)} %`;

// Lines over the picture: [{from, to, share}]. To an endpoint they go by way of its slice.
export function waysOf(found, source, target, byId, slices) {
  if (!source || !found || found.error) return [];
  const service = found.service ? idOf("service", found.service) : null;
  const by = service && byId.has(service) ? service : null;
  const mine = slices.filter(each => each.service === found.service);
  const ways = new Map();
  const add = (from, to, share) => {
    const name = `${from} ${to}`;
    ways.set(name, {from, to, share: share + (ways.get(name)?.share ?? 0)});
  };
  if (by) add(source, by, 1);
  for (const end of found.ends) {
    const there = [idOf("pod", end.key), idOf("node", end.key)].find(id => byId.has(id)) ??
      (end.disposition === "not-ours" && target !== by ? target : null);
    if (!there) continue;
    const address = end.endpoint.replace(/:\d+$/, "").replace(/[[\]]/g, "");
    const slice = by && mine.find(each => each.endpoints.some(endpoint => endpoint.address === address));
    if (slice && byId.has(idOf("slice", slice.key))) {
      add(by, idOf("slice", slice.key), end.probability);
      add(idOf("slice", slice.key), there, end.probability);
    } else {
      add(by ?? source, there, end.probability);
    }
  }
  return [...ways.values()];
}

// How likely each box is the end: {id: "33.33 %"}.
export function sharesOf(ways) {
  const sums = new Map();
  for (const each of ways) {
    if (!/^(service|slice) /.test(each.to)) sums.set(each.to, (sums.get(each.to) ?? 0) + each.share);
  }
  return new Map([...sums].map(([id, share]) => [id, percent(share)]));
}

export function tell(found, ends, tree) {
  ends.replaceChildren(...found.ends.map(end => {
    const line = document.createElement("li");
    const share = document.createElement("span");
    share.className = "share";
    share.textContent = percent(end.probability);
    const what = document.createElement("span");
    what.textContent = end.endpoint ? `${end.key ? shortName(end.key) : end.endpoint}` : WORDS[end.disposition] ?? end.disposition;
    const more = document.createElement("small");
    more.textContent = end.endpoint
      ? `${end.endpoint}${end.masquerade ? ", sees the node instead of the sender" : ", sees the sender itself"}`
      : end.note;
    what.append(more);
    line.append(share, what);
    return line;
  }));
  tree.textContent = found.text;
}
