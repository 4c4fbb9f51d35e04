"""The score by which the kernel chooses whom to end."""

import pytest

from narthex.linux.privileges import set_oom_score


@pytest.mark.row("27.18")
def test_the_score_is_written(tmp_path):
    path = tmp_path / "oom_score_adj"
    set_oom_score(-999, path)
    assert path.read_text() == "-999\n"
    with pytest.raises(OSError):
        set_oom_score(5, tmp_path / "no" / "such")
