// Narthex in an interpreter that has started. The worker and the tests in node use this.

const ARCHIVE = "/narthex.zip";
const FOLDER = "/input";

// Import the modules of the archive. Return a function that answers a request: `files` is a list of [name, text or bytes].
export function prepare(python, archive) {
  python.FS.writeFile(ARCHIVE, archive);
  python.globals.set("archive", ARCHIVE);
  python.runPython(`
import gc, sys, zipfile
# Nothing that is imported becomes garbage.
gc.disable()
with zipfile.ZipFile(archive) as opened:
    # The interpreter links what is a file.
    opened.extractall("/lib/linked", [name for name in opened.namelist() if name.startswith("msgspec/")])
sys.path[:0] = ["/lib/linked", archive]
import ipv6_text
`);
  const answer = python.pyimport("playground_answer").answer_json;
  python.runPython("gc.freeze(); gc.enable()");
  return ({files, ...request}) => {
    const contents = files.map(([, content]) => content);
    const names = files.map(([name]) => name);
    const given = python.toPy(contents, {depth: 1});
    try {
      return JSON.parse(answer(JSON.stringify({...request, files: names}), given, FOLDER));
    } finally {
      given.destroy();
    }
  };
}
