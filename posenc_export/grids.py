"""Where tokens among images and videos stand, for encodings of time, height and width (Wang et al. 2024, Qwen2-VL, 2.1). numpy only."""

from itertools import groupby
from typing import Dict, Iterator, List, Sequence, Tuple

import numpy as np

TEXT, IMAGE, VIDEO = 0, 1, 2
BEHIND = ("largest", "sides")
Grid = Sequence[int]  # patches along time, height and width
Picture = Tuple[Grid, float]  # its grid, and by how much time grows from patch to patch


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
    """Time, height and width of each token of one row, [3,S] int64: `grid` of prefill and admit takes them as [3,B,S].

    Text counts on, the same on all three. An image or video begins one behind the text before it and counts along its own axes. The token behind a row has the
    largest coordinate + 1 on all three: `following`. A step counts tokens, which are more: behind an image, feed tokens by prefill with `grid`.

    Args:
        kinds: of each token: 0 text, 1 image, 2 video, as mm_token_type_ids of a processor.
        images, videos: patches (time, height, width) of each one in the row, in order, as image_grid_thw and video_grid_thw of a processor.
        merge: patches along height, and along width, that become one token: spatial_merge_size of the vision tower.
        intervals: of each video, by how much time grows from patch to patch; 1 where left out, as for Qwen2-VL. For Qwen2.5-VL tokens_per_second of the vision
            tower times second_per_grid_ts of the processor.
        split: each frame of a video stands by itself, behind its time in words (Qwen3-VL, GLM-4V).
        behind: text goes on behind the "largest" coordinate so far, as in the paper and in transformers 4, or behind the longer of the "sides" of an image or
            video, as in transformers 5: that is nearer where a video is longer in time.
        merge_time: patches of a video along time that become one token: temporal_merge_size of the vision tower of Ernie 4.5 VL.

    Raises:
        ValueError: other kinds of tokens, grids that are not as many or not as large as their tokens, a merge below 1; as _pictures.
    """
    given = np.asarray(kinds)
    if given.ndim != 1 or not given.size or not np.isin(given, (TEXT, IMAGE, VIDEO)).all():
        raise ValueError(f"grids: kinds are 0, 1 or 2 for each token of one row, got {given.dtype} of shape {list(given.shape)}; take rows one by one")
    if behind not in BEHIND or min(merge, merge_time) < 1:
        raise ValueError(f"grids: behind is one of {', '.join(BEHIND)}, merge and merge_time at least 1, got {behind!r}, {merge} and {merge_time}")
    left = _pictures(images, videos, intervals, split)
    parts, begin = [], 0
    for kind, run in groupby(given.tolist()):
        part, after = _run(kind, len(list(run)), left, merge, merge_time if kind == VIDEO else 1)
        parts.append(begin + part)
        begin += after if behind == "sides" else int(part.max()) + 1
    if any(next(rest, None) is not None for rest in left.values()):
        many = f"{len(images)} images and {len(videos)} videos"
        raise ValueError(f"grids: every image and video has its tokens in the row, got {many}; leave out those of other rows")
    return np.concatenate(parts, axis=1)


def following(places: np.ndarray, count: int) -> np.ndarray:
    """Coordinates [3,B,count] int64 of the next `count` tokens of text behind rows at `places` [3,B,S]: those of a row count on from its largest coordinate,
    as rope_deltas of transformers say.

    Raises:
        ValueError: places that are not three coordinates of at least one token in each row, a negative count.
    """
    given = np.asarray(places)
    if given.ndim != 3 or given.shape[0] != 3 or not given.shape[2] or given.dtype.kind not in "iu" or count < 0:
        raise ValueError(f"grids: places are whole numbers [3,B,S] and count 0 or more, got {given.dtype} {list(given.shape)} and {count}; stack rows on axis 1")
    behind = given.max(axis=(0, 2))[:, None] + 1 + np.arange(count, dtype=np.int64)
    return np.repeat(behind[None].astype(np.int64), 3, axis=0)


def _pictures(images: Sequence[Grid], videos: Sequence[Grid], intervals: Sequence[float], split: bool) -> Dict[int, Iterator[Picture]]:
    """What runs of tokens stand for, by their kind, in order.

    Raises:
        ValueError: grids that are not three sizes, intervals that are not one for each video.
    """
    for name, grids in (("images", images), ("videos", videos)):
        sizes = np.asarray(grids)
        if sizes.size and (sizes.ndim != 2 or sizes.shape[1] != 3 or sizes.dtype.kind not in "iu" or sizes.min() < 1):
            raise ValueError(f"grids: {name} are three whole numbers above 0 each, time, height and width, got {np.asarray(grids).tolist()}")
    given = [float(interval) for interval in intervals]
    if len(given) not in (0, len(videos)) or (split and given) or not all(0 <= interval < float("inf") for interval in given):
        raise ValueError(f"grids: intervals are finite and one for each of {len(videos)} videos, none where frames are split, got {given}")
    moving: List[Picture] = list(zip(videos, given or [1.0] * len(videos), strict=True))
    if split:
        moving = [((1, *grid[1:]), 1.0) for grid, _ in moving for _ in range(int(grid[0]))]
    return {IMAGE: iter([(grid, 1.0) for grid in images]), VIDEO: iter(moving)}


def _run(kind: int, count: int, left: Dict[int, Iterator[Picture]], merge: int, merge_time: int) -> Tuple[np.ndarray, int]:
    """Coordinates from 0 of tokens of one kind side by side [3,count], and the one behind their sides.

    Raises:
        ValueError: no grid for them, or one of another size.
    """
    if kind == TEXT:
        return np.repeat(np.arange(count, dtype=np.int64)[None], 3, axis=0), count
    grid, interval = next(left[kind], ((0, 0, 0), 1.0))
    time, height, width = (int(size) for size in grid)
    time, height, width = time // merge_time, height // merge, width // merge
    if time * height * width != count:
        found = [int(size) for size in grid]
        rule = f"tokens of an image or video are time * height * width / {merge * merge * merge_time} side by side"
        raise ValueError(f"grids: {rule}, got {count} for {found}; give its grid")
    axes = np.indices((time, height, width)).reshape(3, count)
    axes[0] = (axes[0].astype(np.float32) * np.float32(interval)).astype(np.int64)  # in float32, where transformers cuts digits off
    return axes, max(height, width)
