// Compile the modules of a folder with the interpreter that will run them: node compile.mjs FOLDER [OPTIMIZE]
// OPTIMIZE is that of py_compile: 2 leaves out docstrings and assertions.
// Each FOLDER/….py is replaced by FOLDER/….pyc.

import {loadPyodide} from "./interpreter.mjs";

const [folder, optimize = "0"] = process.argv.slice(2);
const python = await loadPyodide();
python.FS.mkdirTree("/sources");
python.FS.mount(python.FS.filesystems.NODEFS, {root: folder}, "/sources");
python.globals.set("optimize", Number(optimize));
python.runPython(`
import pathlib, py_compile
for path in pathlib.Path("/sources").rglob("*.py"):
    # A checked hash makes the build reproducible; nothing checks it in the page, where there is no source.
    py_compile.compile(
        str(path), str(path.with_suffix(".pyc")), dfile=str(path.relative_to("/sources")), doraise=True, optimize=optimize,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    path.unlink()
`);
process.exit(0);
