// Run tests of the repository with the page's interpreter and the page's substitutes: node run_tests.mjs SITE_PACKAGES WORD...
// The words are arguments of pytest. SITE_PACKAGES is the folder where pytest and hypothesis are installed.

import fs from "node:fs";
import path from "node:path";
import {HOME, loadPyodide} from "./interpreter.mjs";
import {prepare} from "./page/engine.js";

const [packages, ...words] = process.argv.slice(2);
const python = await loadPyodide({env: {HOME: "/tmp", CI: "true"}});
for (const [point, root] of [["/repository", path.dirname(path.dirname(HOME))], ["/packages", packages]]) {
  python.FS.mkdirTree(point);
  python.FS.mount(python.FS.filesystems.NODEFS, {root}, point);
}
prepare(python, new Uint8Array(fs.readFileSync(path.join(HOME, "site/narthex.zip"))));
python.globals.set("words", python.toPy(words));
process.exit(python.runPython(`
import os, sys
# The sources, since the archive lacks narthex.testing. What the page substitutes, comes before what is installed.
for name in [name for name in sys.modules if name.split(".")[0] in ("narthex", "playground_answer")]:
    del sys.modules[name]
sys.path[:0] = ["/repository/src", "/repository"]
sys.path += ["/repository/playground/build/test-packages", "/packages"]
sys.dont_write_bytecode = True
os.chdir("/repository")
# WebAssembly has no users.
os.geteuid = os.getuid
import pytest
int(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "-p", "no:anyio", "-p", "no:hypothesispytest", "-W", "ignore::hypothesis.errors.HypothesisWarning", "-q", *words]))
`));
