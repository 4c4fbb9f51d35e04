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
  const loading = load(progress);
  // What has begun to load continues.
  close();
  let running = launch(policy, loading, progress);
  const [gallery] = await Promise.all([loading.gallery, running]);
  const trace = async request => {
    const {answer, error, ended} = await (await running)(request);
    // Input that is nested thousands of levels deep overruns the stack of the interpreter, which then is of no more use.
    if (ended) running = launch(policy, loading, () => {});
    if (error) throw new Error(error);
    return answer;
  };
  return {trace, gallery};
}

// Return a function that has a new worker answer a request.
async function launch(policy, loading, progress) {
  const worker = begin(policy);
  const waiting = new Map();
  await new Promise((resolve, reject) => {
    worker.onerror = event => reject(new Error(event.message || "the worker ended"));
    worker.onmessage = ({data}) => {
      if (data.listens) deliver(worker, loading).catch(reject);
      if (data.progress) progress(data.progress, data.progress < 100 ? "preparing" : "ready");
      if (data.progress === 100) resolve();
      if (data.failed) reject(new Error(data.failed));
      if (data.id === undefined) return;
      waiting.get(data.id)(data);
      waiting.delete(data.id);
      if (data.ended) worker.terminate();
    };
  });
  let last = 0;
  return request => new Promise(done => {
    waiting.set(++last, done);
    worker.postMessage({id: last, request});
  });
}

function load(progress) {
  const total = [WASM, LIBRARY, MODULES].reduce((sum, name) => sum + SIZES[name], 0);
  let loaded = 0;
  const count = size => {
    loaded += size;
    progress(Math.min(50, loaded / total * 50), "loading");
  };
  const bytes = response => response.arrayBuffer();
  return {
    wasm: fetched(WASM, count).then(response => WebAssembly.compileStreaming(response)),
    library: fetched(LIBRARY, count).then(bytes),
    modules: fetched(MODULES, count).then(bytes),
    gallery: fetched(GALLERY, () => {}).then(response => response.json()),
  };
}

async function deliver(worker, loading) {
  const [wasm, library, modules] = await Promise.all([loading.wasm, loading.library, loading.modules]);
  worker.postMessage({wasm, library, modules});
}

async function fetched(name, count) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  const counted = new TransformStream({
    transform(chunk, controller) { count(chunk.byteLength); controller.enqueue(chunk); },
  });
  return new Response(response.body.pipeThrough(counted), {headers: {"content-type": name === WASM ? "application/wasm" : "application/octet-stream"}});
}

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
