"""Tests with the same xdist_group run in one worker, which exports for them once. pytest-xdist 3.8 ignores groups with pytest 9.2."""

import pytest


@pytest.mark.xdist_group("groups")
def test_a_worker_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith("@groups")
