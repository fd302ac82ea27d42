"""Convert images to greyscale and resize them in integer arithmetic, in C++ (`images.cpp`) or, with equal results, in NumPy."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from redline.core.native import load_library

Array = np.ndarray[Any, Any]
Weights = list[tuple[Array, Array]]  # terms of the weighted sums that resize an image, see `_sparse`
_GREY = (77, 150, 29)  # weights of red, green and blue in 256ths


def weights(cells: int, size: int) -> Weights:
    """Return the sparse weights that resize `cells` to `size` cells, each the average of the old ones it covers."""
    return _sparse(averages(cells, size))


@functools.cache
def library() -> Any:
    """Return the compiled `images.cpp`; None if it cannot be compiled, where NumPy is used instead, more slowly."""
    try:
        loaded: Any = load_library(Path(__file__).with_suffix(".cpp"))
    except OSError:
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.shrink.argtypes = [pointer, number, number, number, *[pointer] * 5]
    loaded.shrink.restype = None
    return loaded


class _Sums(ctypes.Structure):
    """The struct `Sums` of images.cpp."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("terms", ctypes.c_int64),
        ("index", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
    )


class Shrink:
    """Resizes images (height, width, channels) to (size, size, 1); those with three channels become greyscale."""

    def __init__(self, height: int, width: int, size: int) -> None:
        self.height, self.width, self.size, self.library = height, width, size, library()
        self.rows, self.columns = weights(height, size), weights(width, size)
        # The library gets the addresses of these arrays: keep them alive.
        self.arrays = [np.stack(part) for terms in (self.rows, self.columns) for part in zip(*terms, strict=True)]
        self.sums = [
            _Sums(size, len(index), index.ctypes.data, weight.ctypes.data)
            for index, weight in zip(self.arrays[::2], self.arrays[1::2], strict=True)
        ]
        self.scratch = np.empty((height + 3) * width // 2 + 1, np.uint16)

    def __call__(self, image: Array) -> Array:
        """Return the image resized to (size, size, 1) uint8. It may have one or three channels and any strides."""
        if image.dtype != np.uint8 or image.shape[:2] != (self.height, self.width) or image.shape[2] not in (1, 3):
            raise ValueError(f"the image is {image.dtype} of shape {image.shape}")
        if self.library is None:
            plane = grey(image) if image.shape[2] == 3 else image[:, :, 0]
            return resized(plane, self.rows, self.columns)[:, :, None]
        out = np.empty((self.size, self.size, 1), np.uint8)
        strides = (ctypes.c_int64 * 3)(*image.strides)
        sums = [ctypes.addressof(part) for part in self.sums]
        self.library.shrink(image.ctypes.data, *image.shape, strides, *sums, self.scratch.ctypes.data, out.ctypes.data)
        return out


def grey(image: Array) -> Array:
    """Return an (H, W, 3) image as greyscale (H, W) uint8."""
    # Copying each channel before the conversion to uint16 is twice as fast as converting strided bytes.
    red, green, blue = (np.ascontiguousarray(image[:, :, channel]).astype(np.uint16) for channel in range(3))
    red *= _GREY[0]
    green *= _GREY[1]
    blue *= _GREY[2]
    red += green
    red += blue
    red >>= 8
    return red.astype(np.uint8)


def resized(plane: Array, rows: Weights, columns: Weights) -> Array:
    """Return an (H, W) uint8 image resized by area: each pixel is the mean of the area it covers, within 2 of 256 levels."""
    halfway = _weighted_sum(plane.astype(np.uint16), rows)
    return _weighted_sum(np.ascontiguousarray(halfway.T), columns).T.astype(np.uint8)


def _weighted_sum(plane: Array, terms: Weights) -> Array:
    """Return the weighted sums (size, …) uint16 of the rows of `plane` (cells, …) uint16."""
    total = np.full((len(terms[0][0]), *plane.shape[1:]), 128, np.uint16)  # one half, to round to the nearest
    for index, weight in terms:
        term = plane[index]
        term *= weight
        total += term
    total >>= 8
    return total


def _sparse(matrix: Array) -> Weights:
    """Return the nonzero entries of a resizing matrix (size, cells) as a list of (index, weight in 256ths), one per term.

    The matrix from 240 to 84 cells has at most four nonzero entries per row, and bytes times 256ths need no floats.
    """
    size, cells = matrix.shape
    cumulative = np.round(256 * matrix.cumsum(1)).astype(np.int64)
    in_256ths = np.diff(cumulative, prepend=0)  # rounded so that every row adds up to 256 exactly
    first = (matrix > 0).argmax(1)
    terms = []
    for number in range(int((matrix > 0).sum(1).max())):
        index = np.minimum(first + number, cells - 1)
        weight = np.where(first + number < cells, in_256ths[np.arange(size), index], 0)
        terms.append((index, weight[:, None].astype(np.uint16)))
    return terms


def averages(cells: int, size: int) -> Array:
    """Return the matrix (size, cells) float32 that averages the old cells covered by each new cell."""
    edges = np.linspace(0, cells, size + 1)
    low, high = edges[:-1, None], edges[1:, None]
    old = np.arange(cells)
    covered = np.clip(np.minimum(high, old + 1) - np.maximum(low, old), 0, None)
    matrix: Array = (covered / covered.sum(1, keepdims=True)).astype(np.float32)
    return matrix
