"""What is in the wheel: the packages, the model, man pages, completions, and nothing else."""

from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    builder = WheelBuilder(str(ROOT))
    built = next(builder.build(directory=str(tmp_path_factory.mktemp("wheel"))))
    return ZipFile(built)


def test_the_packages_are_at_the_top(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}

    packages = {top for top in tops if not top.startswith("meshllm-")}
    assert packages == {"meshllm", "meshllm_loopback", "meshllm_quic", "meshllm_websocket"}
    assert not [name for name in wheel.namelist() if name.endswith((".pth", ".pyc"))]


def test_the_embedded_model_is_small_and_whole(wheel: ZipFile) -> None:
    weights = [one for one in wheel.infolist() if one.filename.startswith("meshllm/model/builtin")]

    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        Path(one.filename).name for one in weights
    }
    assert sum(one.compress_size for one in weights) <= 16 * MEBIBYTE


def test_man_pages_and_completions_come_along(wheel: ZipFile) -> None:
    shared = {name.partition(".data/data/share/")[2] for name in wheel.namelist()} - {""}

    pages = {f"man/{page.parent.name}/{page.name}" for page in (ROOT / "man").glob("*/*")}
    assert {"man/man1/meshllm.1", "man/man7/meshllm-concepts.7"} <= pages
    assert shared == pages | {
        "bash-completion/completions/meshllm",
        "zsh/site-functions/_meshllm",
        "fish/vendor_completions.d/meshllm.fish",
    }


def test_the_entry_points_are_named(wheel: ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()

    assert "meshllm = meshllm.__main__:main" in text
    assert "loopback = meshllm_loopback:LoopbackTransport" in text
