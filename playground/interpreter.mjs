// The interpreter of the npm package, in node.

import path from "node:path";
import {fileURLToPath, pathToFileURL} from "node:url";

export const HOME = path.join(path.dirname(fileURLToPath(import.meta.url)), "build");
const PACKAGE = path.join(HOME, "npm/node_modules/pyodide");

export async function loadPyodide(options = {}) {
  const {loadPyodide: load} = await import(pathToFileURL(path.join(PACKAGE, "pyodide.mjs")).href);
  return load({indexURL: PACKAGE, ...options});
}
