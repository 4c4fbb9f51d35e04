"""Commands that answer by their exit status: what cannot be read is no difference."""

import pytest
from click.testing import CliRunner

from narthex.cli import main


@pytest.mark.parametrize("words", [["diff", "BROKEN", "BROKEN"], ["check", "--bundle", "BROKEN"]])
def test_a_broken_bundle_ends_with_2(words, tmp_path):
    broken = tmp_path / "node.tgz"
    broken.write_bytes(b"no bundle")
    done = CliRunner().invoke(main, [str(broken) if word == "BROKEN" else word for word in words])
    assert done.exit_code == 2
    assert "is no bundle that can be read" in done.output
