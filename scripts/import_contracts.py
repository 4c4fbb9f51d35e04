"""Contract types for import-linter that depend on the names of folders; pyproject.toml uses them."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PureFoldersContract(Contract):
    """Modules do no I/O unless the name of a folder on their path says so.

    Attributes:
        io_packages: Top-level packages of this project that do I/O.
        io_folders: Folder names that permit I/O in all modules below them, at any depth.
        io_modules: Modules of the standard library and of third parties that do I/O.
        pure_names: Names in such modules that do none (`socket.inet_pton`).
    """

    io_packages: Any = fields.SetField(subfield=fields.StringField())
    io_folders: Any = fields.SetField(subfield=fields.StringField())
    io_modules: Any = fields.SetField(subfield=fields.StringField())
    pure_names: Any = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Find imports of modules that do I/O by modules that must not."""
        broken = [
            (module, imported)
            for module in sorted(graph.modules)
            if module.startswith("narthex.") and not self._does_io(module)
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if self._does_io(imported) and not self._imports_only_pure_names(graph, module, imported)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that breaks the contract."""
        for module, imported in check.metadata["broken"]:
            output.print_error(f"{module} is pure by its folder and imports {imported}")

    def _imports_only_pure_names(self, graph: ImportGraph, module: str, imported: str) -> bool:
        statements = [
            node
            for details in graph.get_import_details(importer=module, imported=imported)
            for node in ast.parse(details["line_contents"]).body
        ]
        return all(
            isinstance(node, ast.ImportFrom)
            and all(f"{node.module}.{name.name}" in self.pure_names for name in node.names)
            for node in statements
        )

    def _does_io(self, module: str) -> bool:
        parts = module.split(".")
        if parts[0] != "narthex":
            return module in self.io_modules
        return len(parts) == 1 or parts[1] in self.io_packages or any(part in self.io_folders for part in parts[2:])


class AcyclicModulesContract(Contract):
    """No module imports itself through other modules, for types included."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Find a cycle among the imports of modules."""
        imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"cycle": error.args[1]})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the modules of the cycle in order."""
        output.print_error(f"import cycle: {' <- '.join(check.metadata['cycle'])}")
