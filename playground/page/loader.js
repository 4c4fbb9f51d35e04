// Starts Narthex in a worker. Everything is loaded here; from then on, neither the page nor the worker can send a request.

import {SIZES} from "./built.js";

const WASM = "pyodide.asm.wasm";
const LIBRARY = "python_stdlib.zip";
const MODULES = "narthex.zip";
const GALLERY = "gallery.json";
// What a page and its worker may do when everything is loaded: run what is there.
const CLOSED = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src blob:; style-src 'self'; img-src 'self'; " +
  "connect-src 'none'; base-uri 'none'; form-action 'none'";

// Progress is a number of percents with a key of `texts.js`. Loading is the first half of it.
export async function start(policy, progress) {
  const loaded = new Map();
  const total = [WASM, LIBRARY, MODULES].reduce((sum, name) => sum + SIZES[name], 0);
  const count = (name, size) => {
    loaded.set(name, (loaded.get(name) ?? 0) + size);
    progress(Math.min(50, [...loaded.values()].reduce((sum, each) => sum + each, 0) / total * 50), "loading");
  };
  const [wasm, library, modules, gallery] = await Promise.all([
    load(WASM, count).then(response => compiled(response)),
    load(LIBRARY, count).then(response => response.arrayBuffer()),
    load(MODULES, count).then(response => response.arrayBuffer()),
    load(GALLERY, () => {}).then(response => response.json()),
  ]);
  close();
  progress(55, "starting");
  const worker = begin(policy);
  const waiting = new Map();
  const ready = new Promise((resolve, reject) => {
    worker.onerror = event => reject(new Error(event.message || "the worker ended"));
    worker.onmessage = ({data}) => {
      if (data.listens) worker.postMessage({wasm, library, modules}, [library, modules]);
      if (data.progress) progress(data.progress, data.progress < 100 ? "preparing" : "ready");
      if (data.progress === 100) resolve();
      if (data.failed) reject(new Error(data.failed));
      if (data.id === undefined) return;
      const {done, failed} = waiting.get(data.id);
      waiting.delete(data.id);
      if (data.error) failed(new Error(data.error)); else done(data.answer);
    };
  });
  await ready;
  let last = 0;
  const trace = request => new Promise((done, failed) => {
    waiting.set(++last, {done, failed});
    worker.postMessage({id: last, request});
  });
  return {trace, gallery};
}

async function load(name, count) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  const counted = new TransformStream({
    transform(chunk, controller) { count(name, chunk.byteLength); controller.enqueue(chunk); },
  });
  return new Response(response.body.pipeThrough(counted), {headers: {"content-type": name === WASM ? "application/wasm" : "application/octet-stream"}});
}

const compiled = response => WebAssembly.compileStreaming(response);

// Forbid all further requests. A policy can only be made stricter, and a worker from a blob gets that of its page.
function close() {
  const meta = document.createElement("meta");
  meta.httpEquiv = "Content-Security-Policy";
  meta.content = CLOSED;
  document.head.append(meta);
}

// The policy permits no worker from an address, but a script from one.
function begin(policy) {
  const address = new URL("worker.js", document.baseURI).href;
  const blob = URL.createObjectURL(new Blob([`import(${JSON.stringify(address)});`], {type: "text/javascript"}));
  return new Worker(policy.createScriptURL(blob), {type: "module"});
}
