"""Locks of attachments: one holder each, and no endless wait."""

import threading

import pytest

from narthex.cni.errors import TRY_AGAIN, CniError
from narthex.cni.kernel import locks
from narthex.cni.kernel.locks import AttachmentLock


def test_one_holder_at_a_time(tmp_path):
    running, most = [], []

    def work():
        with AttachmentLock(str(tmp_path / "state"), locks.PODS, "net:a:eth0"):
            running.append(1)
            most.append(len(running))
            running.pop()

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 20


def test_others_do_not_wait(tmp_path):
    state = str(tmp_path)
    with AttachmentLock(state, locks.PODS, "net:a:eth0"):
        for kind, name in ((locks.PORTS, "net:a:eth0"), (locks.PODS, "net:b:eth0")):
            with AttachmentLock(state, kind, name, wait=0):
                pass
        with pytest.raises(CniError) as failed, AttachmentLock(state, locks.PODS, "net:a:eth0", wait=0):
            pass
        assert failed.value.code == TRY_AGAIN
    with AttachmentLock(state, locks.PODS, "net:a:eth0", wait=0):
        pass


def test_shared_locks_exclude_exclusive_ones_only(tmp_path):
    state = str(tmp_path)
    with AttachmentLock(state, locks.SUBNETS, "", shared=True):
        with AttachmentLock(state, locks.SUBNETS, "", wait=0, shared=True):
            pass
        with pytest.raises(CniError), AttachmentLock(state, locks.SUBNETS, "", wait=0):
            pass
