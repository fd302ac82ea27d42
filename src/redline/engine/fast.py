"""Reduced precision, torch.compile and CUDA graphs. Each can be disabled; compilation and graphs fall back to eager."""

from __future__ import annotations

import copyreg
import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.core.errors import UserError
from redline.core.faults import reach
from redline.core.records import Hardware
from redline.engine.distributed import SINGLE, Ranks
from redline.engine.out_of_memory import is_out_of_memory
from redline.engine.runtime import Runtime

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
# Compile modes -> modes of torch.compile: CUDA graphs are captured by `Graph`, not by the compiler.
COMPILE_MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}
# Inductor repeats an expression wherever it is used, up to this many operations. Integer hashes use every value twice, so the
# default of 30 lets expressions grow exponentially: a minute of compilation instead of ten seconds, and slower code.
_INLINE = 10
_UNROLL = 8
_FUSION = 64  # the compiler's default
_COMBINE = "combo_kernels"  # the compiler's option for `combine`
# A bounds check in every indexed load costs a fifth of a game's step. Games clamp their indices; eager mode still checks.
# Two-dimensional tiles make kernels on (games, cells) up to fourteen times slower than one-dimensional ones.
_GPU_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "assert_indirect_indexing": False,
    "triton.max_tiles": 1,
}
# Torch does not cache compiled functions on disk if they call a function that it does not know to be safe. Entering and
# leaving autocast is safe: its arguments are part of the code that the cache key is computed from.
_CACHEABLE = {f"torch.amp.autocast_mode._{verb}_autocast": "1" for verb in ("enter", "exit")}
_CPU = torch.device("cpu")
_OBJECTS = 64  # most objects per class whose methods can be compiled in a process
_WARM_UP = 3  # calls before a capture, for compilation, autotuning and lazy allocations
Report = Callable[[str, int, int], None]
"""Receives the name of the function that is compiled next, its number from 1, and how many functions there are."""


def _ignore(name: str, number: int, count: int) -> None:
    """Report nothing."""


def pick_precision(wanted: str, hardware: Hardware) -> tuple[str, str]:
    """Return the precision to train in, and the reason for it."""
    if wanted not in PRECISIONS:
        raise UserError(f"precision is '{wanted}'; expected {', '.join(PRECISIONS)}.")
    if wanted == "auto":
        if hardware.kind != "cuda":
            return "fp32", "a CPU multiplies float32 fastest"
        if hardware.bf16:
            return "bf16", "this GPU's tensor cores multiply bfloat16; weights stay float32"
        if (0, 0) < hardware.capability < (7, 0):
            return "fp32", "this GPU has no tensor cores, and float16 would be slower"
        return "fp16", "this GPU has float16 tensor cores but no bfloat16; losses are scaled"
    if wanted == "tf32" and hardware.kind != "cuda":
        raise UserError(f"precision tf32 needs a CUDA device; {hardware.device} has none. Take fp32.")
    return wanted, "asked for"


def runtime(
    device: torch.device,
    precision: str,
    compiler: Compiler,
    folder: Path = Path("."),
    cudnn_benchmark: bool = False,
    fused_optimizer: bool = True,
    pin_memory: bool = True,
    ranks: Ranks = SINGLE,
) -> Runtime:
    """Return the Runtime for learners; on a GPU, also set the switches of cuBLAS and cuDNN."""
    set_gpu_switches(device, precision, cudnn_benchmark)
    amp = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return Runtime(device, amp, compiler, folder, compiler.notify, fused_optimizer, pin_memory, ranks)


def set_gpu_switches(device: torch.device, precision: str, cudnn_benchmark: bool) -> None:
    """Set the switches of cuBLAS and cuDNN, which apply to the whole process, if `device` is a GPU."""
    if device.type == "cuda":
        # fp32 means full float32; in every other precision the remaining float32 products may use TF32.
        torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.benchmark = cudnn_benchmark


@dataclass(frozen=True)
class CompilerOptions:
    """How to compile a game."""

    gpu_inline: int = _INLINE  # operations that a GPU kernel may repeat rather than store their result
    unroll: int = _UNROLL  # terms of a sum that are written out rather than summed by a loop
    fusion: int = _FUSION  # nodes of the compiler's graph that may become one kernel
    combine: bool = True  # launch small GPU kernels that do not depend on each other as one


DEFAULT_OPTIONS = CompilerOptions()


