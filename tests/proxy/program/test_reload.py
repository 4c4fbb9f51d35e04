"""What an edited configuration means to a running proxy."""

import threading

import msgspec
import pytest

from narthex.proxy.program.reload import ConfigurationFile, differences, in_place
from narthex.proxy.program.settings import SettingsError, settings


def told(**fields):
    return settings({"clusterCIDR": "10.64.0.0/12", **fields}, None, "worker-a")


@pytest.mark.row("29.12")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"nodePortAddresses": ["primary"]},
        {"nftables": {"syncPeriod": "10s", "masqueradeAll": True}},
        {"metricsBindAddress": "127.0.0.1:1"},
        {"conntrack": {"min": 1}},
        {"logging": {"verbosity": 4}},
        {"oomScoreAdj": 0},
        {"ipvs": {"scheduler": "lc"}},
        {"narthex": {"explainService": "shop/web"}},
    ],
    ids=str,
)
def test_nearly_everything_changes_in_place(fields):
    assert in_place(told(), told(**fields))


@pytest.mark.parametrize(
    "fields",
    [{"mode": "iptables"}, {"hostnameOverride": "worker-b"}, {"clientConnection": {"kubeconfig": "/k"}}],
    ids=str,
)
def test_what_the_process_is_built_around_needs_a_new_one(fields):
    assert not in_place(told(), told(**fields))


def test_in_mode_ipvs_its_section_is_part_of_the_backend():
    assert not in_place(told(mode="ipvs"), told(mode="ipvs", ipvs={"scheduler": "lc"}))
    assert in_place(told(mode="ipvs"), told(mode="ipvs", nftables={"syncPeriod": "10s"}))


def test_differences_are_named_as_in_the_file():
    one, other = told().configuration, told(mode="iptables", nftables={"syncPeriod": "10s"}).configuration
    assert differences(one, other) == ["mode", "nftables.syncPeriod"]
    assert differences(one, one) == []


class Reading:
    """A file, and what reading it gives."""

    def __init__(self, path, answer):
        self.path, self.answer = path, answer
        self.taken, self.works = [], True
        path.write_text("1")
        self.file = ConfigurationFile(path, self.read, self.check)

    def read(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def check(self, mode):
        if mode == "ipvs":
            raise RuntimeError("mode ipvs is not there yet")

    def edit(self, answer):
        """The file differs; returns the settings in force after a look."""
        self.answer = answer
        return self.file._go_over(told(), self.take)

    def take(self, fresh):
        self.taken.append(fresh)
        return self.works


@pytest.fixture
def reading(tmp_path):
    return Reading(tmp_path / "config", told())


def test_an_edit_is_taken_over(reading):
    fresh = told(nodePortAddresses=["primary"])
    assert reading.edit(fresh) is fresh
    assert reading.taken == [fresh] and not reading.file.replace


def test_an_edit_of_our_own_document_counts(reading):
    fresh = told(narthex={"explainService": "shop/web"})
    assert reading.edit(fresh) is fresh
    assert reading.taken == [fresh]


def test_what_cannot_be_taken_over_asks_for_a_new_process(reading):
    reading.works = False
    reading.edit(told(metricsBindAddress="127.0.0.1:1"))
    assert reading.file.replace


def test_an_edit_without_meaning_is_nothing(reading):
    reading.edit(told())
    assert reading.taken == [] and not reading.file.replace


def test_what_cannot_be_read_changes_nothing(reading):
    assert reading.edit(SettingsError("no")) == told()
    assert reading.taken == [] and not reading.file.replace


def test_what_cannot_run_here_changes_nothing(reading):
    assert reading.edit(msgspec.structs.replace(told(mode="iptables"), mode="ipvs")) == told()
    assert not reading.file.replace


def test_another_mode_asks_for_a_new_process(reading):
    reading.edit(told(mode="iptables"))
    assert reading.taken == [] and reading.file.replace


def test_the_file_is_followed(reading):
    """Also when it is away for a moment, as in a rename."""
    came = threading.Event()
    with reading.file.followed(told(), lambda fresh: (reading.take(fresh), came.set()), lambda: None):
        reading.path.unlink()
        reading.answer = told(nodePortAddresses=["primary"])
        reading.path.write_text("22")
        assert came.wait(20)
    assert reading.taken == [reading.answer]


def test_a_new_process_is_asked_for_by_a_stop(reading):
    stopped = threading.Event()
    with reading.file.followed(told(), reading.take, stopped.set):
        reading.answer = told(mode="iptables")
        reading.path.write_text("22")
        assert stopped.wait(20)
    assert reading.file.replace
