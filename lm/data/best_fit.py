"""Best-fit-decreasing packing of documents into windows, by the lengths alone. numpy only.

Ding et al. 2024 ("Fewer truncations improve language modeling", arXiv 2404.10830), section 3: a document longer than
the window is cut into whole windows, and what is left of it, like every shorter document, is a piece; the pieces, the
longest first, go each to the fullest window that still has room. Here all pieces of one length are placed together,
and all windows with the same room are one class, so the cost grows with the number of distinct lengths and not of
documents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def pieces_of(lengths: Int64Array, window: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Documents as pieces of at most a window, in the order of their tokens.

    Args:
        lengths: int64 [N], tokens of each document, at least 1.
        window: T.

    Returns:
        (document, offset in it, tokens) of each piece; int64 [P] each. A document of n tokens gives n // T pieces of T,
        then one of n % T where that is not 0.
    """
    counts = -(-lengths // window)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    number = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = number * window
    return document, offset, np.minimum(lengths[document] - offset, window)


def best_fit(lengths: Int64Array, window: int) -> Int64Array:
    """The window of each piece, best-fit-decreasing.

    Args:
        lengths: int64 [P], tokens of each piece, 1 to `window`.
        window: T.

    Returns:
        int64 [P]; windows are numbered from 0 in the order in which they are begun, none is empty.
    """
    placed = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    rooms = _Rooms(window)
    for alike in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        if len(alike):
            _place(alike, int(lengths[alike[0]]), rooms, placed)
    return placed


class _Rooms:
    """Windows by the room they have left; a set bit of `mask` marks a room that some window has."""

    def __init__(self, window: int) -> None:
        self.window, self.begun, self.mask = window, 0, 0
        self._windows: dict[int, list[Int64Array]] = {}

    def take(self, least: int, wanted: int) -> tuple[int, Int64Array]:
        """(room, windows): at most ceil(wanted / (room // least)) of the fullest that have `least` left; else new ones.

        `wanted` pieces of `least` tokens are to be placed.
        """
        above = self.mask >> least
        if above == 0:
            count = -(-wanted // (self.window // least))
            self.begun += count
            return self.window, np.arange(self.begun - count, self.begun, dtype=np.int64)
        room = least + (above & -above).bit_length() - 1
        count = -(-wanted // (room // least))
        group = self._windows[room].pop()
        if len(group) > count:
            self._windows[room].append(group[count:])
        if not self._windows[room]:
            self.mask ^= 1 << room
        return room, group[:count]

    def put(self, room: int, windows: Int64Array) -> None:
        """Windows have this room left now."""
        if room > 0 and len(windows):
            self._windows.setdefault(room, []).append(windows)
            self.mask |= 1 << room


def _place(pieces: Int64Array, length: int, rooms: _Rooms, placed: Int64Array) -> None:
    """Pieces of one length. A window that takes one stays the fullest with room for the next: it is filled up first."""
    while len(pieces):
        room, windows = rooms.take(length, len(pieces))
        each = room // length
        full = min(len(pieces) // each, len(windows))
        placed[pieces[: full * each]] = np.repeat(windows[:full], each)
        rooms.put(room - each * length, windows[:full])
        pieces = pieces[full * each :]
        if full < len(windows):  # the last one takes what is left, which does not fill it up
            placed[pieces] = windows[full]
            rooms.put(room - len(pieces) * length, windows[full:])
            return
