"""A program that reads a text while it is made."""

import sys

import pytest

from narthex.linux.run import CommandError, TimeoutExpired, feed

COUNT = [sys.executable, "-c", "import sys; print(len(sys.stdin.read()), file=sys.stdout)"]
REFUSE = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit('line 1 is wrong')"]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_all_blocks_arrive():
    assert feed(COUNT, ("x" * 100_000 for _ in range(50))) == "5000000\n"


def test_a_program_that_wants_no_more_says_why():
    made = []

    def blocks():
        for number in range(10_000):
            made.append(number)
            yield "y" * 10_000 + "\n"

    with pytest.raises(CommandError, match="exit status 1: line 1 is wrong"):
        feed(REFUSE, blocks())
    assert len(made) < 10_000


def test_a_block_that_cannot_be_made_ends_the_program():
    def blocks():
        yield "z"
        raise ValueError("no such rule")

    with pytest.raises(ValueError, match="no such rule"):
        feed(COUNT, blocks())


@pytest.mark.parametrize("blocks", [(), ("x" * 10_000_000,)], ids=["nothing to read", "more than it reads"])
def test_a_program_that_takes_too_long_is_ended(blocks):
    with pytest.raises(TimeoutExpired):
        feed(SLEEP, blocks, timeout=0.2)


def test_a_program_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        feed(["/no/such/program"], ())
