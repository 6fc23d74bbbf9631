"""Calls that break a rule of CachedAttention end with an error that names it, and write nothing."""

from typing import Any, Callable

import numpy as np
import pytest

from tests.kernels.calls import Case, built, model, run, session

pytestmark = built
Feeds = dict[str, np.ndarray]
KINDS = ("rotation", "positions", "distance", "bias", "sinks", "query rows", "key rows", "decays",
         "counts", "pieces", "distance keys", "turns")  # fmt: skip


def _changed(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Feeds], None]:
    def apply(feeds: Feeds) -> None:
        feeds[name] = np.ascontiguousarray(change(feeds[name]))

    return apply


def _set(name: str, number: int) -> Callable[[Feeds], None]:
    return _changed(name, lambda x: np.full_like(x, number))


FAULTS: dict[str, Any] = {
    "a length beyond the capacity": (_set("seqlens_k", 8), "seqlens_k of row 0"),
    "a length far beyond the capacity": (_set("seqlens_k", 2**31 - 1), "seqlens_k of row 0"),
    "a length before the first new token": (_set("seqlens_k", 1), "seqlens_k of row 0"),
    "a negative length": (_set("seqlens_k", -(2**31)), "seqlens_k of row 0"),
    "a first slot beyond the capacity": (_set("cache_position", 9), "cache_position of row 0"),
    "a negative slot": (_set("cache_position", -1), "cache_position of row 0"),
    "a huge slot": (_set("cache_position", 2**63 - 1), "cache_position of row 0"),
    "lengths of fewer rows": (_changed("seqlens_k", lambda x: x[:1]), "seqlens_k"),
    "slots of fewer rows": (_changed("cache_position", lambda x: x[:1]), "cache_position"),
    "no slots": (_changed("cache_position", lambda x: x[:, :0]), "cache_position"),
    "an empty cache": (_changed("past_key", lambda x: x[:, :, :0]), "caches"),
    "caches of other capacities": (_changed("past_value", lambda x: x[:, :, :-1]), "caches"),
    "caches of fewer rows": (_changed("past_key", lambda x: x[:1]), "caches"),
    "caches of other heads": (_changed("past_key", lambda x: x[:, :1]), "caches"),
    "a cache of three axes": (_changed("past_key", lambda x: x[0]), "caches"),
    "a head size of 12": (_changed("past_key", lambda x: x[..., :12]), "head sizes"),
    "a narrow query": (_changed("query", lambda x: x[..., :-1]), "packed query"),
    "a query of two axes": (_changed("query", lambda x: x[0]), "query"),
    "a position beyond the tables": (_set("position_ids", 10**6), "rotation tables"),
    "fewer positions": (_changed("position_ids", lambda x: x[:, :1]), "position_ids"),
    "tables of other shapes": (_changed("sin_cache", lambda x: x[:-1]), "tables of rotations"),
    "tables wider than a head": (_changed("cos_cache", lambda x: np.tile(x, 3)), "tables"),
    "a bias of fewer keys": (_changed("attention_bias", lambda x: x[..., :5]), "attention_bias"),
    "a bias of other heads": (_changed("attention_bias", lambda x: x[:, :3]), "attention_bias"),
    "a bias of fewer tokens": (_changed("attention_bias", lambda x: x[:, :, :1]), "_bias"),
    "sinks of fewer heads": (_changed("head_sink", lambda x: x[:3]), "head_sink"),
    "distances of fewer heads": (_changed("distance_bias", lambda x: x[:3]), "distance_bias"),
    "no distances": (_changed("distance_bias", lambda x: x[:, :0]), "distance_bias"),
    "rows of fewer heads": (_changed("query_rows", lambda x: x[:, :3]), "query_rows"),
    "rows of fewer tokens": (_changed("query_rows", lambda x: x[:, :, :1]), "query_rows"),
    "rows of other tables": (_changed("key_rows", lambda x: x[:, :-4]), "key_rows"),
    "rows of fewer keys": (_changed("key_rows", lambda x: x[:, :, :6]), "key_rows"),
    "no rows by distance": (_changed("row_of_distance", lambda x: x[:0]), "row_of_distance"),
    "a row beyond the table": (_set("row_of_distance", 5), "row_of_distance within the 5 rows"),
    "a negative row": (_set("row_of_distance", -1), "row_of_distance within the 5 rows"),
    "decays of fewer heads": (_changed("key_decays", lambda x: x[:, :3]), "key_decays"),
    "decays of fewer keys": (_changed("key_decays", lambda x: x[:, :, :6]), "key_decays"),
    "several decays of a key": (_changed("key_decays", lambda x: np.tile(x, 2)), "key_decays"),
    "counts of fewer heads": (_changed("count_rows", lambda x: x[:, :3]), "count_rows"),
    "no counts": (_changed("count_rows", lambda x: x[..., :0]), "count_rows"),
    "no numbers of distances": (_changed("number_of_distance", lambda x: x[:0]), "number_of"),
    "factors of fewer tokens": (_changed("query_factors", lambda x: x[:, :1]), "query_factors"),
    "pieces of fewer heads": (_changed("pieces", lambda x: x[:3]), "pieces"),
    "no pieces": (_changed("pieces", lambda x: x[:, :0]), "pieces"),
    "pieces of two numbers": (_changed("pieces", lambda x: x[..., :2]), "pieces"),
    "keys of distances of fewer heads": (_changed("distance_keys", lambda x: x[:3]), "_keys"),
    "keys of no distances": (_changed("distance_keys", lambda x: x[:, :32]), "n above 32"),
    "keys of fewer distances": (_changed("distance_keys", lambda x: x[:, 3:]), "distance 6, got 3"),
    "narrow keys of distances": (_changed("distance_keys", lambda x: x[..., :8]), "_keys"),
    "distance queries of fewer tokens": (
        _changed("distance_queries", lambda x: x[:, :, :1]),
        "distance_queries",
    ),
    "turns of fewer tokens": (_changed("turn_cos", lambda x: x[:, :1]), "turn_cos and turn_sin"),
    "turns of other shapes": (_changed("turn_sin", lambda x: x[..., :-1]), "turn_cos and turn_sin"),
    "turns wider than a head": (_changed("turn_cos", lambda x: np.tile(x, 3)), "turn_cos and"),
    "a part of a digit": (_changed("turn_cos", lambda x: x[:, :, :8]), "turn_cos and turn_sin"),
    "no digits": (_changed("turn_cos", lambda x: x[:, :, :0]), "turn_cos and turn_sin"),
    "fewer scales": (_changed("k_scale", lambda x: x[:-1]), "k_scale and v_scale"),
}


