import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import meshllm as package
from meshllm.cli import app
from meshllm.cli.app import SPIN_LIMITS, limit_spinning
from meshllm.cli.chat import chat
from meshllm.errors import IntegrityFault, LinkLost, MeshError, ModelError, TimedOut
from tests.builders.fake_ring import FakeRing
from tests.cli.conftest import Invoke

HEAVY = {
    "torch", "transformers", "asyncio", "websockets", "aioquic", "rich", "prompt_toolkit", "numpy",
    "huggingface_hub", "safetensors", "meshllm.status", "httpx2", "uvicorn", "starlette",
    "cryptography", "meshllm.protocol",
}  # fmt: skip


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, json, meshllm.cli.app; print(json.dumps(list(sys.modules)))"

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert HEAVY.isdisjoint(json.loads(told.stdout))


WITHOUT_GPU = """
import os, sys
os.getloadavg = lambda: (0, 0, 0)
from meshllm.model import hardware
hardware.may_have_gpu = lambda: False
from meshllm.cli.app import main
sys.argv = ["meshllm", *sys.argv[1:]]
try: main()
finally: print(sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("words", ["doctor", "model show builtin"])
def test_what_was_computed_before_is_told_without_torch(tmp_path: Path, words: str) -> None:
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", WITHOUT_GPU, *words.split()]
    runs = [
        subprocess.run(command, check=True, env=home, capture_output=True, text=True)
        for _ in range(2)
    ]

    first, again = (run.stderr.splitlines()[-1] for run in runs)
    assert (first, again) == ("['torch', 'transformers']", "[]")
    assert "builtin" in runs[1].stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="spinning is limited on x86-64 only")
def test_the_threads_of_torch_take_the_limit_of_spinning() -> None:
    code = "from meshllm.cli.app import limit_spinning; limit_spinning(); import torch"
    own = {*SPIN_LIMITS, "OMP_WAIT_POLICY"}
    variables = {name: value for name, value in os.environ.items() if name not in own}
    variables["OMP_DISPLAY_ENV"] = "VERBOSE"  # OpenMP tells what it has read

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )

    assert f"GOMP_SPINCOUNT = '{SPIN_LIMITS['GOMP_SPINCOUNT']}'" in done.stderr


def test_environment_variables_for_spinning_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SPIN_LIMITS, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["KMP_BLOCKTIME"] == SPIN_LIMITS["KMP_BLOCKTIME"]

    del os.environ["KMP_BLOCKTIME"]  # set by `limit_spinning`
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "KMP_BLOCKTIME" not in os.environ


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from meshllm.cli.app import main\n"
        "sys.argv = ['meshllm', '--help']\n"
        "try: main()\n"
        f"except SystemExit: print({HEAVY!r} & set(sys.modules), file=sys.stderr)"
    )

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "Commands:" in told.stdout
    assert told.stderr == "set()\n"


@pytest.mark.parametrize(
    "words",
    [
        ("node",), ("id",), ("doctor",), ("ring", "status"), ("ring", "ticket"),
        ("ring", "members"), ("ring", "remove"), ("ring", "trace"), ("ring", "plan"),
    ],
)  # fmt: skip
def test_every_command_has_a_summary_of_one_line(meshllm: Invoke, words: tuple[str, ...]) -> None:
    result = meshllm(*words, "--help")

    summary = result.stdout.splitlines()[2].strip()
    assert result.exit_code == 0
    assert summary.endswith(".")
    assert len(summary) <= 60


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_commands_and_examples(meshllm: Invoke, words: tuple[str, ...]) -> None:
    result = meshllm(*words)

    assert result.exit_code == 0
    for name in ("chat", "node", "ring", "id", "doctor", "model", "transport", "config", "bench"):
        assert f"\n  {name} " in result.stdout
    assert '\n    meshllm chat --nodes 3 "What is a ring?"\n' in result.stdout


def test_version(meshllm: Invoke) -> None:
    assert meshllm("--version").stdout == f"meshllm {package.__version__}\n"


def test_version_with_v_lists_dependencies(meshllm: Invoke) -> None:
    lines = [line.split()[0] for line in meshllm("--version", "-v").stdout.splitlines()]

    assert lines[:4] == ["meshllm", "python", "torch", "transformers"]
    assert "transport" in lines


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("cha",), "No such command 'cha'. Did you mean 'chat'?", "see `meshllm --help`"),
        (("status",), "No such command 'status'", "there is `meshllm ring status`"),
        (("chat", "--nods", "3"), "No such option: --nods", "see `meshllm chat --help`"),
        (
            ("chat", "hi", "there"),
            "Got unexpected extra argument(s) (there)",
            "put a text of several words in quotes; see `meshllm chat --help`",
        ),
        (
            ("config", "set", "presence-penalty", "-1"),
            "No such option: -1",
            "write `--` before a negative number",
        ),
        (
            ("serve", "-v"),
            "No such option: -v",
            "write it before the command, as in `meshllm -v ...`",
        ),
        (
            ("chat", "--debug"),
            "No such option: --debug",
            "write it before the command, as in `meshllm --debug ...`",
        ),
        (
            ("chat", "--nodes", "x"),
            "Invalid value for '--nodes': not a whole number",
            "see `meshllm chat --help`",
        ),
        (
            ("chat", "--temperature", "x"),
            "Invalid value for '--temperature': not a number",
            "see `meshllm chat --help`",
        ),
        (
            ("serve", "--port", "99999"),
            "Invalid value for '--port': more than 65535",
            "see `meshllm serve --help`",
        ),
        (
            ("ring", "ticket", "--uses", "0"),
            "Invalid value for '--uses': less than 1",
            "see `meshllm ring ticket --help`",
        ),
        (
            ("chat", "--ends", "x"),
            "Invalid value for '--ends': 'x' is",
            "see `meshllm chat --help`",
        ),
        (("config",), "Missing command", "see `meshllm config --help`"),
    ],
)
def test_an_invalid_command_line_is_a_usage_error(
    meshllm: Invoke, words: tuple[str, ...], message: str, hint: str
) -> None:
    result = meshllm(*words)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.endswith(f"hint: {hint}\n")


def test_a_closed_stdout_is_reported() -> None:
    code = "import sys; sys.stdout = None; from meshllm.cli.app import main; main()"

    told = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False
    )

    assert (told.returncode, told.stderr) == (1, "error: Standard output is closed\n")


@pytest.mark.parametrize(
    "error",
    [
        MeshError("it went wrong"),
        LinkLost("it went wrong"),
        ModelError("it went wrong"),
        TimedOut("it went wrong"),
        IntegrityFault("it went wrong"),
    ],
)
def test_an_expected_error_is_a_line_and_its_own_exit_code(
    meshllm: Invoke, ring: FakeRing, error: MeshError
) -> None:
    ring.error = error

    result = meshllm("chat", "hi")

    assert result.exit_code == error.exit_code
    assert (result.stdout, result.stderr) == ("", "error: it went wrong\n")


def test_a_hint_is_a_line_of_its_own(meshllm: Invoke, ring: FakeRing) -> None:
    ring.error = ModelError("There is no model `x`", hint="pull it")

    assert meshllm("chat", "hi").stderr == "error: There is no model `x`\nhint: pull it\n"


def test_control_characters_in_an_error_are_escaped(meshllm: Invoke, ring: FakeRing) -> None:
    ring.error = ModelError("There is no model `\x1b[2J`")

    assert meshllm("chat", "hi").stderr == "error: There is no model `\\x1b[2J`\n"


def test_the_expected_error_of_a_group_is_reported(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = ExceptionGroup("", [OSError(), ExceptionGroup("", [LinkLost("Node 2 is gone")])])
    monkeypatch.setattr(chat, "_request", _raising(group))

    result = meshllm("chat", "hi")

    assert (result.exit_code, result.stderr) == (3, "error: Node 2 is gone\n")


def test_a_bug_is_reported_in_short(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_request", _raising(ZeroDivisionError("oh")))

    result = meshllm("chat", "hi")

    assert result.exit_code == 1
    assert result.stderr.startswith("error: This is a bug in meshllm")
    assert "ZeroDivisionError: oh\nhint: run it again as `meshllm --debug ...`" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("by_flag", [True, False])
def test_debug_shows_the_traceback(
    meshllm: Invoke, ring: FakeRing, monkeypatch: pytest.MonkeyPatch, by_flag: bool
) -> None:
    ring.error = ModelError("no")
    if not by_flag:
        monkeypatch.setenv("MESHLLM_DEBUG", "1")

    result = meshllm(*(["--debug"] if by_flag else []), "chat", "hi")

    assert result.exit_code == 4
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: no\n")


def test_an_invalid_setting_is_reported_although_debug_is_read_from_it(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_NODES", "many")

    result = meshllm("config", "show")

    assert result.exit_code == 2
    assert result.stderr == "error: `nodes` is 'many', not a whole number (MESHLLM_NODES)\n"


def test_a_number_of_any_length_is_reported(meshllm: Invoke, home: Path) -> None:
    (home / "meshllm.toml").write_text(f"temperature = -1{'0' * 310}")

    result = meshllm("config", "show")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: `temperature` is -inf, not between 0 and 100")


def test_a_bug_in_the_settings_is_reported(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.config.files", _raising(ZeroDivisionError("oh")))

    result = meshllm("config", "show")

    assert (result.exit_code, result.stderr.count("ZeroDivisionError: oh\n")) == (1, 1)
    assert "Traceback" not in result.stderr


@pytest.fixture
def deleted(home: Path) -> None:
    """Work in a directory that was deleted."""
    folder = home / "deleted"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


@pytest.mark.usefixtures("deleted")
@pytest.mark.parametrize(
    "words",
    [
        ("id",), ("chat", "hi"), ("node",), ("serve",), ("config", "show"), ("config", "path"),
        ("key", "list"), ("ring", "status"), ("ring", "plan", "--spec", "8MiB:2ms"), ("usage",),
        ("doctor",), ("relay",), ("model", "show", "builtin"), ("model", "verify", "builtin"),
        ("model", "stop", "x"), ("bench",), ("provide", "--url", "http://127.0.0.1:1/v1"),
    ],
)  # fmt: skip
def test_a_working_directory_that_was_deleted_is_reported(
    meshllm: Invoke, words: tuple[str, ...]
) -> None:
    result = meshllm(*words)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: The working directory cannot be used: no such file or directory\n"
        "hint: it may have been deleted; change to another one\n"
    )


@pytest.mark.usefixtures("deleted")
@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("help", "concepts"), ("model", "list")]
)
def test_what_needs_no_working_directory_works_without_one(
    meshllm: Invoke, words: tuple[str, ...]
) -> None:
    assert meshllm(*words).exit_code == 0


def test_an_interrupt_exits_130(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_request", _raising(KeyboardInterrupt()))

    result = meshllm("chat", "hi")

    assert (result.exit_code, result.output) == (130, "")


def test_verbose_sets_up_the_log(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr("meshllm.log.setup", levels.append)

    meshllm("-vv", "transport", "list")

    assert levels == [2]


def test_main_runs_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshllm", "--version"])

    with pytest.raises(SystemExit) as left:
        app.main()

    assert left.value.code in {0, None}
    assert capsys.readouterr().out.startswith("meshllm ")


def test_an_interrupt_before_the_command_runs_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "app", _raising(KeyboardInterrupt()))

    with pytest.raises(SystemExit) as left:
        app.main()

    assert left.value.code == 130


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "/proc/1/stat"),
            "error: Too many open files: `/proc/1/stat`\nhint: raise the limit of open files",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "error: No space left on device\nhint: ",
        ),
    ],
)
def test_what_the_machine_lacks_is_not_a_bug(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, error: OSError, shown: str
) -> None:
    monkeypatch.setattr(chat, "_request", _raising(error))

    result = meshllm("chat", "hi")

    assert result.exit_code == 1
    assert result.stderr.startswith(shown)


def test_a_lack_of_memory_is_reported(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_request", _raising(MemoryError()))

    result = meshllm("chat", "hi")

    assert result.exit_code == 4
    assert result.stderr.startswith("error: Not enough memory\nhint: ")


def test_a_report_that_lacks_memory_itself_is_made_shorter(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "app", _raising(MemoryError()))

    with pytest.raises(SystemExit) as left:
        app.main()

    assert left.value.code == 4
    assert capfd.readouterr().err.startswith("error: Not enough memory\n")


def _raising(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
