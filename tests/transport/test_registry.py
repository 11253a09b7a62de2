"""The registry, against distributions that are laid out on disk as pip leaves them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshllm.errors import PluginError
from meshllm.transport.contract import Transport
from meshllm.transport.registry import GROUP, InstalledTransport, Registry

Install = Callable[..., None]

GOOD = """
class Carrier:
    name = "{name}"
    schemes = ("{name}",)
    def listen(self, address=None): ...
    async def dial(self, address): ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay out a distribution with one module and one entry point."""

    def lay_out(distribution: str, name: str, source: str, made_by: str = "Carrier") -> None:
        module = distribution.replace("-", "_")
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:{made_by}\n")
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    return lay_out


def test_listing_imports_nothing(install: Install) -> None:
    install("mesh-quiet", "quiet", "raise SystemExit('imported')")

    registry = Registry.discover()

    assert "quiet" in registry.names()
    assert (
        InstalledTransport("quiet", "mesh-quiet", "1.2", "mesh_quiet:Carrier")
        in registry.describe()
    )
    assert "mesh_quiet" not in sys.modules


def test_the_chosen_transport_alone_is_imported(install: Install) -> None:
    install("mesh-left", "left", GOOD.format(name="left"))
    install("mesh-right", "right", GOOD.format(name="right"))

    transport = Registry.discover().load("left")

    assert isinstance(transport, Transport)
    assert transport.name == "left"
    assert "mesh_right" not in sys.modules


@pytest.mark.parametrize("source", ["raise ValueError('broken')", "import nowhere"])
def test_a_broken_transport_does_not_affect_others(
    install: Install, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("mesh-aaa", "aaa", source)
    install("mesh-left", "bbb", GOOD.format(name="bbb"))
    registry = Registry.discover()

    assert [each.name for each in registry.dialing({"bbb"})] == ["bbb"]
    assert "Transport `aaa` of `mesh-aaa` 1.2 is broken" in caplog.text
    with pytest.raises(PluginError, match="is broken"):
        registry.load("aaa")


def test_of_default_transports_a_broken_one_is_left_out(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("mesh-aaa", "aaa", "import nowhere")
    install("mesh-bbb", "bbb", GOOD.format(name="bbb"))
    registry = Registry.discover()

    assert [each.name for each in registry.usable(("aaa", "bbb", "ccc"))] == ["bbb"]
    assert "Transport `aaa` of `mesh-aaa` 1.2 is broken: No module named" in caplog.text
    assert "Unknown transport `ccc`" in caplog.text
    with pytest.raises(PluginError, match=r"`aaa` of `mesh-aaa` 1\.2 is broken"):
        registry.usable(("aaa", "ccc"))


def test_no_more_transports_are_imported_than_dial_an_address(install: Install) -> None:
    install("mesh-aaa", "aaa", GOOD.format(name="aaa"))
    install("mesh-bbb", "bbb", GOOD.format(name="bbb"))

    assert [each.name for each in Registry.discover().dialing({"aaa"})] == ["aaa"]
    assert "mesh_bbb" not in sys.modules


def test_the_built_in_transport_is_a_plugin() -> None:
    assert Registry.discover().load("loopback").name == "loopback"


def test_an_unknown_name_lists_what_is_installed(install: Install) -> None:
    install("mesh-quiet", "quiet", "")

    with pytest.raises(PluginError, match="Unknown transport `quite`") as caught:
        Registry.discover().load("quite")

    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean `quiet`? installed: `")
    assert "`loopback`" in caught.value.hint


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(PluginError) as caught:
        Registry([]).load("loopback")

    assert caught.value.hint == "installed: none"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("Courier = None", "has no attribute 'Carrier'"),
        ("def Carrier(:", "invalid syntax"),
        ("def Carrier(address): ...", "missing 1 required positional argument"),
        ("Carrier = 7", "not callable"),
        ("class Carrier: name = 'broken'", "is not a transport named `broken`"),
        (GOOD.format(name="other"), "is not a transport named `broken`"),
    ],
)
def test_a_broken_plugin_names_its_distribution(install: Install, source: str, reason: str) -> None:
    install("mesh-broken", "broken", source)
    registry = Registry.discover()

    with pytest.raises(PluginError, match=r"of `mesh-broken` 1\.2 ") as caught:
        registry.load("broken")

    assert reason in str(caught.value)
    assert registry.load("loopback").name == "loopback"


def test_a_name_of_two_distributions_is_refused(install: Install) -> None:
    install("mesh-one", "twice", GOOD.format(name="twice"))
    install("mesh-two", "twice", GOOD.format(name="twice"))
    registry = Registry.discover()

    with pytest.raises(PluginError, match=r"`mesh-one` 1\.2, `mesh-two` 1\.2"):
        registry.load("twice")

    assert registry.names().count("twice") == 1
    assert len([offer for offer in registry.describe() if offer.name == "twice"]) == 2
    assert "mesh_one" not in sys.modules
    assert registry.load("loopback").name == "loopback"
