"""DNS as a part of a node: what it is made of, and what it refuses to be made of."""

import pytest

from narthex.dns.corefile.settings import BindSettings
from narthex.dns.program import node_local
from narthex.kube.manifests import ManifestSource
from narthex.kube.source import Origin
from narthex.runtime.configuration.values import DnsConfiguration
from narthex.runtime.process import StartError


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What the server is told, instead of a server."""
    told = []

    def server(settings, source, *, reread):
        told.append((settings, reread))
        return source

    monkeypatch.setattr(node_local, "DnsServer", server)

    def make(ipvs=False, **fields):
        node_local.build_node_local(DnsConfiguration(**fields), Origin(ManifestSource(tmp_path)), ipvs)
        return told[-1]

    return make


def test_it_answers_on_its_own_addresses_and_those_of_the_node(served):
    settings, reread = served(addresses=("169.254.20.10", "10.96.0.10"), listen=("192.0.2.1",), zones=("k8s.example.",))
    (block,) = settings.blocks
    assert block.bind == BindSettings(to=("169.254.20.10", "10.96.0.10", "192.0.2.1"))
    assert block.kubernetes.zones[0] == "k8s.example." and block.prometheus.listen.port == 9353
    assert (block.health, block.ready) == (None, None) and block.forwards
    assert reread() is None
    assert not served(upstreams=())[0].blocks[0].forwards


def test_a_corefile_says_it_all_but_the_addresses(served, tmp_path):
    path = tmp_path / "Corefile"
    path.write_text(".:5353 {\n  kubernetes a.example\n}\nb.example:53 {\n  bind 127.0.0.1\n  hosts\n}\n")
    settings, reread = served(corefile=str(path))
    assert [block.bind.to for block in settings.blocks] == [("169.254.20.10",), ("127.0.0.1",)]
    assert reread() is None
    path.write_text(".:5353 {\n  kubernetes c.example\n}\n")
    (fresh,) = reread()
    assert fresh.bind.to == ("169.254.20.10",) and fresh.kubernetes.zones == ("c.example.",)
    path.write_text(".:5353 {\n  nosuch\n}\n")
    assert reread() is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"corefile": "/no/such/Corefile"}, "No such file"),
        ({"upstreams": ("nobody",)}, "'nobody' is neither an address"),
        (
            {"ipvs": True, "addresses": ("169.254.20.10", "10.96.0.10")},
            "mode ipvs .* take queries to 10.96.0.10 before",
        ),
    ],
)
def test_what_cannot_be(served, fields, said):
    with pytest.raises(StartError, match=said):
        served(**fields)


def test_in_mode_ipvs_a_link_local_address_is_fine(served):
    assert served(ipvs=True)[0].blocks
