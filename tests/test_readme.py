"""The README is true."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_place_is_left_to_fill_in() -> None:
    assert "@@" not in README


def test_it_is_for_a_person_in_a_hurry() -> None:
    assert README.count("\n") <= 180


def test_every_file_it_links_to_is_there() -> None:
    links = [rest.partition(")")[0] for rest in README.split("](")[1:]]

    local = [link for link in links if not link.startswith(("#", "http"))]
    assert local
    assert [link for link in local if not (ROOT / link).exists() and link != "CHANGELOG"] == []


def test_the_number_of_model_types_is_that_of_the_table() -> None:
    verdicts = json.loads(
        (ROOT / "meshllm" / "model" / "parity" / "families.json").read_text("utf-8")
    )
    equal = sum(verdict["equal"] for verdict in verdicts.values())

    assert f"{equal} of the {len(verdicts)} text model types and variants" in README
    assert equal >= 115


def test_its_two_commands_are_those_of_the_gate() -> None:
    for name in ("try", "test"):
        block = README.partition(f"<!-- ci: {name} -->\n```sh\n")[2].partition("\n```")[0]
        assert block.count("\n") == 0
        assert block
