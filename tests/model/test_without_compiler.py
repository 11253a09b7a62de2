import os
import subprocess
import sys
import textwrap

import pytest
from transformers.utils import import_utils

from meshllm.model.without_compiler import _last_exports

UNUSED = {
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
}


SPY = """
    from meshllm.model import without_compiler
    given, stock_exports = [], without_compiler._last_exports
    def last(content):
        given.append((len(content), len(stock_exports(content))))
        return stock_exports(content)
    without_compiler._last_exports = last
"""
LOOK = """
    import builtins, io
    from meshllm.model.without_compiler import without_compiler
    opened, stock = [], io.open
    builtins.open = lambda *it, **more: opened.append(str(it[0])) or stock(*it, **more)
    with without_compiler():
        import transformers
    from transformers import GPT2Config
    from transformers.utils import import_utils
    print(sum("modeling_" in name for name in opened) > 99, GPT2Config().model_type)
    print(import_utils.create_import_structure_from_path.__module__, len(dir(transformers)))
"""
COMPARE = """
    import json, os
    from pathlib import Path
    from meshllm.model.without_compiler import _structure_to_json
    whole, least = (sum(sizes) for sizes in zip(*given))
    print(len(given) > 999, least * 9 < whole)
    scan = import_utils.create_import_structure_from_path
    scan.cache_clear()
    structure = scan(Path(transformers.__file__).parent / "models")
    (record,) = Path(os.environ["XDG_CACHE_HOME"], "meshllm").glob("*.json")
    print(_structure_to_json(structure) == json.loads(record.read_text()))
"""


DAMAGE = """
    import os
    from pathlib import Path
    (record,) = Path(os.environ["XDG_CACHE_HOME"], "meshllm").glob("*.json")
    written = record.read_text()
    record.write_text('DATA')
"""
REPAIRED = """
    print(record.read_text() == written)
"""
EACH = """
    import os, sys
    import meshllm.model.without_compiler  # and torch with it, once for all
    for code in sys.argv[1:]:
        if not os.fork():
            exec(code, {})
            sys.exit()
        assert os.wait()[1] == 0
        print("end", flush=True)
"""


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What processes tell that fill a cache, find it full, and find it damaged."""
    damaged = (DAMAGE.replace("DATA", data) + LOOK + REPAIRED for data in ('{"pairs": 3}', "[]"))
    codes = [SPY + LOOK + COMPARE, LOOK, *damaged]
    done = subprocess.run(
        [sys.executable, "-c", *map(textwrap.dedent, (EACH, *codes))],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))},
        capture_output=True,
        text=True,
        check=True,
    )
    return [each.split() for each in done.stdout.split("end\n")[:-1]]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What one process reports, which loads a model and then uses the compiler."""
    code = f"""
        import sys
        from meshllm.cli.shared.local import import_heavy
        import_heavy("meshllm.node.preparation", "meshllm.node.ring.runtime")
        import torch
        from meshllm.model.capacity import shape_of
        from meshllm.model.steps.runner import Runner
        from meshllm.model.steps.load import load_shard
        from meshllm.model.split.shard import Shard
        from meshllm.model.files.source import resolve
        from meshllm.model.text.tokenizer import Text
        from meshllm.names import Span
        source = resolve("builtin")
        tokens = torch.tensor([Text.load(source.folder).encode("hello")])
        shard = load_shard(source, Span(0, shape_of(source).layers), embed=True, head=True)
        runner = Runner(shard, (1, 2))
        cache = runner.new_cache()
        runner.prefill(tokens, cache)
        runner.step(tokens[:, :2], cache)
        print("run", {UNUSED} & set(sys.modules))

        from meshllm.model.parity.families import read_table, tiny_config
        from meshllm.model.split import meta_model
        def look(kind):
            meta_model._STRUCTURES.clear()
            built = meta_model.build(tiny_config(kind, read_table()), torch.bfloat16)
            shapes = {{name: tuple(t.shape) for name, t in built.model.state_dict().items()}}
            return shapes, built.structure
        kinds = "qwen3", "qwen3_moe", "mamba", "gpt2"
        without = [look(kind) for kind in kinds]
        print("meta", "torch._dynamo" in sys.modules)

        from meshllm.model.without_compiler import without_compiler
        with without_compiler():
            from torch._dynamo import reset
            from torch.fx.experimental.symbolic_shapes import ShapeEnv
        print("names", reset.__module__, ShapeEnv.__module__, "sympy" in sys.modules)
        print("compiled", without == [look(kind) for kind in kinds])

        from transformers.masking_utils import TransformGetItemToIndex
        with TransformGetItemToIndex():
            print("used", torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_model_is_loaded_and_run_without_a_compiler(found: dict[str, str]) -> None:
    assert found["run"] == "set()"


def test_the_compiler_can_be_used_afterwards(found: dict[str, str]) -> None:
    assert found["used"] == "[2.0, 2.0]"


def test_other_names_come_from_the_real_module(found: dict[str, str]) -> None:
    assert found["names"] == "torch._dynamo torch.fx.experimental.symbolic_shapes True"


def test_models_on_meta_are_the_same_without_a_compiler(found: dict[str, str]) -> None:
    assert (found["meta"], found["compiled"]) == ("False", "True")


def test_the_scan_splits_little_and_finds_what_transformers_does(
    scanned: list[list[str]],
) -> None:
    assert scanned[0][4:] == ["True", "True", "True"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1",
        "__all__ = ['a', 'b']",
        "__all__ = ['a']\nx = 1\n__all__ = [\n    'c',\n    'd',\n]\n",
        "x = '__all__'\r\n__all__ = ['a']\r\n",
        "__all__ = ['a']\n\x0c__all__ = ['b']\n",
        "__all__ = ['a']\u2028__all__ = ['b']\n",
        "def f():\n    __all__ = 1\n",
    ],
)
def test_the_last_exports_of_a_module_are_found(text: str) -> None:
    fetch = import_utils.fetch__all__

    assert fetch(_last_exports(text)) == fetch(text)


def test_transformers_is_scanned_once_per_machine(scanned: list[list[str]]) -> None:
    first, (second, *others) = scanned[0][:4], scanned[1:]

    assert first == ["True", *second[1:]]
    assert second[:3] == ["False", "gpt2", "transformers.utils.import_utils"]
    assert others == [[*first, "True"]] * 2  # the record is as before
