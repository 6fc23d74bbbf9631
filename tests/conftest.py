"""Make exports in tests faster: less garbage collection, operators looked up once in a process, no
waiting for the disk, and one process for the tests of a file. Seed the random numbers of each test.
"""

import functools
import gc
import os
from typing import List

import pytest
import torch
from torch._export import utils

from posenc_export.runtime.graphs import kernel_library


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    # Modules and collected tests stay until the end, so that collections need not visit them.
    gc.freeze()
    # A trace allocates millions of objects; with Python's threshold of 700, collections take a
    # tenth of it.
    gc.set_threshold(50_000, 20, 20)
    # No test ends the power supply: a process that is killed loses nothing that it has written.
    os.fsync = lambda descriptor: None
    # A trace looks up all operators of PyTorch 50 times, in case one was registered since.
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    # The tests of a file run in one process, which makes their models and fixtures once.
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if kernel_library.path() is None:
        skipped = pytest.mark.skip(reason="the library of packages/kernels is not built")
        for item in items:
            values = getattr(getattr(item, "callspec", None), "params", {}).values()
            if any(isinstance(value, str) and value == "ort-native" for value in values):
                item.add_marker(skipped)


@pytest.fixture(autouse=True)
def seeded_generator() -> None:
    """Make the random numbers of a test independent of the tests before it."""
    torch.manual_seed(0)
