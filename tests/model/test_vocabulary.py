"""`narthex.model` hands on the names of its modules, and loads a module only when one of its names is used."""

import importlib
import subprocess
import sys

import pytest

import narthex.model

VOCABULARY = ("net", "problem", "packet", "objects", "store")


@pytest.mark.parametrize("module", VOCABULARY)
def test_all_public_names_are_there(module: str) -> None:
    found = importlib.import_module(f"narthex.model.{module}")
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == found.__name__
    ]
    assert len(own) > 5
    for name in own:
        assert getattr(narthex.model, name) is getattr(found, name)


@pytest.mark.parametrize("name", ["nothing", "_DECODERS", "__path_of_nothing__"])
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(narthex.model, name)


def test_a_name_of_addresses_loads_no_objects() -> None:
    text = "import sys; from narthex.model import IPFamily; print(*(name for name in sys.modules if 'narthex' in name))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["narthex", "narthex.model", "narthex.model.net"]
