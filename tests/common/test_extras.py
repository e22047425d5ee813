import pytest

from scratch_ddp.common.extras import extra


def test_a_missing_package_says_what_to_install():
    message = r"^no_such_package is not installed; .* pip install '\.\[text\]'$"
    with pytest.raises(ModuleNotFoundError, match=message), extra("text"):
        import no_such_package.part  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'scratch_ddp\.no_such"), extra("text"):
        import scratch_ddp.no_such  # noqa: F401
