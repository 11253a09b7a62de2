import re

import pytest

from meshllm import errors

KINDS = [each for each in vars(errors).values() if isinstance(each, type)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_has_each_error_with_its_exit_code(kind: type[errors.MeshError]) -> None:
    line = re.search(rf"^ +{kind.__name__} +(\d+)  ", errors.__doc__ or "", re.MULTILINE)

    assert line is not None
    assert int(line[1]) == kind.exit_code
