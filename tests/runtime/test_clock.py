"""Sleeping and being woken, for real."""

import signal
import socket
import threading
import time

from narthex.linux.clock import SystemClock


def test_sleep_ends_by_itself():
    clock = SystemClock()
    start = clock.now()
    assert clock.sleep(0.02) is False
    assert 0.01 < clock.now() - start < 2


def test_a_wake_ends_the_present_sleep():
    clock = SystemClock()
    threading.Timer(0.02, clock.wake).start()
    assert clock.sleep(30) is True


def test_a_wake_before_the_sleep_counts_once():
    clock = SystemClock()
    clock.wake()
    clock.wake()
    assert clock.sleep(30) is True
    assert clock.sleep(0) is False


def test_a_signal_handler_may_wake():
    clock = SystemClock()
    before = signal.signal(signal.SIGALRM, lambda *_: clock.wake())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert clock.sleep(30) is True
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_endless_sleep_can_be_woken():
    clock = SystemClock()
    clock.wake()
    assert clock.sleep(float("inf")) is True


def test_data_in_a_watched_file_ends_a_sleep():
    clock = SystemClock()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        clock.watch_files([ours.fileno()])
        theirs.send(b"x")
        assert clock.sleep(30) is True
        assert clock.sleep(30) is True, "it stays readable"
        clock.watch_files([])
        assert clock.sleep(0.01) is False


def test_wall_is_the_date():
    assert abs(SystemClock().wall() - time.time()) < 5
