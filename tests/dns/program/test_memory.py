"""What a worker of the DNS loads: every module of it is memory of every worker."""

import os
import subprocess
import sys

HEAVY = {"ssl", "_hashlib", "asyncio", "yaml", "httpx2", "lightkube", "click"}
"""Modules, some of them with OpenSSL, which takes megabytes."""


def test_a_worker_that_forwards_without_tls_loads_nothing_heavy():
    code = (
        "import sys; import narthex.dns.program.worker, narthex.dns.server.plugin_chain; print('\\n'.join(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert HEAVY & set(done.stdout.split()) == set()
