"""Tile sizes of the attention kernels, by the shared memory of a card."""

from typing import NamedTuple


class Tile(NamedTuple):
    """How a kernel is tiled: positions of queries and keys, warps, stages of loading ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    forward: Tile
    queries: Tile
    keys: Tile


# By the widest head that they are for; the best of those tried on an H200. Cards with less shared memory get SMALL.
TILES = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(64, 64, 4, 1)),
    96: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 1)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(32, 64, 4, 3)),
}


SMALL = Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))


ROOMY = 160 << 10  # bytes of shared memory that a block of an A100, H100 and later may have


def tiles(size: int, shared_bytes: int) -> Tiles:
    """For heads of `size` dimensions on a card whose blocks may have so much shared memory."""
    if shared_bytes < ROOMY:
        return SMALL
    return next(TILES[most] for most in sorted(TILES) if size <= most)
