"""How a model is found, and what is refused before anything runs."""

import json
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx2
import pytest
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError

from meshllm.errors import ModelError
from meshllm.model.files import source
from meshllm.model.files.source import Source, needed_files, open_folder, resolve
from meshllm.model.locate import MAX_CONFIG_BYTES
from meshllm.names import Span
from meshllm.testing.models import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny_model(tmp_path_factory.mktemp("llama"), file_bytes=60_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def hub(llama: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has the llama as `org/llama`; the list holds the files fetched from it."""
    fetched: list[str] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (revision == COMMIT) == bool(fetched)  # of one commit, though a branch may move
        folder = snapshot(cache, name)
        for path in sorted(llama.folder.iterdir()):
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, folder / path.name)
                fetched.append(path.name)
        return str(folder)

    monkeypatch.setattr(source, "snapshot_download", fetch)
    return fetched


def snapshot(cache: Path, name: str) -> Path:
    """Make the folder that the cache has for one commit of a model."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return folder


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | fields))
    return folder


def test_a_folder_is_a_model(llama: Source) -> None:
    found = resolve(str(llama.folder))

    assert (found.name, found.folder) == (str(llama.folder), llama.folder)
    assert found.config.num_hidden_layers == 6


def test_builtin_is_the_model_of_the_package() -> None:
    package = Path(source.__file__).parents[1]

    assert resolve("builtin").folder == package / "builtin" / "weights"


def test_a_model_id_is_found_in_the_cache(llama: Source, cache: Path) -> None:
    shutil.copytree(llama.folder, snapshot(cache, "org/llama"), dirs_exist_ok=True)

    assert resolve("org/llama").folder.name == COMMIT


def test_a_revision_is_found_by_its_name(llama: Source, cache: Path) -> None:
    folder = snapshot(cache, "org/llama")
    shutil.copytree(llama.folder, folder, dirs_exist_ok=True)
    (folder.parent.parent / "refs" / "v2").write_text(COMMIT)

    assert resolve("org/llama", revision="v2").folder == folder
    with pytest.raises(ModelError, match="There is no model `org/llama`"):
        resolve("org/llama", revision="v3")


def test_a_missing_model_is_reported_with_the_places_searched(cache: Path) -> None:
    with pytest.raises(ModelError, match=f"`org/none`: .* not in `{cache}`") as caught:
        resolve("org/none")

    assert caught.value.hint == "fetch it with `meshllm model pull org/none`"


@pytest.mark.parametrize(
    "name", ["", "~nobody", "llama", "a/b/c", "../b", "org/na me", "/no/such/folder"]
)
def test_an_invalid_name_is_refused(name: str, cache: Path) -> None:
    with pytest.raises(ModelError, match="There is no"):
        resolve(name)


@pytest.mark.parametrize("place", ["llama", "org/llama", "/abs"])
def test_a_name_from_a_peer_opens_no_folder(
    llama: Source, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / place.strip("/")
    shutil.copytree(llama.folder, folder)
    name = str(folder) if place == "/abs" else place

    with pytest.raises(ModelError) as caught:
        resolve(name, is_own=False)

    assert caught.value.hint in {
        "say where this machine has it: `--model FOLDER`",
        f"fetch it with `meshllm model pull {name}`",
    }
    assert resolve(name).folder.samefile(folder)


def test_a_name_from_a_peer_finds_the_models_of_the_hub(llama: Source, cache: Path) -> None:
    shutil.copytree(llama.folder, snapshot(cache, "org/llama"), dirs_exist_ok=True)

    assert resolve("org/llama", is_own=False).folder.name == COMMIT
    assert resolve("builtin", is_own=False) == resolve("builtin")


def test_a_download_brings_all_weights(llama: Source, hub: list[str]) -> None:
    found = resolve("org/llama", download=True)

    assert sorted(set(hub)) == sorted(path.name for path in llama.folder.iterdir())
    assert found.config.model_type == "llama"


@pytest.mark.parametrize("span", [Span(0, 2), Span(2, 4), Span(3, 6)])
def test_a_download_of_a_span_brings_the_files_that_hold_it(
    llama: Source, hub: list[str], span: Span
) -> None:
    resolve("org/llama", download=True, span=span)

    weights = {name for name in hub if name.endswith(".safetensors")}
    ends = {"embed": span.start == 0, "head": span.stop == 6}
    needed = needed_files(llama, span, **ends)
    if span.start == 0:  # the entry holds the head as well
        needed += needed_files(llama, Span(6, 6), embed=False, head=True)
    assert weights == set(needed)
    assert len(weights) < len(list(llama.folder.glob("*.safetensors")))


def test_a_repository_without_safetensors_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: str(tmp_path))

    with pytest.raises(ModelError, match="No safetensors weights of `org/llama` came ") as caught:
        resolve("org/llama", download=True)
    assert "pull" not in str(caught.value.hint)


