"""What a node's process loads: memory that parts take which it doesn't have."""

import subprocess
import sys


def test_socket_load_balancing_is_loaded_where_it_is_on():
    text = "import sys, narthex.node.process, narthex.proxy.program.start; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
    assert "narthex.proxy.program.dataplane" in loaded
    assert [name for name in loaded if name.startswith(("narthex.bpf", "narthex.linux.bpf"))] == []
