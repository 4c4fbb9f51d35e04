"""A source of manifests in an empty directory, and its clock."""

from pathlib import Path

import pytest
from tests.kube.manifests.files import FakeClock

from narthex.kube.manifests import ManifestSource


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def source(tmp_path: Path, clock: FakeClock) -> ManifestSource:
    return ManifestSource(tmp_path, now=clock)
