import shutil
import subprocess
from pathlib import Path

import pytest

from tests.manual import __main__ as manual


def test_pages_and_completions_are_up_to_date() -> None:
    assert manual.stale(manual.ROOT) == [], "run `just fix`"


def test_drift_is_found_and_repaired(tmp_path: Path) -> None:
    manual.write(tmp_path)
    (tmp_path / "man" / "man1" / "meshllm-chat.1").write_text("old")
    (tmp_path / "man" / "man1" / "meshllm-gone.1").write_text("no such command any more")
    (tmp_path / "completions" / "_meshllm").unlink()

    behind = manual.stale(tmp_path)
    manual.write(tmp_path)

    assert behind == ["completions/_meshllm", "man/man1/meshllm-chat.1", "man/man1/meshllm-gone.1"]
    assert manual.stale(tmp_path) == []


def test_check_exits_by_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manual, "ROOT", tmp_path)

    codes = [manual.main([word]) for word in ("check", "write", "check", "bogus")]

    assert codes == [1, 0, 0, 2]
    assert "man/man1/meshllm-chat.1\n" in capsys.readouterr().out


def test_pages_do_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = manual.generate()

    monkeypatch.setenv("COLUMNS", "33")

    assert manual.generate() == wide


def test_the_first_page_tells_the_exit_codes_of_the_error_tree() -> None:
    from meshllm import errors

    codes = {
        str(each.exit_code)
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.MeshError)
    }

    assert codes | {"0", "129", "130", "141", "143"} == {code for code, _ in manual.EXIT_STATUS}


def test_pages_name_both_sides_of_a_switch_and_bracket_once() -> None:
    pages = manual.generate()

    assert "\\-\\-think, \\-\\-no\\-think\n" in pages["man/man1/meshllm-chat.1"]
    assert "\\-\\-project, \\-\\-user\n" in pages["man/man1/meshllm-config.1"]
    assert [name for name, text in pages.items() if "] [[" in text and name.endswith(".1")] == []


@pytest.mark.parametrize("name", [each for each in manual.generate() if each.endswith(".1")])
def test_each_command_has_examples(name: str) -> None:
    assert ".SH EXAMPLES\n.nf\nmeshllm " in manual.generate()[name]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("page", sorted(manual.generate()))
def test_groff_does_not_warn_about_a_page(page: str) -> None:
    if not page.startswith("man/"):
        return

    told = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", "-z"],
        input=manual.generate()[page],
        capture_output=True,
        text=True,
        check=True,
    )

    assert told.stderr == ""


@pytest.mark.parametrize(("shell", "name"), [("bash", "meshllm.bash"), ("bash", "_meshllm")])
def test_completions_parse(shell: str, name: str) -> None:
    script = manual.COMPLETIONS[name]

    assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0
