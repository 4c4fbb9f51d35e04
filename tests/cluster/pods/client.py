"""Sends requests at a constant rate, each over a connection of its own, and prints the totals each second.

client.py RATE HOST:PORT...
"""

import asyncio
import json
import signal
import sys
import time
from collections import Counter

_PATIENCE_SECONDS = 8.0
"""A lost packet is repeated after 1, 3, and 7 seconds: slow requests are counted, and do not fail."""
_LONGEST_STEP_SECONDS = 0.5
"""Counts as time to wait at most, however long the machine did not run this client: answers may have arrived meanwhile."""
_SLOW_SECONDS = 0.9
_MOST_AT_ONCE = 500
_counts: Counter[str] = Counter()
_errors: list[str] = []


async def _request(host: str, port: int) -> None:
    begun = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise OSError(f"the answer is {answer[:40]!r}")
    except (OSError, asyncio.CancelledError) as error:
        _counts["failed"] += 1
        if len(_errors) < 20:
            _errors.append(f"{time.strftime('%T')} {host}:{port} {type(error).__name__} {error}")
    _counts["requests"] += 1
    _counts["slow"] += time.monotonic() - begun > _SLOW_SECONDS


async def main(rate: float, targets: list[str]) -> None:
    """Send until SIGTERM; what has begun is awaited."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running: dict[asyncio.Task[None], float] = {}
    begun = reported = seen = time.monotonic()
    waited = 0.0
    number = 0
    while running or not stop.is_set():
        now = time.monotonic()
        waited, seen = waited + min(now - seen, _LONGEST_STEP_SECONDS), now
        for each in [each for each, since in running.items() if waited > since + _PATIENCE_SECONDS]:
            each.cancel(f"no answer within {_PATIENCE_SECONDS:g} s")
        due = int((time.monotonic() - begun) * rate)
        while number < due and len(running) < _MOST_AT_ONCE and not stop.is_set():
            host, _, port = targets[number % len(targets)].rpartition(":")
            task = asyncio.create_task(_request(host.strip("[]"), int(port)))
            running[task] = waited
            task.add_done_callback(running.pop)
            number += 1
        if time.monotonic() > reported + 1:
            reported = time.monotonic()
            print(json.dumps({**_counts, "errors": _errors}), flush=True)
        await asyncio.sleep(0.01)
    print(json.dumps({**_counts, "errors": _errors}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), sys.argv[2:]))
