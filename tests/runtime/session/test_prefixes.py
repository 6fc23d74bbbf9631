"""Prefixes: rows that begin with kept caches give the outputs of rows that read all of their
tokens.
"""

import msgspec
import numpy as np
import pytest

from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.prefixes import BLOCK, Prefixes, can_share
from posenc_export.shared.numerics import worst_error
from tests.serve.models import artefact, opened

pytestmark = pytest.mark.xdist_group("serve")  # the worker that exports the same models
TOKENS = np.random.default_rng(0).integers(97, 123, 5 * BLOCK).tolist()


@pytest.fixture(scope="module", params=["ort", "onnx-static", "torchscript"])
def model(request: pytest.FixtureRequest) -> Model:
    return opened(artefact(request.param))


@pytest.fixture(scope="module")
def ort() -> Model:
    return opened(artefact("ort"))


def _saved(model: Model, rows: list[list[int]], count: int = 16) -> Prefixes:
    """Return prefixes with the tokens of some rows, saved one after another."""
    prefixes, session = Prefixes(model.graph, count), model.session()
    for tokens in rows:
        session.reset()
        session.prefill([tokens])
        session.share(0, tokens, prefixes)
    return prefixes


def test_a_row_that_begins_with_a_prefix_gives_the_outputs_of_one_that_reads_all_tokens(
    model: Model,
) -> None:
    assert can_share(model.manifest) and model.manifest.reference is not None
    prefixes, session = _saved(model, [TOKENS]), model.session()
    session.admit([TOKENS[:3]])  # another row, which is shorter
    begun = TOKENS[: 2 * BLOCK + 7]
    prefix = prefixes.find([*begun, 100, 101])
    assert prefix.length == 2 * BLOCK and (prefixes.hits, prefixes.tokens) == (1, 2 * BLOCK)
    results = [
        session.admit([[*begun[prefix.length :], 100, 101]], prefix=prefix)[0, -1],
        session.step(np.array([102, 103]))[1],
    ]
    alone = model.session()
    expected = [alone.prefill([[*begun, 100, 101]])[0, -1], alone.step(np.array([103]))[0]]
    assert session.length.tolist() == [4, len(begun) + 3]
    assert all(
        worst_error(one, other) <= model.manifest.reference.tolerance
        for one, other in zip(results, expected, strict=True)
    )


def test_a_whole_prompt_that_is_known_leaves_its_last_token_to_be_read(ort: Model) -> None:
    prefixes = _saved(ort, [TOKENS])
    assert [
        prefixes.find(TOKENS[:count]).length for count in (BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK)
    ] == [0, BLOCK, BLOCK, 4 * BLOCK]


def test_the_block_used_least_recently_is_replaced_and_never_one_before_a_kept_one(
    ort: Model,
) -> None:
    first, second, third = ([letter] * BLOCK for letter in (97, 98, 99))
    prefixes = _saved(ort, [[*first, *second], [*first, *third]], count=3)
    prefixes.find([*first, *second, 97])  # now the path over `third` is the oldest
    session = ort.session()
    session.prefill([[*second, *second]])
    session.share(0, [*second, *second], prefixes)
    assert prefixes.used == 3
    assert [
        prefixes.find([*tokens, 97]).length
        for tokens in ([*second, *second], [*first, *second], [*first, *third])
    ] == [2 * BLOCK, BLOCK, BLOCK]


def test_a_row_longer_than_the_memory_keeps_its_beginning(ort: Model) -> None:
    prefixes = _saved(ort, [TOKENS], count=2)
    assert prefixes.find(TOKENS).length == 2 * BLOCK and prefixes.used == 2


def test_random_rows_find_what_they_have_read_and_give_its_outputs(ort: Model) -> None:
    random = np.random.default_rng(1)
    prefixes = Prefixes(ort.graph, 5)
    session = ort.session()
    alone = ort.session()
    assert ort.manifest.reference is not None
    for _ in range(60):
        tokens = [
            97 + part
            for part in random.integers(0, 2, random.integers(1, 5)).tolist()
            for _ in range(BLOCK)
        ] + [100]
        session.reset()
        prefix = prefixes.find(tokens)
        result = session.admit([tokens[prefix.length :]], prefix=prefix)[0, -1]
        session.share(0, tokens, prefixes)
        alone.reset()
        assert (
            worst_error(result, alone.prefill([tokens])[0, -1]) <= ort.manifest.reference.tolerance
        )
    assert prefixes.used == 5 and prefixes.hits > 10


def test_states_that_each_call_replaces_cannot_be_shared(ort: Model) -> None:
    first, *others = ort.manifest.states
    assert can_share(ort.manifest)
    assert not can_share(
        ort.manifest.replace(states=[msgspec.structs.replace(first, update="replace"), *others])
    )


def test_what_a_row_does_not_hold_is_not_kept(ort: Model) -> None:
    prefixes, session = Prefixes(ort.graph, 2), ort.session()
    session.prefill([TOKENS[:9]])
    with pytest.raises(
        ValueError,
        match=r"session: expected tokens of a row that begins at position 0, got 10 of 9 tokens "
        r"from position 0 on; give",
    ):
        session.share(0, TOKENS[:10], prefixes)
    said = r"session: expected one row at position 0 after a prefix, got rows at \[3\]"
    with pytest.raises(ValueError, match=said):
        session.admit([TOKENS[:2]], start=3, prefix=prefixes.find(TOKENS))
    with pytest.raises(ValueError, match="session: expected a row index 0 .. 0, got 1"):
        session.share(1, TOKENS[:9], prefixes)
