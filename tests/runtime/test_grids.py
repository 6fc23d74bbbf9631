"""Coordinates of tokens of images, videos and the text after them, compared with transformers."""

import functools
import importlib
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posenc_export.runtime.grids import coordinates, following

torch = pytest.importorskip("torch", reason="torch is not installed")
IMAGES, VIDEOS = [(1, 4, 6), (1, 2, 2)], [(4, 4, 2), (2, 2, 8)]
# Kinds of tokens of VIDEOS: each video as one run, or each frame as a run of its own after one
# token of text.
WHOLE, SPLIT = [0, *[2] * 8, 0, *[2] * 8], [0, 2, 2] * 4 + [0, 2, 2, 2, 2] * 2
# By model type: kinds of the tokens of VIDEOS, the model's class, its vision configuration, and
# arguments of coordinates.
MODELS: dict[str, tuple[list[int], str, dict[str, int], dict[str, Any]]] = {
    "glm4v": (SPLIT, "Glm4vModel", {}, {"split": True}),
    "glm_ocr": (SPLIT, "GlmOcrModel", {}, {"split": True}),
    "qwen3_vl": (SPLIT, "Qwen3VLModel", {}, {"split": True}),
    "qwen2_vl": (WHOLE, "Qwen2VLModel", {}, {}),
    "ernie4_5_vl_moe": ([0, *[2] * 4, 0, *[2] * 4], "Ernie4_5_VLMoeModel",
        {"temporal_merge_size": 2}, {"merge_time": 2}),
    "qwen2_5_vl": (WHOLE, "Qwen2_5_VLModel", {"tokens_per_second": 3}, {"intervals": [0.9, 5.1]}),
}  # fmt: skip


def _theirs(name: str, kinds: list[int]) -> tuple[Any, Any]:
    """Return the coordinates [3,1,S] of transformers, and the next coordinate minus the number
    of tokens [1,1].
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    _, cls, keys, _ = MODELS[name]
    model = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), cls)
    numbers = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, **keys))
    places = functools.partial(model.get_vision_position_ids, None)
    me = SimpleNamespace(config=numbers, get_vision_position_ids=places)
    given, grids = torch.tensor([kinds]), (torch.tensor(IMAGES), torch.tensor(VIDEOS))
    seconds = {"second_per_grid_ts": torch.tensor([0.3, 1.7])} if name == "qwen2_5_vl" else {}
    return model.get_rope_index(me, given * 0, given, *grids, **seconds)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_coordinates_of_images_and_following_text_are_those_of_transformers(name: str) -> None:
    moving, _, _, told = MODELS[name]
    kinds = [0] * 3 + [1] * 6 + [0] * 2 + moving + [0, 1] + [0] * 4
    wanted, delta = _theirs(name, kinds)
    result = coordinates(kinds, IMAGES, VIDEOS, behind="sides", **told)[:, None]
    assert result.tolist() == wanted.tolist()
    next_tokens = len(kinds) + np.arange(3) + int(delta)
    assert following(result, 3).tolist() == np.broadcast_to(next_tokens, (3, 1, 3)).tolist()


def test_following_text_of_each_row_starts_after_its_largest_coordinate() -> None:
    places = np.array([[[0, 7], [3, 2]], [[0, 1], [9, 2]], [[0, 1], [1, 2]]])
    assert following(places, 2).tolist() == [[[8, 9], [10, 11]]] * 3


@pytest.mark.parametrize(
    ("places", "count", "named"),
    [
        (np.zeros((3, 4), np.int64), 1, "[3,B,S] and count 0 or more, got int64 [3, 4] and 1"),
        (np.zeros((3, 1, 4)), 1, "got float64 [3, 1, 4] and 1"),
        (np.zeros((3, 1, 0), np.int64), 1, "got int64 [3, 1, 0] and 1"),
        (np.zeros((3, 1, 4), np.int64), -1, "got int64 [3, 1, 4] and -1"),
    ],
)
def test_arrays_of_another_shape_than_three_coordinates_per_row_are_refused(
    places: np.ndarray, count: int, named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        following(places, count)


def test_a_merge_below_one_is_refused() -> None:
    said = "merge and merge_time of at least 1, got 'largest', 2 and 0"
    with pytest.raises(ValueError, match=said):
        coordinates([2], videos=[(1, 2, 2)], merge_time=0)


def test_text_after_an_image_continues_from_the_largest_coordinate_or_from_the_sides() -> None:
    for behind, following_text in (("largest", 4), ("sides", 2)):
        found = coordinates([0, 2, 2, 2, 0], videos=[(3, 2, 2)], behind=behind).tolist()
        assert [row[:4] for row in found] == [[0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 1, 1]]
        assert [row[4] for row in found] == [following_text] * 3


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kinds": [[0, 1]]}, "for each token of one row, got int64 of shape [1, 2]"),
        ({"kinds": [0, 3]}, "expected kinds 0, 1 or 2"),
        ({"kinds": [0, 1, 1], "images": [(1, 4, 4)]}, "got 2 tokens for grid [1, 4, 4]"),
        ({"kinds": [0, 1]}, "got 1 tokens for grid [0, 0, 0]"),
        (
            {"kinds": [0], "images": [(1, 2, 2)]},
            "expected tokens for every image and video, got too few for 1 images and 0 videos",
        ),
        ({"kinds": [1], "images": [(2, 2)]}, "expected images as three whole numbers above 0 each"),
        (
            {"kinds": [2], "videos": [(1, 2, 2)], "intervals": [1.0, 2.0]},
            "one finite interval for each of 1 videos, or no intervals with split frames, "
            "got [1.0, 2.0]",
        ),
        (
            {"kinds": [2], "videos": [(1, 2, 2)], "intervals": [1.0], "split": True},
            "no intervals with split frames, got [1.0]",
        ),
        ({"kinds": [0], "behind": "video"}, "expected behind to be one of largest, sides"),
    ],
)
def test_grids_that_do_not_match_their_tokens_are_refused(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        coordinates(**given)
