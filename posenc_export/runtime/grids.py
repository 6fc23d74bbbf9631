"""Coordinates of tokens in sequences with images and videos (Wang et al. 2024, Qwen2-VL, 2.1)."""

from itertools import groupby
from typing import Iterator, Sequence

import numpy as np

from posenc_export.shared.refusal import refusal

TEXT, IMAGE, VIDEO = 0, 1, 2
BEHIND = ("largest", "sides")
Grid = Sequence[int]  # patches along time, height and width
Picture = tuple[Grid, float]  # grid of an image or video, and time between two patches


def coordinates(
    kinds: Sequence[int],
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
    merge: int = 2,
    intervals: Sequence[float] = (),
    split: bool = False,
    behind: str = "largest",
    merge_time: int = 1,
) -> np.ndarray:
    """Compute time, height and width of each token of one row, [3,S] int64; prefill and admit take
    them as `grid` [3,B,S].

    Tokens of text have the same number on all three axes, which grows by 1 per token. The first
    token of an image or video continues this count, and the others count from it along each axis.
    The first token after a row has the largest coordinate + 1 on all three axes, see `following`. A
    step would count all tokens, which gives larger numbers: after an image, feed tokens with
    prefill and `grid`.

    Args:
        kinds: kind of each token: 0 text, 1 image, 2 video, as mm_token_type_ids of a processor.
        images, videos: patches (time, height, width) of each image and video of the row, in order,
            as image_grid_thw and video_grid_thw of a processor.
        merge: patches along height, and along width, that become one token: spatial_merge_size of
            the vision tower.
        intervals: time between two patches of each video; 1 if empty, as for Qwen2-VL. For
            Qwen2.5-VL, tokens_per_second of the vision tower times second_per_grid_ts of the
            processor.
        split: whether each frame of a video is a separate run of tokens, after its time as text
            (Qwen3-VL, GLM-4V).
        behind: where text continues: after the "largest" coordinate so far, as in the paper and in
            transformers 4, or after the longer of the "sides" (height and width) of the image or
            video, as in transformers 5, which gives smaller numbers after videos with many frames.
        merge_time: patches of a video along time that become one token: temporal_merge_size of the
            vision tower of Ernie 4.5 VL.

    Raises:
        ValueError: unknown kinds, grids that do not match the tokens in number or size, a merge
            below 1, or grids or intervals that are not valid numbers.
    """
    row = np.asarray(kinds)
    if row.ndim != 1 or not row.size or not np.isin(row, (TEXT, IMAGE, VIDEO)).all():
        got = f"{row.dtype} of shape {list(row.shape)}"
        rule = "kinds 0, 1 or 2 for each token of one row"
        raise refusal("grids", rule, got, "pass rows one by one")
    if behind not in BEHIND or min(merge, merge_time) < 1:
        rule = f"behind to be one of {', '.join(BEHIND)}, and merge and merge_time of at least 1"
        raise refusal("grids", rule, f"{behind!r}, {merge} and {merge_time}")
    remaining = _pictures(images, videos, intervals, split)
    parts, begin = [], 0
    for kind, run in groupby(row.tolist()):
        times = merge_time if kind == VIDEO else 1
        part, after = _run(kind, len(list(run)), remaining, merge, times)
        parts.append(begin + part)
        begin += after if behind == "sides" else int(part.max()) + 1
    if any(next(rest, None) is not None for rest in remaining.values()):
        got = f"too few for {len(images)} images and {len(videos)} videos"
        remedy = "leave out images and videos of other rows"
        raise refusal("grids", "tokens for every image and video", got, remedy)
    return np.concatenate(parts, axis=1)


def following(places: np.ndarray, count: int) -> np.ndarray:
    """Coordinates [3,B,count] int64 of the next `count` tokens of text after rows with coordinates
    `places` [3,B,S]. Each row continues from its largest coordinate, as with rope_deltas of
    transformers.

    Raises:
        ValueError: places that are not three coordinates of at least one token per row, a negative
            count.
    """
    before = np.asarray(places)
    whole = before.ndim == 3 and before.dtype.kind in "iu"
    if not whole or before.shape[0] != 3 or not before.shape[2] or count < 0:
        rule = "places to be whole numbers [3,B,S] and count 0 or more"
        got = f"{before.dtype} {list(before.shape)} and {count}"
        raise refusal("grids", rule, got, "stack rows on axis 1")
    behind = before.max(axis=(0, 2))[:, None] + 1 + np.arange(count, dtype=np.int64)
    return np.repeat(behind[None].astype(np.int64), 3, axis=0)


def _pictures(
    images: Sequence[Grid], videos: Sequence[Grid], intervals: Sequence[float], split: bool
) -> dict[int, Iterator[Picture]]:
    """Grids and intervals of images and videos in order, by kind of token, after a check."""
    for name, grids in (("images", images), ("videos", videos)):
        sizes = np.asarray(grids)
        whole = sizes.ndim == 2 and sizes.dtype.kind in "iu"
        if sizes.size and (not whole or sizes.shape[1] != 3 or sizes.min() < 1):
            rule = f"{name} as three whole numbers above 0 each, time, height and width"
            raise refusal("grids", rule, sizes.tolist())
    times = [float(interval) for interval in intervals]
    finite = all(0 <= interval < float("inf") for interval in times)
    if len(times) not in (0, len(videos)) or (split and times) or not finite:
        rule = f"one finite interval for each of {len(videos)} videos, or no intervals with split"
        raise refusal("grids", f"{rule} frames", times)
    moving: list[Picture] = list(zip(videos, times or [1.0] * len(videos), strict=True))
    if split:
        moving = [((1, *grid[1:]), 1.0) for grid, _ in moving for _ in range(int(grid[0]))]
    return {IMAGE: iter([(grid, 1.0) for grid in images]), VIDEO: iter(moving)}


def _run(
    kind: int, count: int, remaining: dict[int, Iterator[Picture]], merge: int, merge_time: int
) -> tuple[np.ndarray, int]:
    """Coordinates [3,count] of a run of tokens of one kind, counted from 0, and the first
    coordinate after its sides. Raise ValueError for a grid of another size.
    """
    if kind == TEXT:
        return np.repeat(np.arange(count, dtype=np.int64)[None], 3, axis=0), count
    grid, interval = next(remaining[kind], ((0, 0, 0), 1.0))
    time, height, width = (int(size) for size in grid)
    time, height, width = time // merge_time, height // merge, width // merge
    if time * height * width != count:
        whole = merge * merge * merge_time
        rule = f"time * height * width / {whole} consecutive tokens for an image or video"
        got = f"{count} tokens for grid {[int(size) for size in grid]}"
        raise refusal("grids", rule, got, "pass the grid of each image and video")
    axes = np.indices((time, height, width)).reshape(3, count)
    # float32, truncated, as in transformers.
    axes[0] = (axes[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
    return axes, max(height, width)
