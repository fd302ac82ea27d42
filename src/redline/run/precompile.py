"""Compile a run's functions in another process while this one plays and learns uncompiled, or compiles other functions.

The other process trains the same plan for one update, which leaves the compiled code in torch's cache on disk for this process.
A thread would not work: while torch traces a function, it replaces methods of modules for the whole process, so that a network
running eagerly in another thread fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from redline.collect.child_process import describe_exit, die_with_parent, ignore_interrupts
from redline.run.device_choice import cache_file, decisive, recall, remember
from redline.run.plan import Plan, digest
from redline.run.settings import Settings

_CACHE = "compiled"  # name of the cache file that lists compiled plans
_WAIT = 10.0  # seconds within which the process must begin a function, or the run does not wait for it
_PATIENCE = 1800.0  # seconds after which the process is considered hung
# Parts of a plan that depend on the state of the machine, such as free memory: the other process must not decide them anew.
_DECIDED = ("algo_config", "num_envs", "device", "precision", "compile", "threads", "backplay", "backplay_steps")


class Precompilation:
    """The process that compiles a plan; none is started if torch's cache on disk already has the plan."""

    def __init__(
        self,
        plan: Plan,
        notify: Callable[[str], None],
        report: Callable[[str], None],
        skip: tuple[str, ...] = (),
    ) -> None:
        """notify: called with a message if the process fails. report: called with each function being compiled, in a thread.

        skip: names of functions not to compile.
        """
        self._notify, self._report = notify, report
        self._skip = skip
        self._begun: list[str] = []  # functions that the process has begun to compile, in order
        self._ends = time.monotonic() + _PATIENCE
        self._process: subprocess.Popen[bytes] | None = None
        key = _key(plan, skip)
        folder = recall(cache_file(_CACHE), key)
        if isinstance(folder, str) and Path(folder).is_dir():
            return
        decided = {name: getattr(plan, name) for name in _DECIDED} | {"graph": False}
        try:
            request = pickle.dumps((os.getpid(), plan.settings, decided, skip, key))
            self._process = subprocess.Popen(
                # With -m, the module would be imported twice, once as __main__.
                [sys.executable, "-c", "from redline.run.precompile import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "REDLINE_FAULT": ""},
                start_new_session=True,  # a new process group, which `close` kills with all its compilers
            )
            assert self._process.stdin
            with self._process.stdin as pipe:
                pipe.write(request)
        except (OSError, pickle.PicklingError, TypeError, AttributeError) as error:
            self.close()
            self._process = None
            notify(f"Compiling in this process, as no other could be started: {error}.")
            return
        threading.Thread(target=self._read, args=(self._process,), name="precompile", daemon=True).start()

    @property
    def finished(self) -> bool:
        """Whether there is nothing to wait for: all compiled code is on disk, or the process hangs."""
        return self._process is None or self._process.poll() is not None or time.monotonic() > self._ends

    def wait_for(self, function: str) -> None:
        """Wait until a function is compiled, unless it is skipped; if its compilation has not begun, only a few seconds."""
        ends = time.monotonic() + _WAIT
        while function not in (*self._skip, *self._begun[:-1]) and not self.finished:
            if function not in self._begun and time.monotonic() > ends:  # the process may have to play for long first
                return
            time.sleep(0.05)

    def close(self) -> None:
        """Kill the process and those it has started; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        status = process.poll()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if status:
            self._notify(f"The process that compiles {describe_exit(status)}; functions are compiled in this one.")

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        with process.stdout as lines:
            for line in lines:
                text = line.decode().strip()
                self._begun.append(text.partition(",")[0])
                self._report(text)


def _key(plan: Plan, skip: tuple[str, ...] = ()) -> str:
    """Return the key under which torch's cache folder is recorded once the plan is compiled.

    Torch itself decides what it can reuse from that folder. If the key is too coarse, functions are compiled when called.
    """
    settings = plan.settings
    switches: list[Any] = [plan.threads, plan.backplay, plan.backplay_steps]
    switches += [settings.fused_optimizer, settings.inference_mode, settings.compile_mode]
    phases = plan.curriculum.describe() if plan.curriculum else []
    code = [(str(path), path.stat().st_mtime_ns) for path in _sources(plan)]
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return digest([torch.__version__, folder, decisive(plan), switches, phases, skip, code])


def _sources(plan: Plan) -> list[Path]:
    """Return the source files of the compiled code: this package, and the modules of game and algorithm."""
    modules = [sys.modules[member.__module__] for member in (plan.rules.game.step, plan.algo.Learner)]
    return sorted({*Path(__file__).parents[1].rglob("*.py"), *(Path(str(module.__file__)) for module in modules)})


def serve() -> None:
    """Compile the plan pickled on standard input, and print the name of each function to standard output."""
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else may write between the names
    parent, settings, decided, skip, key = pickle.load(sys.stdin.buffer)
    ignore_interrupts()
    die_with_parent(parent)
    if _compile(settings, decided, skip, lambda text: print(text, file=out, flush=True)):
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        remember(cache_file(_CACHE), key, cache_dir())


def _compile(settings: Settings, decided: dict[str, Any], skip: tuple[str, ...], report: Callable[[str], None]) -> bool:
    """Train until the first update, to compile every function not in `skip`; return whether all were compiled.

    The main process retries functions that failed, and reports the reason.
    """
    from redline.run.resolve import resolve
    from redline.run.session import Session

    with tempfile.TemporaryDirectory() as folder:  # empty: a session writes nothing, but would read a run's files
        settings = dataclasses.replace(settings, resume="never", run_dir=f"{folder}/run")
        plan = dataclasses.replace(resolve(settings), **decided)
        with contextlib.closing(Session(plan, lambda _: None, report)) as session:
            session.compiler.skipped = skip
            while not session.updates:
                session.iterate(1)
            return session.compiler.enabled
