"""The orderly end of a process."""

import os
import signal
import threading
import time

import pytest

from narthex.runtime.process import ended_by_signal

_LIMIT = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_receives_ends_a_main_thread_that_waits(number):
    ended, over = threading.Event(), threading.Event()
    other = threading.Thread(target=over.wait, args=(_LIMIT,))
    other.start()

    def send_while_the_main_thread_waits() -> None:
        time.sleep(0.2)
        signal.pthread_kill(other.ident, number)

    sender = threading.Thread(target=send_while_the_main_thread_waits)
    with ended_by_signal(ended.set):
        sender.start()
        assert ended.wait(_LIMIT)
        assert other.is_alive()
    over.set()
    sender.join()
    other.join()


def test_stop_may_take_a_lock_that_the_main_thread_holds():
    lock, ended = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            ended.set()

    with ended_by_signal(stop):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        assert ended.wait(_LIMIT)


def test_further_signals_have_no_effect():
    calls = []
    called = threading.Event()

    def stop() -> None:
        calls.append(1)
        called.set()

    with ended_by_signal(stop):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert called.wait(_LIMIT)
    assert calls == [1]


def test_a_signal_to_a_forked_process_does_not_end_its_parent():
    ended = threading.Event()
    with ended_by_signal(ended.set):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not ended.wait(0.2)


def test_what_was_there_before_is_restored():
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])
    with ended_by_signal(lambda: None):
        pass
    after = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(after[1])
    assert after == before