def test_nothing_is_downloaded_offline(hub: list[str]) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        resolve("org/llama", download=True, offline=True)

    assert hub == []


@pytest.mark.parametrize("frame", ["", "Got: ConnectError: [Errno -2] ", "[Errno 113] "])
def test_a_hub_error_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, frame: str) -> None:
    def refuse(*_args: object, **_options: object) -> str:
        raise OSError(f"{frame}no route to host\nmore")

    monkeypatch.setattr(source, "snapshot_download", refuse)

    with pytest.raises(
        ModelError, match=r"^Cannot fetch `org/llama` from [^ ]*: no route to host$"
    ) as caught:
        resolve("org/llama", download=True)
    assert "internet connection" in str(caught.value.hint)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        resolve("org/llama", download=True)
    assert "unset `HF_HUB_OFFLINE`" in str(caught.value.hint)


def test_a_refusal_of_the_hub_suggests_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> str:
        request = httpx2.Request("GET", "https://hub.example")
        raise RepositoryNotFoundError("404", response=httpx2.Response(404, request=request))

    monkeypatch.setattr(source, "snapshot_download", refuse)

    with pytest.raises(ModelError) as caught:
        resolve("org/llama", download=True)
    assert "HF_TOKEN" in str(caught.value.hint)


def test_a_missing_repository_is_an_os_error() -> None:
    assert issubclass(RepositoryNotFoundError, OSError)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no `config\.json`"):
        open_folder("x", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"llama"', "\ud800", '\ufeff{"model_type": "llama"}']
)
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))

    with pytest.raises(ModelError, match=r"config\.json` cannot be read"):
        open_folder("x", tmp_path)


@pytest.mark.parametrize("model_type", ["hal9000", "", None, ["llama"]])
def test_an_unknown_type_is_refused(tmp_path: Path, model_type: object) -> None:
    write_config(tmp_path, model_type=model_type)

    with pytest.raises(ModelError, match=r"Model type `.*` of `x` is unknown") as caught:
        open_folder("x", tmp_path)
    assert transformers.__version__ in str(caught.value.hint)


@pytest.mark.parametrize("model_type", ["t5", "clip"])
def test_a_type_that_is_not_a_causal_language_model_is_refused(
    tmp_path: Path, model_type: str
) -> None:
    write_config(tmp_path, model_type=model_type)

    with pytest.raises(ModelError, match=f"Model type `{model_type}` is not a causal") as caught:
        open_folder("x", tmp_path)
    assert "meshllm model families" in str(caught.value.hint)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="hal9000", auto_map={"AutoConfig": "code.Config"})
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")

    with pytest.raises(ModelError) as caught:
        open_folder("x", tmp_path)
    assert "remote code" in str(caught.value.hint)


def test_a_known_type_is_run_by_the_code_of_transformers(tmp_path: Path) -> None:
    write_config(tmp_path, auto_map={"AutoConfig": "code.Config"})
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")

    config = open_folder("x", tmp_path).config
    assert type(config).__module__.startswith("transformers.")


def test_a_kernel_named_by_a_config_is_ignored(tmp_path: Path) -> None:
    write_config(tmp_path, _attn_implementation="stranger/kernel", attn_implementation="x/y")

    assert open_folder("x", tmp_path).config._attn_implementation is None


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, quantization_config={"quant_method": "fp8"})

    with pytest.raises(ModelError, match="are quantised"):
        open_folder("x", tmp_path)


