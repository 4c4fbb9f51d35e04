"""`narthex mcp`: answers agents over standard input and output, in the Model Context Protocol.

Each request runs one command of Narthex as a process of its own, with limits of time, memory, and output, in a folder that holds
nothing but what the agent sent. The server writes nothing and sends nothing but answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import msgspec
from mcp.server import Server
from mcp.server.stdio import stdio_server

import narthex
from narthex.model import visible
from narthex.trace.agents.answers import (
    CausesAnswer,
    CheckAnswer,
    PlanAnswer,
    QueryAnswer,
    TraceAnswer,
    causes_answer,
    short_answer,
)
from narthex.trace.agents.evidence import SCHEME, EvidenceStore
from narthex.trace.agents.requests import (
    LONGEST_TEXT,
    CausesToolRequest,
    CheckToolRequest,
    EvidenceToolRequest,
    PlanToolRequest,
    QueryToolRequest,
    RequestError,
    TraceToolRequest,
    command_of,
    read_request,
)
from narthex.trace.program.pasted_files import store_pasted

SECONDS = 120.0
"""Longest time that a command may take."""
_MOST_COMMANDS = 2
_MEMORY = 3 << 30
_MOST_OUTPUT = 64_000_000
_LONGEST_MESSAGE = 2_000
INSTRUCTIONS = (
    "Narthex explains the Kubernetes Service network of a node. Pass what the user pasted as `texts`. Begin with `trace` if a connection "
    "fails, and with `query` for questions about all packets. Answers are short; read their `evidence` if you need rules or steps."
)
TOOLS: Mapping[str, tuple[type[msgspec.Struct], type[msgspec.Struct] | None]] = {
    "trace": (TraceToolRequest, TraceAnswer),
    "check": (CheckToolRequest, CheckAnswer),
    "plan": (PlanToolRequest, PlanAnswer),
    "query": (QueryToolRequest, QueryAnswer),
    "causes": (CausesToolRequest, CausesAnswer),
    "evidence": (EvidenceToolRequest, None),
}
"""Request and answer of each tool; the answer of `evidence` is a part of a document of `-o json`."""


class AgentServer:
    """Answers the requests of one client."""

    def __init__(self, root: Path | None = None, *, live: bool = False) -> None:
        """Prepare to answer.

        Args:
            root: The folder whose files agents may name; None: no files.
            live: Agents may have this node read.
        """
        self._root = root.resolve() if root is not None else None
        self._live = live
        self._evidence = EvidenceStore()
        self._slots = asyncio.Semaphore(_MOST_COMMANDS)

    async def serve(self) -> None:
        """Answer until standard input ends."""
        server: Server[Any] = Server(
            "narthex",
            version=narthex.__version__,
            title="Narthex",
            instructions=INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )
        async with stdio_server() as (requests, answers):
            await server.run(requests, answers, server.create_initialization_options())

    async def _list_tools(self, _context: object, _parameters: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool(name) for name in TOOLS])

    async def _call_tool(self, _context: object, asked: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            answer = await self.answer(asked.name, asked.arguments or {})
        except RequestError as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
        text = msgspec.json.encode(answer).decode()
        structured = msgspec.to_builtins(answer) if isinstance(answer, msgspec.Struct) else None
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], structured_content=structured)

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer of a tool. Raises RequestError."""
        if name not in TOOLS:
            raise RequestError(f"there is no tool {visible(name[:80])!r}; there are {', '.join(TOOLS)}")
        request = read_request(TOOLS[name][0], arguments)
        if isinstance(request, EvidenceToolRequest):
            return self._evidence.read(request.reference)
        if isinstance(request, CausesToolRequest):
            answer = causes_answer(request.cause)
            if not answer.causes:
                raise RequestError(f"there is no cause {request.cause!r}: call the tool without arguments for all")
            return answer
        async with self._slots:
            document, size = await self._run(request)
        return short_answer(request, document, self._evidence.add(document, size))

    async def _run(self, request: Any) -> tuple[Any, int]:
        """Run the command of a request; return the document that it printed, and its size in bytes."""
        files: list[tuple[str, str | bytes]] = [
            (f"text-{number}.txt", text) for number, text in enumerate(request.texts, 1)
        ]
        files += [(Path(name).name, self._content(name)) for name in request.files]
        with tempfile.TemporaryDirectory(prefix="narthex-mcp-") as folder:
            words = command_of(request, store_pasted(files, Path(folder)), live_allowed=self._live)
            status, output, messages = await _finished(words, folder)
        try:
            return msgspec.json.decode(output), len(output)
        except msgspec.DecodeError:
            said = visible(" ".join(messages.decode(errors="replace").split()))[-_LONGEST_MESSAGE:]
            raise RequestError(said or f"narthex {words[0]} ended with status {status} and printed nothing") from None

    def _content(self, name: str) -> bytes:
        """Return the content of a file below the root. Raises RequestError."""
        if self._root is None:
            raise RequestError(
                "no files are allowed here: pass `texts`, or the user must start `narthex mcp` with --root FOLDER"
            )
        # Resolved first, so that neither `..` nor a symbolic link leads out of the root.
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root):
            raise RequestError(f"file {name!r} is outside of the folder that the user allowed")
        try:
            if not path.is_file():
                raise RequestError(f"file {name!r} does not exist below the folder that the user allowed")
            if path.stat().st_size > LONGEST_TEXT:
                raise RequestError(f"file {name!r} has more than {LONGEST_TEXT:,} bytes")
            return path.read_bytes()
        except OSError as error:
            raise RequestError(f"file {name!r} cannot be read: {error.strerror}") from None

    async def _list_resources(self, _context: object, _parameters: object) -> types.ListResourcesResult:
        found = self._evidence.references()
        return types.ListResourcesResult(
            resources=[
                types.Resource(
                    uri=reference, name=f"{kind} {reference.rpartition('/')[2]}", mime_type="application/json"
                )
                for reference, kind in found
            ]
        )

    async def _list_templates(self, _context: object, _parameters: object) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template=SCHEME + "{number}{/path*}",
            name="evidence",
            description="The document behind an answer, or the part of it that a path of keys and indexes names.",
            mime_type="application/json",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def _read_resource(
        self, _context: object, asked: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        part = self._evidence.read(str(asked.uri))
        text = msgspec.json.encode(part).decode()
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=asked.uri, mime_type="application/json", text=text)]
        )


