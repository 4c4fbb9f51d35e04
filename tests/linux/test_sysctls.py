"""Kernel settings in a directory that looks like /proc/sys."""

from narthex.linux.sysctls import apply_sysctls, os, read_sysctl
from narthex.model.kernel_setting import KernelSetting

MAX, BUCKETS = KernelSetting("net/a", 100, "maxPerCore"), KernelSetting("net/b", 100, "maxPerCore", at_least=True)


def make(root, **values):
    (root / "net").mkdir()
    for name, value in values.items():
        (root / "net" / name).write_text(f"{value}\n")


def content(root, name):
    return (root / "net" / name).read_text()


def test_what_differs_is_written(tmp_path):
    make(tmp_path, a=5, b=5)
    outcomes = apply_sysctls([MAX, BUCKETS], tmp_path)
    assert [(each.setting, each.was, each.error) for each in outcomes] == [(MAX, 5, ""), (BUCKETS, 5, "")]
    assert read_sysctl("net/a", tmp_path) == read_sysctl("net/b", tmp_path) == 100


def test_what_is_right_is_not_written(tmp_path):
    make(tmp_path, a="100 ", b=500)
    assert apply_sysctls([MAX, BUCKETS], tmp_path) == []
    assert (content(tmp_path, "a"), content(tmp_path, "b")) == ("100 \n", "500\n")


def test_what_is_not_there_is_not_made(tmp_path):
    (outcome,) = apply_sysctls([MAX], tmp_path)
    assert outcome.was is None
    assert "does not have it" in outcome.error
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_told_and_the_rest_goes_on(tmp_path, monkeypatch):
    make(tmp_path, a=5, b=5)
    real = os.open

    def refuse(path, flags):
        if path.name == "a":
            raise PermissionError(13, "Permission denied")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    outcomes = apply_sysctls([MAX, BUCKETS], tmp_path)
    assert [each.error for each in outcomes] == ["Permission denied", ""]
    assert (content(tmp_path, "a"), read_sysctl("net/b", tmp_path)) == ("5\n", 100)


def test_a_value_that_is_no_number(tmp_path):
    make(tmp_path, a="4096 87380 6291456")
    assert read_sysctl("net/a", tmp_path) is None