@pytest.mark.parametrize("odd", [{"num_hidden_layers": "many"}, {"hidden_size": 0}])
def test_a_config_that_does_not_fit_its_type_is_refused(
    tmp_path: Path, odd: dict[str, object]
) -> None:
    write_config(tmp_path, **odd)

    with pytest.raises(ModelError, match=r"config\.json` is not a valid `llama` config"):
        open_folder("x", tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    with pytest.raises(ModelError, match=rf"{name}` cannot be read: not a regular file"):
        resolve(str(tmp_path))


def test_a_device_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")

    with pytest.raises(ModelError, match="not a regular file"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt", "tokenizer_config.json"])
def test_a_link_out_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    write_config(folder)
    secret.write_text("{}")
    (folder / name).symlink_to(secret)

    with pytest.raises(ModelError, match=rf"{name}` cannot be read: it is a link to a file outsi"):
        resolve(str(folder))


def test_a_further_template_that_is_linked_from_elsewhere_is_refused(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    templates = folder / "additional_chat_templates"
    templates.mkdir(parents=True)
    write_config(folder)
    secret.write_text("key")
    (templates / "default.jinja").symlink_to(secret)

    with pytest.raises(ModelError, match=r"default.jinja` cannot be read: it is a link to a file"):
        resolve(str(folder))


@pytest.mark.parametrize("number", [1, 12])
def test_a_pooling_that_is_linked_from_elsewhere_is_refused(tmp_path: Path, number: int) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "secrets"
    for each in (folder, elsewhere):
        each.mkdir()
        write_config(each)
    (folder / f"{number}_Pooling").symlink_to(elsewhere)

    with pytest.raises(ModelError, match=r"_Pooling/config.json` cannot be read: it is a link to"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("name", "limit"),
    [("config.json", MAX_CONFIG_BYTES), ("tokenizer.json", source.MAX_SMALL_BYTES)],
)
def test_a_small_file_that_is_large_is_refused(tmp_path: Path, name: str, limit: int) -> None:
    write_config(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.truncate(limit + 1)

    with pytest.raises(ModelError, match=f"more than {limit}"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("depth", [600, 200_000])
def test_a_config_that_is_nested_too_deep_is_refused(tmp_path: Path, depth: int) -> None:
    nested = '{"a": ' * depth + "3" + "}" * depth
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "x": {nested}}}')

    with pytest.raises(ModelError, match="cannot be read"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"decoder_layers": 10**9},
        {"encoder_layers": 10**9},
        {"num_decoder_layers": 10**9},
        {"model_type": "xlstm", "num_blocks": 10**9},
        {"model_type": "mellum", "num_mtp_layers": 10**9},
        {"model_type": "hrm_text", "num_layers_per_stack": 10**9},
        {"model_type": "stablelm", "num_attention_heads": 10**9},
        {"model_type": "cohere2_moe", "first_k_dense_replace": 10**9},
        {"model_type": "cohere2_moe", "first_k_dense_replace": -(10**9)},
        {"model_type": "gemma3n_text", "altup_num_inputs": 10**9},
        {"model_type": "deepseek_v4", "hc_sinkhorn_iters": 10**9},
        {"model_type": "qwen4_exp_text", "ngram_size": 10**9},
        {"model_type": "qwen4_exp_text", "heads_per_ngram": 10**9},
        {"model_type": "qwen4_exp_text", "ngram_vocab_size_base": 10**13},
        {"model_type": "qwen4_exp_text", "ple_layer_ids": list(range(1000))},
        {"pretraining_tp": 10**9},
        {"model_type": "gpt_neo", "attention_types": [["x"], [["global"], 10**9]]},
        {"model_type": "gpt_neo", "attention_types": [[[], 10**9], [["global"], -(10**9)]]},
        {"model_type": "gpt_neo", "attention_types": [["global" * 1000, 2000]]},
        {"model_type": "gpt_neo", "attention_types": [[["local"], 4096], [["global"], 1]]},
    ],
)
def test_an_absurd_count_in_a_config_is_refused_at_once(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    write_config(tmp_path, **fields)

    with pytest.raises(ModelError, match=r"config\.json` has -?\d+ as `\w+`, beyond \d+"):
        open_folder("x", tmp_path)


def test_a_model_with_many_heads_of_state_is_read(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="zamba2", n_mamba_heads=112)

    assert open_folder("x", tmp_path).config.n_mamba_heads == 112


def test_a_list_of_attention_types_is_counted(tmp_path: Path) -> None:
    kinds = [[["global", "local"], 2], [["local"], 1]]
    write_config(tmp_path, model_type="gpt_neo", num_layers=5, attention_types=kinds)

    assert len(open_folder("x", tmp_path).config.attention_layers) == 5


@pytest.mark.parametrize(
    "layers",
    [{"hybrid_override_pattern": "M" * 4097}, {"layers_block_type": ["mlp"] * 4097}],
    ids=["text", "list"],
)
def test_layers_that_a_config_lists_count_too(tmp_path: Path, layers: dict[str, Any]) -> None:
    write_config(tmp_path, model_type="nemotron_h", num_hidden_layers=2, **layers)

    with pytest.raises(ModelError, match="it has 4097 layers, more than 4096"):
        open_folder("x", tmp_path)


def test_a_config_that_refers_to_another_one_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, configuration_files=["config.1.0.json"])
    other = {"model_type": "llama", "num_hidden_layers": 10**9}
    (tmp_path / "config.1.0.json").write_text(json.dumps(other))

    with pytest.raises(ModelError, match="refers to other configs"):
        open_folder("x", tmp_path)
