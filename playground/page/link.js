// The input as the fragment of an address, which no browser sends to a server: compressed JSON in base64url.

const MARK = "#v1.";
const LARGEST = 32 << 20;

export async function fragmentOf(input) {
  const files = await Promise.all(input.files.map(async ([name, content]) =>
    typeof content === "string" ? [name, content] : [name, {base64: toBase64(content)}]));
  const text = new TextEncoder().encode(JSON.stringify({...input, files}));
  const packed = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(packed).arrayBuffer());
  return MARK + toBase64(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// The input of a fragment; null if there is none. Throws an Error for one that is damaged.
export async function inputOf(fragment) {
  if (!fragment.startsWith(MARK)) return null;
  const bytes = fromBase64(fragment.slice(MARK.length).replaceAll("-", "+").replaceAll("_", "/"));
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const parts = [];
  let size = 0;
  for (let part; !(part = await reader.read()).done;) {
    size += part.value.length;
    if (size > LARGEST) throw new Error("the link holds too much");
    parts.push(part.value);
  }
  const {source, destination, options, files} = JSON.parse(await new Blob(parts).text());
  const text = value => typeof value === "string" ? value : "";
  return {
    source: text(source), destination: text(destination),
    options: Object.fromEntries(Object.entries(options ?? {}).map(([name, value]) => [name, text(value)])),
    files: [...files].map(([name, content]) =>
      [text(name), typeof content === "string" ? content : fromBase64(text(content.base64))]),
  };
}

function toBase64(bytes) {
  const step = 0x8000;
  let binary = "";
  for (let at = 0; at < bytes.length; at += step) binary += String.fromCharCode(...bytes.subarray(at, at + step));
  return btoa(binary);
}

const fromBase64 = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
