// Runs Narthex. What the interpreter would fetch is what the page has loaded: the worker's policy forbids requests.

import createPyodideModule from "./pyodide.asm.mjs";
import {LOCK} from "./built.js";
import {loadPyodide} from "./pyodide.mjs";
import {prepare} from "./engine.js";

let trace;

addEventListener("message", async ({data}) => {
  if (data.wasm) {
    try {
      trace = await begin(data);
      postMessage({progress: 100});
    } catch (error) {
      postMessage({failed: String(error.message ?? error)});
    }
    return;
  }
  try {
    postMessage({id: data.id, answer: trace(data.request)});
  } catch (error) {
    const ended = error instanceof RangeError || Boolean(error.pyodide_fatal_error);
    postMessage({id: data.id, error: String(error.message ?? error), ended});
  }
});

postMessage({listens: true});

async function begin({wasm, library, modules}) {
  self.fetch = async address => new Response(String(address).endsWith(".zip") ? library : null);
  WebAssembly.instantiateStreaming = async (_, imports) => ({module: wasm, instance: await WebAssembly.instantiate(wasm, imports)});
  postMessage({progress: 60});
  const python = await loadPyodide({
    createPyodideModule, indexURL: new URL(".", import.meta.url).href, packageBaseUrl: new URL(".", import.meta.url).href,
    lockFileContents: LOCK,
  });
  postMessage({progress: 80});
  return prepare(python, new Uint8Array(modules));
}
