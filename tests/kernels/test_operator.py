"""The operator CachedAttention against attention in float64, and against itself in other divisions
of the same work.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.graphs import kernel_library
from tests.kernels.calls import Case, built, model, run, session

pytestmark = built
TOLERANCE = 2e-5  # of weighted sums of normal numbers; a key too many changes 1/keys
STATM = Path("/proc/self/statm")
PART = 256  # keys of a part (packages/kernels/source/call.h)
CACHES = ("float32", *CACHE_FORMATS)
EVERY = ("rotation", "positions", "distance", "bias", "sinks", "query rows", "key rows", "decays",
         "distance keys", "turns")  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "first token": {"cached": (0,)},
    "one key before": {"cached": (1,)},
    **{f"{n} keys": {"cached": (n - 1,)} for n in (15, 16, 17, PART, PART + 1, 2 * PART, 700)},
    "separate inputs": {"packed": False},
    "no sharing": {"heads": 3, "kv_heads": 3},
    "one key head": {"heads": 71, "kv_heads": 1, "size": 8},
    "head size 8": {"size": 8},
    "head size 24": {"size": 24, "cached": (300,)},
    "head size 80": {"size": 80},
    "head size 256": {"size": 256, "heads": 2, "kv_heads": 1},
    "narrow values": {"size": 64, "value_size": 24, "cached": (300,), "counts": (2,)},
    "wide values": {"value_size": 48, "cached": (300,), "counts": (20,), "kinds": EVERY},
    "rows": {"cached": (0, 3, PART, 300), "counts": (1, 1, 1, 1), "kinds": ("rotation",)},
    "ragged rows": {"cached": (0, 3, 9), "counts": (4, 1, 0), "kinds": ("rotation", "distance")},
    "prompt": {"cached": (0,), "counts": (70,), "kinds": ("rotation",)},
    "tokens over a cache": {"cached": (500,), "counts": (33,), "kinds": EVERY},
    "rows of tokens": {"cached": (500, 0, 255), "counts": (5, 40, 2), "kinds": EVERY},
    "rotation": {"kinds": ("rotation",)},
    "interleaved": {"kinds": ("rotation", "interleaved"), "counts": (3,)},
    "partial": {"kinds": ("rotation", "partial"), "counts": (3,)},
    "by position": {"kinds": ("rotation", "positions"), "cached": (5, 0), "counts": (2, 2)},
    "other tables of keys": {"kinds": ("rotation", "key rotation", "interleaved")},
    "distance": {"kinds": ("distance",), "cached": (300,), "counts": (3,)},
    "short table": {"kinds": ("distance",), "cached": (300,), "counts": (3,), "reach": 20},
    "one distance": {"kinds": ("distance",), "cached": (30,), "reach": 1},
    "bias": {"kinds": ("bias",), "cached": (300, 2), "counts": (2, 1)},
    "sinks": {"kinds": ("sinks",), "cached": (300,)},
    "rows of queries": {"kinds": ("query rows",), "cached": (300, 2), "counts": (3, 1)},
    "rows of keys": {"kinds": ("key rows",), "cached": (300, 2), "counts": (3, 1)},
    "one row": {"kinds": ("query rows", "key rows"), "cached": (300,), "table_rows": 1},
    "many rows": {"kinds": ("query rows", "key rows"), "cached": (700,), "counts": (40,),
        "reach": 300, "table_rows": 130},
    "decays": {"kinds": ("decays",), "cached": (300, 2), "counts": (3, 1)},
    "decays of many keys": {"kinds": ("decays",), "heads": 5, "kv_heads": 5, "cached": (3000,)},
    "counts": {"kinds": ("counts",), "cached": (300, 2), "counts": (3, 1), "table_rows": 8},
    "counts of many keys": {"kinds": ("counts", "distance"), "cached": (1000, 300),
        "counts": (40, 7), "table_rows": 300},
    "counts in a window": {"kinds": ("counts",), "cached": (700,), "counts": (5,),
        "table_rows": 200, "attributes": {"local_window_size": 300}},
    "pieces": {"kinds": ("pieces",), "cached": (300, 2), "counts": (3, 1)},
    "one piece": {"kinds": ("pieces",), "cached": (30,), "table_rows": 1},
    "pieces of few distances": {"kinds": ("pieces", "bias"), "cached": (700,), "counts": (40,),
        "reach": 300, "table_rows": 33},
    "keys of distances": {"kinds": ("distance keys",), "cached": (300, 2), "counts": (3, 1)},
    "keys of odd distances": {"kinds": ("distance keys",), "cached": (1, 0), "counts": (1, 1)},
    "keys of distances and other scores": {"kinds": ("distance keys", "bias"), "heads": 3,
        "kv_heads": 3, "cached": (700, 0, 250), "counts": (60, 60, 20),
        "attributes": {"softcap": 9.0}},
    "keys of distances in a window": {"kinds": ("distance keys",), "size": 64, "cached": (700,),
        "counts": (60,), "reach": 99, "attributes": {"local_window_size": 100}},
    "turned keys": {"kinds": ("turns",), "cached": (300, 2), "counts": (3, 1)},
    **{f"turned keys of size {size}": {"kinds": ("turns",), "size": size,
        "cached": (300,)} for size in (32, 64, 80, 128)},
    "turned pairs side by side": {"kinds": ("turns", "interleaved"), "cached": (40,)},
    "a turned part of each key":
        {"kinds": ("rotation", "positions", "turns", "partial", "sinks", "distance"),
        "cached": (700, 13), "counts": (40, 3), "size": 64, "heads": 9, "kv_heads": 1},
    "turned keys in a window": {"kinds": ("turns",), "cached": (700,), "counts": (5,),
        "attributes": {"local_window_size": 300, "softcap": 20.0}},
    "turned keys far away": {"kinds": ("turns",), "heads": 2, "kv_heads": 1, "cached": (9000,)},
    "softcap": {"attributes": {"softcap": 1.5}, "cached": (300,)},
    "scale": {"attributes": {"scale": 1.0}, "cached": (30,)},
    "window": {"attributes": {"local_window_size": 20}, "cached": (300,), "counts": (40,)},
    "window of one": {"attributes": {"local_window_size": 1}, "cached": (300,)},
    "wide window": {"attributes": {"local_window_size": PART + 9}, "cached": (900,)},
    "chunks": {"attributes": {"chunk_size": 16}, "kinds": ("rotation", "positions"),
        "cached": (300, 13), "counts": (20, 3)},
    "everything": {"attributes": {"chunk_size": 90, "softcap": 20.0, "local_window_size": 60},
        "kinds": EVERY, "cached": (300, 13), "counts": (20, 3), "size": 64, "heads": 9,
        "kv_heads": 3},
}  # fmt: skip


def bound(case: Case, expected: np.ndarray) -> float:
    """Return the bound of the error of outputs. A rotated key that falls on a border between two
    codes may be rounded to either.
    """
    step = {"float32": 0, "float16": 2.0**-9, "int8": 0.03}[case.cache]
    other = step * np.abs(case.feeds["query"]).max() if "rotation" in case.kinds else 0
    return TOLERANCE * max(1, np.abs(expected).max()) + other


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CASES)
def test_output_is_attention_in_float64(name: str, cache: str) -> None:
    case = Case(**CASES[name], cache=cache)
    y, _, _, *row_weights = case.run()
    expected, _ = case.expected()
    assert np.abs(y - expected).max() <= bound(case, expected)
    for weights in row_weights:
        assert np.abs(weights - case.row_weights).max() <= bound(case, np.ones(1))


@pytest.mark.parametrize("name", ["ragged rows", "rows of tokens", "interleaved", "partial"])
def test_new_keys_and_values_are_appended_and_other_slots_stay(name: str) -> None:
    case = Case(**CASES[name])
    _, keys, values, *_ = case.run()
    _, read = case.expected()
    for row, (n, count) in enumerate(zip(case.cached, case.counts, strict=True)):
        for past, present, expected in zip(
            ("past_key", "past_value"), (keys, values), read[row], strict=True
        ):
            assert np.abs(present[row, :, : n + count] - expected).max(initial=0) <= 1e-5
            before = case.feeds[past][row]
            assert np.array_equal(present[row, :, :n], before[:, :n])
            assert np.array_equal(present[row, :, n + count :], before[:, n + count :], True)


def test_codes_of_new_keys_are_rounded_to_even_and_limited() -> None:
    case = Case(cached=(0,), counts=(1,), cache="int8", heads=1, kv_heads=1, size=8, packed=False)
    for name in ("k_scale", "v_scale"):
        case.feeds[name] = np.full(8, 0.5, np.float32)
    numbers = np.array([0.25, 0.75, -0.25, 1e9, -1e9, 63.6, -64.4, 3.0], np.float32)
    case.feeds["key"] = case.feeds["value"] = numbers.reshape(1, 1, 8)
    _, *presents = case.run()
    for present in presents:
        assert present[0, 0, 0].tolist() == [0, 2, 0, 127, -128, 127, -128, 6]


def _halves(numbers: np.ndarray) -> Case:
    """Return a call of a token that sees itself alone, with these numbers as keys and values."""
    heads = numbers.reshape(1, 1, -1, 64)
    count = heads.shape[2]
    case = Case(cached=(0,), counts=(1,), cache="float16", heads=count, kv_heads=count, size=64,
                packed=False)  # fmt: skip
    case.feeds["key"] = case.feeds["value"] = heads.reshape(1, 1, -1)
    case.feeds["query"] = np.zeros_like(case.feeds["key"])
    return case


def test_every_number_of_float16_is_stored_and_read_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = np.where(np.isfinite(every), every, 0).astype(np.float32)
    y, *presents = _halves(numbers).run()
    assert np.array_equal(y.reshape(-1), numbers)
    for present in presents:
        assert np.array_equal(present[0, :, 0].reshape(-1), numbers.astype(np.float16))


def test_numbers_are_rounded_to_float16_to_even_and_limited_to_its_largest() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:] + halves[:-1]) / 2  # ties, which float32 holds exactly
    numbers = np.concatenate((between, np.nextafter(between, 0), np.nextafter(between, 1e9)))
    large = np.float32([65504, 65519, 65520, 1e9, np.inf, 1e-9, 1e-40, 0])
    numbers = np.concatenate((numbers, large))
    numbers = np.pad(np.concatenate((numbers, -numbers)), (0, -2 * len(numbers) % 64))
    y, *presents = _halves(numbers).run()
    expected = np.clip(numbers, -65504, 65504).astype(np.float16)
    assert np.array_equal(y.reshape(-1), expected.astype(np.float32))
    for present in presents:
        assert np.array_equal(present[0, :, 0].reshape(-1), expected)


def test_a_number_of_float16_that_is_none_stays_in_its_row() -> None:
    case = Case(cached=(3, 3), counts=(1, 1), cache="float16")
    expected = case.run()[0]
    case.feeds["query"][0, 0, -case.value_size :] = np.nan  # of the last value head
    y, _, values, *_ = case.run()
    assert np.isnan(values[0, -1, 3]).all() and np.isnan(y[0, 0, -case.size :]).all()
    assert np.array_equal(y[1], expected[1])


def _bound(case: Case, threads: int) -> tuple[np.ndarray, ...]:
    """Run a call whose caches are bound to an input and its output."""
    opened = session(model(case.feeds, case.node), threads)
    binding = opened.io_binding()
    caches = [
        onnxruntime.OrtValue.ortvalue_from_numpy(case.feeds[name].copy())
        for name in ("past_key", "past_value")
    ]
    for name, array in case.feeds.items():
        if not name.startswith("past"):
            binding.bind_cpu_input(name, array)
    for name, cache in zip(("key", "value"), caches, strict=True):
        binding.bind_ortvalue_input(f"past_{name}", cache)
        binding.bind_ortvalue_output(f"present_{name}", cache)
    binding.bind_output("y")
    if "row_of_distance" in case.feeds:
        binding.bind_output("row_weights")
    opened.run_with_iobinding(binding)
    y, *row_weights = binding.get_outputs()[2:]
    return tuple(x.numpy().copy() for x in (y, *caches, *row_weights))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_caches_are_written_in_place_with_the_same_results(threads: int, cache: str) -> None:
    case = Case(**CASES["rows of tokens"], cache=cache)
    for whole, bound in zip(case.run(), _bound(case, threads), strict=True):
        assert np.array_equal(whole, bound, equal_nan=True)


@pytest.mark.parametrize("cache", CACHES)
def test_results_are_the_same_bits_for_every_number_of_threads(cache: str) -> None:
    case = Case(heads=9, kv_heads=3, size=64, cached=(3000,), counts=(2,), kinds=EVERY, cache=cache)
    alone = case.run()
    for threads in (2, 3, 5):
        for first, second in zip(alone, case.run(threads), strict=True):
            assert np.array_equal(first, second, equal_nan=True)


def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    kinds = ("rotation", "distance", "query rows", "key rows", "decays", "distance keys", "turns")
    cached = (900, 5, 300, 0)
    case = Case(heads=9, kv_heads=3, size=64, cached=cached, counts=(1,) * 4, kinds=kinds)
    together, _, _, row_weights = case.run()
    names = ("query", "past_key", "past_value", "seqlens_k", "cache_position", "query_rows",
             "key_rows", "key_decays", "distance_queries", "turn_cos", "turn_sin")  # fmt: skip
    for row in range(4):
        feeds = case.feeds | {name: case.feeds[name][row : row + 1] for name in names}
        y, _, _, of_row = run(feeds, case.node)
        assert np.array_equal(y[0], together[row]) and np.array_equal(of_row[0], row_weights[row])


@pytest.mark.parametrize("cache", CACHES)
def test_a_token_has_the_same_bits_alone_and_in_a_call_of_several(cache: str) -> None:
    case = Case(heads=9, kv_heads=3, size=64, cached=(700,), counts=(40,), cache=cache,
                kinds=("rotation", "distance", "query rows", "key rows", "decays",
                       "distance keys", "turns"),
                attributes={"local_window_size": 300})  # fmt: skip
    together, keys, values, row_weights = case.run()
    for token in (0, 1, 21, 39):
        feeds = case.feeds | {
            "query": case.feeds["query"][:, token : token + 1],
            "past_key": keys,
            "past_value": values,
            "seqlens_k": np.array([700 + token], np.int32),
            "cache_position": np.array([[700 + token]]),
            **{
                name: case.feeds[name][:, :, token : token + 1]
                for name in ("query_rows", "distance_queries")
            },
            "turn_cos": case.feeds["turn_cos"][:, token : token + 1],
            "turn_sin": case.feeds["turn_sin"][:, token : token + 1],
        }
        y, _, _, of_token = run(feeds, case.node)
        assert np.array_equal(y[0, 0], together[0, token])
        assert np.array_equal(of_token[:, :, 0], row_weights[:, :, token])


@pytest.mark.parametrize("cache", ["float32", "float16"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 1)])
def test_a_value_that_a_query_does_not_see_has_no_part_in_its_output(
    heads: tuple[int, int], number: float, cache: str
) -> None:
    case = Case(*heads, size=32, cached=(300,), counts=(70,), cache=cache, packed=False,
                attributes={"local_window_size": 100})  # fmt: skip
    expected, *_ = case.run()
    case.feeds["value"][0, 33] = case.feeds["past_value"][0, :, 230] = number
    y, *_ = case.run()
    token = np.arange(70)
    sees = (token >= 33) | (token <= 230 + 99 - 300)
    assert np.array_equal(y[0, ~sees], expected[0, ~sees])
    finite = np.isfinite(y[0]) if cache == "float32" or np.isnan(number) else y[0] == expected[0]
    assert not finite[sees].any()


def _resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_memory_of_a_large_call_is_freed_by_the_next_small_one() -> None:
    kinds = {"heads": 64, "kv_heads": 1, "size": 8, "kinds": ("decays",)}
    small, large = Case(**kinds), Case(**kinds, cached=(80_000,))  # 41 MB of sums of decays
    small.run()
    large.run()
    session.cache_clear()
    before = _resident()
    small.run()
    assert before - _resident() > 30 * 2**20


@pytest.mark.parametrize("columns", [slice(0, 8), slice(16, 32)], ids=["first", "last"])
@pytest.mark.parametrize("cached", [300, 5])
def test_numbers_of_keys_that_all_queries_have_as_zero_are_not_read(
    cached: int, columns: slice
) -> None:
    case = Case(size=32, cached=(cached,), packed=False)
    case.feeds["query"].reshape(-1, 32)[:, columns] = 0
    y, *_ = case.run()
    assert np.abs(y - case.expected()[0]).max() <= TOLERANCE
    case.feeds["past_key"][..., columns] = np.nan
    assert np.array_equal(case.run()[0], y)


def test_rows_of_keys_may_be_stored_by_slot() -> None:
    case = Case(cached=(300, 2), counts=(3, 1), kinds=("key rows",))
    expected, *_ = case.run()
    by_row = case.feeds["key_rows"].reshape(2, case.heads, case.table_rows, -1)
    case.feeds["key_rows"] = np.ascontiguousarray(by_row.transpose(0, 1, 3, 2))
    assert np.array_equal(case.run()[0], expected)


def test_hidden_keys_have_no_part_in_a_sum_of_small_scores() -> None:
    case = Case(cached=(40,), kinds=("bias",), attributes={"scale": 1.0})
    case.feeds["attention_bias"][:] = -np.inf
    case.feeds["attention_bias"][:, :, :, 7] = -1e4  # the only key that is seen
    y, *_ = case.run()
    values = np.repeat(case.feeds["past_value"][0, :, 7], 2, axis=0).reshape(-1)
    assert np.array_equal(y[0, 0], values)


def test_a_query_that_sees_no_key_has_output_0() -> None:
    case = Case(cached=(40,), kinds=("bias",))
    case.feeds["attention_bias"][:] = -np.inf
    assert not case.run()[0].any()


def test_a_call_without_rows_or_tokens_returns_no_output() -> None:
    case = Case(cached=(3, 4), counts=(1, 1))
    none = {name: case.feeds[name][:0] for name in case.feeds}
    assert run(none, case.node)[0].shape == (0, 1, 64)
    tokens = {name: case.feeds[name][:, :0] for name in ("query", "cache_position")}
    y, keys, _ = run(case.feeds | tokens, case.node)
    assert y.shape == (2, 0, 64) and np.array_equal(keys, case.feeds["past_key"], equal_nan=True)


def test_these_tests_run_the_instruction_set_that_is_asked_for() -> None:
    name = ctypes.CDLL(str(kernel_library.path())).posenc_instructions
    name.restype = ctypes.c_char_p
    asked = os.environ.get("POSENC_INSTRUCTIONS")
    assert name().decode() in ([asked] if asked else ["avx512", "avx2", "plain"])
