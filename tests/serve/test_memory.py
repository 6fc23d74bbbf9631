"""Caches that do not fit the memory are refused before they are allocated."""

from pathlib import Path

import pytest

from posenc_export.runtime.session.caches import Caches
from posenc_export.serve.memory import available_memory, bytes_per_slot, check_memory
from posenc_export.serve.requests import Limits
from tests.serve.models import artefact, opened

pytestmark = pytest.mark.xdist_group("serve")


def test_caches_beyond_the_memory_are_refused_with_the_context_that_fits(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = opened(artefact(tmp_path_factory.getbasetemp(), "ort"))
    (key, value) = Caches.of(model.graph, 40, 3).reserve(40, 3).past
    each = (key.array.nbytes + value.array.nbytes) // (3 * 40)
    assert bytes_per_slot(model.manifest) == each
    check_memory(model.manifest, Limits(rows=4, context=100), 4 * 100 * each)
    check_memory(model.manifest, Limits(rows=4, context=100), None)
    with pytest.raises(
        ValueError,
        match=r"serve: expected memory for caches of 4 rows of 101 tokens, got .*; .* with these "
        r"rows at most 100\Z",
    ):
        check_memory(model.manifest, Limits(rows=4, context=101), 4 * 100 * each)


def test_the_available_memory_is_known_on_linux() -> None:
    assert not Path("/proc/meminfo").is_file() or (available_memory() or 0) > 1 << 20
