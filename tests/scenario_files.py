"""The scenarios of this project, read once for all tests of a process."""

from pathlib import Path

from narthex.testing.scenario import load

FOLDER = Path(__file__).parent / "scenarios"
SCENARIOS = tuple(map(load, sorted(FOLDER.glob("*.yaml"))))