def tool(name: str) -> types.Tool:
    """Return the description of a tool, with the schemas of its request and of its answer."""
    request, answer = TOOLS[name]
    return types.Tool(
        name=name,
        description=(request.__doc__ or "").strip(),
        input_schema=_schema(request),
        output_schema=_schema(answer) if answer is not None else None,
        annotations=types.ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False),
    )


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a type; the protocol wants an object on top, not a reference."""
    (top,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    name = top["$ref"].rpartition("/")[2]
    schema = definitions.pop(name)
    return {**schema, "$defs": definitions} if definitions else schema


async def _finished(words: list[str], folder: str) -> tuple[int, bytes, bytes]:
    """Run a command; return its exit status, output, and messages. Raises RequestError if it exceeds a limit."""
    # -P: no file of the folder can take the place of a module.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "narthex", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
    )
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(SECONDS):
            output, messages = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            return await process.wait(), output, messages
    except TimeoutError:
        raise RequestError(
            f"narthex {words[0]} took more than {SECONDS:.0f} s: ask about one Service, or pass less text"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _read(stream: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(1 << 16):
        size += len(part)
        if size > _MOST_OUTPUT:
            raise RequestError(
                f"the answer has more than {_MOST_OUTPUT:,} bytes: ask about one Service, or pass less text"
            )
        parts.append(part)
    return b"".join(parts)


def serve(root: Path | None, *, live: bool) -> None:
    """Answer one client until standard input ends."""
    asyncio.run(AgentServer(root, live=live).serve())
