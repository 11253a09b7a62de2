import re

import pytest

from meshllm import errors
from meshllm.errors import LinkLost, MeshError, ModelError, foreign_code

KINDS = [
    each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MeshError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_has_each_error_with_its_exit_code(kind: type[errors.MeshError]) -> None:
    line = re.search(rf"^ +{kind.__name__} +(\d+)  ", errors.__doc__ or "", re.MULTILINE)

    assert line is not None
    assert int(line[1]) == kind.exit_code


def broken(error: Exception) -> ModelError:
    return ModelError(f"broken: {error}")


@pytest.mark.parametrize(
    "error", [Exception("odd"), ZeroDivisionError("odd"), OSError("odd"), MemoryError("odd")]
)
def test_any_error_of_foreign_code_gets_a_type(error: Exception) -> None:
    with pytest.raises(ModelError, match="broken: odd") as caught, foreign_code(broken):
        raise error

    assert caught.value.__cause__ is error


def test_our_errors_stay() -> None:
    error = LinkLost("gone")
    with pytest.raises(LinkLost) as caught, foreign_code(broken):
        raise error

    assert caught.value is error


def test_only_expected_errors_stay() -> None:
    with pytest.raises(ModelError, match="broken"), foreign_code(broken, expected=(ModelError,)):
        raise LinkLost("gone")
    with pytest.raises(MemoryError), foreign_code(broken, expected=(MemoryError,)):
        raise MemoryError