def _case(cache: str = "float32", **changes: Any) -> Case:
    sizes = {"cached": (5, 3), "counts": (2, 2), "capacity": 8, "kinds": KINDS, **changes}
    return Case(**sizes, cache=cache)


@pytest.mark.parametrize("cache", ["float32", "float16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_call_outside_its_buffers_is_refused_by_name(name: str, cache: str) -> None:
    case = _case(cache="int8" if "scales" in name else cache)
    change, said = FAULTS[name]
    change(case.feeds)
    with pytest.raises(Exception, match=f"CachedAttention: expected .*{said}"):
        case.run()


def test_inputs_of_other_element_types_are_refused_when_the_graph_is_loaded() -> None:
    for name, dtype in (("query", np.float16), ("past_key", np.float16), ("seqlens_k", np.int64),
                        ("cache_position", np.int32), ("past_value", np.int8)):  # fmt: skip
        case = _case()
        case.feeds[name] = np.nan_to_num(case.feeds[name]).astype(dtype)
        with pytest.raises(Exception, match="CachedAttention|Type"):
            session(model(case.feeds, case.node))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 0), (0, 2), (3, 2), (-4, 2), (4, -2)])
def test_numbers_of_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int) -> None:
    case = _case()
    node = case.node | {"num_heads": heads, "kv_num_heads": kv_heads}
    with pytest.raises(Exception, match="num_heads to be a multiple of kv_num_heads"):
        run(case.feeds, node)


def test_numbers_of_heads_whose_products_overflow_are_refused() -> None:
    case = _case()
    for heads in (1 << 61, 1 << 17):
        node = case.node | {"num_heads": heads, "kv_num_heads": heads}
        with pytest.raises(Exception, match=f"num_heads up to 65536, got {heads}"):
            run(case.feeds, node)


@pytest.mark.parametrize("attribute", [{"scale": 1}, {"local_window_size": 4.0}])
def test_attributes_of_another_type_are_refused(attribute: dict[str, Any]) -> None:
    case = _case()
    with pytest.raises(Exception, match="expected [a-z_]+ as an? (float, got an int|integer, got)"):
        run(case.feeds, case.node | attribute)


def test_sizes_whose_products_overflow_are_refused_although_there_are_no_numbers() -> None:
    case = _case()
    case.feeds["query_rows"] = np.empty((0, 1 << 31, 1 << 29), np.float32)
    with pytest.raises(Exception, match="query_rows with sizes of a product up to 2\\^48"):
        case.run()


def test_tables_of_rotations_without_rows_are_refused_at_positions_below_0() -> None:
    case = _case()
    case.feeds["position_ids"][:] = -1
    assert np.isfinite(case.run()[0]).all()  # padding, which has row 0
    for name in ("cos_cache", "sin_cache"):
        case.feeds[name] = case.feeds[name][:0]
    with pytest.raises(Exception, match="within the 0 rows of the rotation tables, got -1"):
        case.run()


def test_chunks_need_positions_and_take_padding() -> None:
    case = _case(attributes={"chunk_size": 4})
    case.feeds["position_ids"][1] = -1
    assert np.isfinite(case.run()[0]).all()
    del case.feeds["position_ids"]
    with pytest.raises(Exception, match="position_ids for attention in chunks"):
        case.run()


def test_turns_have_all_digits_of_the_largest_distance() -> None:
    case = _case(cached=(14, 0), counts=(2, 2), capacity=20)
    for last in (15, 16):
        for name in ("turn_cos", "turn_sin"):
            case.feeds[name] = np.ascontiguousarray(case.feeds[name][:, :, :16])
        case.feeds["seqlens_k"][0], case.feeds["cache_position"][0] = last, [last - 1, last]
        if last == 15:
            assert np.isfinite(case.run()[0]).all()
    with pytest.raises(Exception, match="all digits of 17 distances, got 16"):
        case.run()
    del case.feeds["turn_cos"]
    with pytest.raises(Exception, match="turn_cos beside turn_sin"):
        case.run()


@pytest.mark.parametrize("scale", [0.0, np.nan, np.inf, 1e-38])
def test_scales_of_caches_that_are_no_numbers_give_codes_in_range(scale: float) -> None:
    case = _case(cache="int8")
    case.feeds["v_scale"][:] = scale
    values = case.run()[2]
    assert values.dtype == np.int8


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_overflow_stay_in_their_row(number: float) -> None:
    case = _case()
    expected = case.run()[0][1]
    case.feeds["query"][0] = number
    assert np.array_equal(case.run()[0][1], expected)
