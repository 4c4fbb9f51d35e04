"""Forms of objects that several threads read at once."""

import subprocess
import sys

READ = """
import sys, threading
sys.setswitchinterval(1e-6)
from narthex.kube.messages import prepare_decoders
from narthex.model.decode.objects import KINDS, decode, decode_json, shape_of
from narthex.kube.messages import read_lines, read_page, read_status

prepare_decoders()
together = threading.Barrier(4)

def read(first):
    together.wait()
    for kind in KINDS[first:] + KINDS[:first]:
        decode({"apiVersion": "v1", "kind": kind, "metadata": {"name": "x"}, "spec": {}})
        decode_json(b'{"metadata": {"name": "x"}, "spec": {}}', kind=kind)
        list(read_lines(b'{"type": "ADDED", "object": {"metadata": {"name": "x"}}}', shape_of(kind)))
    read_page(b'{"metadata": {"resourceVersion": "1"}, "items": []}')
    read_status(b"{}")

threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""


def test_many_threads_may_read_from_the_beginning():
    """Without `prepare_decoders` three of four such processes end by SIGSEGV."""
    running = [subprocess.Popen([sys.executable, "-c", READ], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for process in running:
        assert (process.communicate(timeout=60)[0], process.returncode) == ("read\n", 0)
