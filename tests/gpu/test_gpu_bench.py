"""Training figures of `redline bench` on a GPU: with peak memory, and the use of the GPU where a tool tells it."""

from __future__ import annotations

import io

import pytest

from redline.tools import bench
from redline.tools.bench_options import BenchRequest

pytestmark = pytest.mark.gpu


def test_a_training_figure_has_memory_and_use() -> None:
    request = BenchRequest(games=(256,), seconds=1.0, device="cuda", compile=False)
    figure = bench.bench_train(request, io.StringIO())["rows"][0]["graphed"]
    assert 0 < figure["low"] <= figure["value"] <= figure["high"]
    assert figure["peak_bytes"] > 10**6
    assert 0 <= figure.get("gpu_percent", 0.0) <= 100
