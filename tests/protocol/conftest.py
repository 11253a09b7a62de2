"""The gate runs these tests without the conftest of all tests, which imports torch."""

import tests.hypothesis_settings  # noqa: F401