class Compiler:
    """Compiles functions for a device, or returns them unchanged if disabled.

    A function is compiled on its first call, or on the first one after `postponed` is set to False.
    """

    def __init__(
        self,
        enabled: bool,
        notify: Callable[[str], None],
        device: torch.device = _CPU,
        options: CompilerOptions = DEFAULT_OPTIONS,
        mode: str = "default",
        report: Report = _ignore,
    ) -> None:
        """report: receives the name of the function to be compiled next, its number and the number of functions."""
        self.enabled, self.notify, self.report = enabled, notify, report
        self.postponed = False  # functions run eagerly for now
        self.skipped: tuple[str, ...] = ()  # names of functions that are never compiled
        if mode not in COMPILE_MODES:
            raise UserError(f"compile_mode is '{mode}'; expected {', '.join(COMPILE_MODES)}.")
        on_gpu = device.type == "cuda"
        self.options: dict[str, Any] = (
            _mode_options(mode)
            | (_GPU_OPTIONS if on_gpu else {})
            | ({_COMBINE: True} if on_gpu and options.combine else {})
            | {
                "realize_opcount_threshold": options.gpu_inline if on_gpu else _INLINE,
                "unroll_reductions_threshold": options.unroll,
                "max_fusion_size": options.fusion,
                "unsafe_marked_cacheable_functions": _CACHEABLE,
            }
        )
        self.seconds: dict[str, float] = {}  # time of compilation and first call, by name of the function
        self._functions = 0  # number of wrapped functions

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.enabled:
            return function
        self._functions += 1
        name = getattr(function, "__name__", "function").strip("_")
        compiled: Callable[..., Any] | None = None  # set once a call has succeeded

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal compiled
            if compiled is not None:
                return compiled(*arguments)
            if self.enabled and not self.postponed and name not in self.skipped:
                try:
                    reach("compile")
                    self.report(name, len(self.seconds) + 1, self._functions)
                    started = time.perf_counter()
                    candidate, result = self._first_call(function, arguments)
                    self.seconds[name] = time.perf_counter() - started
                    compiled = candidate
                    return result
                except UserError:
                    raise
                except Exception as error:
                    if is_out_of_memory(error):  # not the compiler's fault; eager needs more memory
                        raise
                    self._give_up(error)
            return function(*arguments)

        return call

    def _first_call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
        """Return the compiled function and the result of its first call, which compiles it.

        Torch 2.11 cannot order the combined kernels of some graphs; those are compiled without combining.
        """
        compiled = self._compile(function, self.options)
        try:
            return compiled, compiled(*arguments)
        except Exception as error:
            if _COMBINE not in self.options or type(error).__name__ != "InductorError":
                raise
        compiled = self._compile(function, {k: value for k, value in self.options.items() if k != _COMBINE})
        return compiled, compiled(*arguments)

    def _compile(self, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Return the function wrapped by torch.compile; it is compiled on its first call."""
        import torch._dynamo

        copyreg.pickle(torch.memory_format, _reduce_memory_format)
        # A method is compiled once per object. Beyond its default limit of 8, torch would silently stop compiling.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _OBJECTS)
        # fullgraph: a function that cannot be compiled fails before changing anything, so that eager can take over.
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True, options=options)
        return compiled

    def _give_up(self, error: Exception) -> None:
        self.enabled = False
        self.notify(f"Running without compilation: torch.compile failed ({first_line(error)}).")


class _TorchModule:
    """Represents the module torch in a pickle, which can be loaded without this class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("torch",)


def _reduce_memory_format(memory_format: torch.memory_format) -> tuple[Any, ...]:
    """Return the pickle reduction of a memory format, which is the same in every process.

    Torch computes the cache keys of compiled functions by pickling. By default, a memory format is pickled as an attribute
    of the first loaded module that has imported torch, so that other programs would not find the cached function.
    """
    return getattr, (_TorchModule(), str(memory_format).removeprefix("torch."))


def _mode_options(mode: str) -> dict[str, str | int | bool | Callable[..., Any]]:
    """Return the compiler options that a mode sets. The compiler takes seconds to import, so only if needed."""
    if mode == "default":
        return {}
    import torch._inductor

    return dict(torch._inductor.list_mode_options(COMPILE_MODES[mode]))


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for capturing graphs: always the same, since cuBLAS allocates 32 MiB per stream."""
    return torch.cuda.Stream(device)


class Graph:
    """A function without arguments over static tensors; calls replay a CUDA graph of it if `enabled`."""

    def __init__(
        self,
        function: Callable[[], None],
        enabled: bool,
        notify: Callable[[str], None],
        need_less_memory: Callable[[], bool] = lambda: False,
        on_capture: Callable[[], None] = lambda: None,
    ) -> None:
        """need_less_memory: reduces the function's memory use, or returns False if that is impossible.

        on_capture: called before the function is captured.
        """
        self.function, self.enabled, self.notify = function, enabled, notify
        self.need_less_memory, self.on_capture = need_less_memory, on_capture
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif not self.enabled:
            self.function()
        elif self.calls < _WARM_UP:
            self._warm_up()
        else:
            self._capture()
        self.calls += 1

    @property
    def ready(self) -> bool:
        """Whether warm-up is over, so that calls can be timed."""
        return self.graph is not None or not self.enabled

    def _warm_up(self) -> None:
        # Autograd and libraries must have used the stream before a capture.
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.function()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self) -> None:
        self.on_capture()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = _side_stream(torch.cuda.current_device())
        try:
            reach("capture")
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # other threads may copy
                self.function()
        except Exception as error:
            problem, out_of_memory = first_line(error), is_out_of_memory(error)
        else:
            self.graph = graph
            graph.replay()  # capturing runs nothing
            return
        # The error has been freed here, and with it the tensors that its traceback referenced.
        del graph
        torch.cuda.set_stream(stream)  # a failed capture may leave its own stream current
        torch.cuda.synchronize()
        if out_of_memory and self.need_less_memory():
            self.calls = 0
            self._warm_up()
            return
        self.enabled = False
        self.notify(f"Running without CUDA graphs: capture failed ({problem}).")
        self.function()


def warmed_up(function: Callable[[], None], enabled: bool, notify: Callable[[str], None]) -> Graph:
    """Return the function as a Graph that is ready to be timed: run at least once, and captured if possible."""
    graph = Graph(function, enabled, notify)
    graph()
    while not graph.ready:
        graph()
    return graph


def first_line(error: BaseException) -> str:
    """Return the type and first line of an error, plus the next line if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(lines[:2]) if len(lines) > 1 and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
