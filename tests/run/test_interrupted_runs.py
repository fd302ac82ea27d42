"""`redline train` as a program, interrupted in every phase: exit code, sentence, checkpoint, and that it continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from redline.run import preemption
from redline.run.checkpoint import read_checkpoint
from redline.run.preemption import has_notice, watch_for_notice
from redline.run.signals import StopSignals, Unsaved

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = Path(__file__).with_name("fork_runs.py")
STEPS = 480  # an iteration of DQN is 16, and it learns from the fifth on
TRAIN = f"train snake --algo dqn --no-compile --device cpu --num-envs 16 --batch-size 16 --replay-capacity 480 --steps {STEPS}"
TRAIN += " --n-step 3 --dqn.hidden 8 --dqn.learning-starts 64 --threads 1 --env.starvation 9 --eval-episodes 0"

# Name: the fault and further options.
CASES: dict[str, dict[str, Any]] = {
    "collect": {"fault": "sigterm@collect:20"},
    "update": {"fault": "sigterm@update:20"},
    "warm_up": {"fault": "sigterm@warm_up:3"},
    "session": {"fault": "sigterm@session"},
    "compile": {"fault": "sigterm@compile,hang@compile", "words": "--compile"},
    # The second function to be compiled is the update, once the replay memory holds enough.
    "compile_update": {"fault": "sigterm@compile:2", "words": "--compile", "pass_through": True},
    "compile_hang": {
        "fault": "sigusr1@iteration:3,sigterm@compile:2,hang@compile:2",
        "words": "--compile --grace 0.5 --log-seconds 0.001",
        "pass_through": True,
    },
    "compile_hang_unsaved": {
        "fault": "sigterm@compile:2,hang@compile:2",
        "words": "--compile --grace 0.5 --log-seconds 0.001",
        "pass_through": True,
    },
    "evaluate": {"fault": "sigterm@evaluate", "words": "--eval-episodes 4"},
    "other_save": {
        "fault": "sigterm@save.model:1,slow@save.state:0.3s",
        "words": "--checkpoint-minutes 1e-9 --log-seconds 0.01",
    },
    "last_save": {"fault": "sigterm@save.model:1", "words": "--eval-episodes 4"},
    "hang": {"fault": "sigusr1@iteration:10,sigterm@collect:20,hang@collect:20", "words": "--grace 0.5"},
    "hang_unsaved": {"fault": "sigterm@update:10,hang@update:10", "words": "--grace 0.5"},
    "native_hang": {"native_hang": 20, "words": "--grace 0.5"},
    "hup": {"fault": "sighup@update:20"},
    "usr1": {"fault": "sigusr1@update:20"},
    "int": {"fault": "sigint@update:20"},
    "twice": {"fault": "sigterm@update:20,slow@save.model:0.6s,sigterm@save.optim"},
    "thrice": {
        "fault": "sigterm@update:20,slow@save.model:0.6s,sigterm@save.optim,slow@save.state:0.6s,sigterm@save.state"
    },
    "notice": {"notice": "taken", "fault": "slow@iteration:0.2s", "words": "--preemption-notice taken"},
    "reader_gone": {"fault": "sigterm@update:20", "out": "reader_gone", "err": "reader_gone"},
    "closed": {"fault": "sigterm@update:20", "out": "closed", "err": "closed"},
    "full": {"out": "full", "err": "full"},
    "full_stopped": {"fault": "sigterm@update:20", "out": "full", "err": "full"},
    "log_full": {"fault": "full@log"},
    "board": {"words": "--tensorboard"},
}

# Cases that are continued, by the same command without the fault.
CONTINUED = (
    "collect",
    "warm_up",
    "session",
    "compile_hang",
    "evaluate",
    "other_save",
    "last_save",
    "hang",
    "thrice",
    "notice",
)


class Outcome:
    """A run that was interrupted."""

    def __init__(self, folder: Path, record: dict[str, Any], again: dict[str, Any]) -> None:
        self.path = folder / record["name"]
        self.code, self.out, self.err = record["code"], record["out"], " ".join(record["err"].split())
        self.again = again
        saved = sorted(again["saved"])
        self.step = int(saved[-1].removeprefix("ckpt-")) if saved else 0  # of the newest checkpoint, before it went on


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All cases, each run with its fault and then once more without."""
    folder = tmp_path_factory.mktemp("interrupted")
    env = {name: value for name, value in os.environ.items() if name != "REDLINE_FAULT"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder)],
        env=env | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout

    def run(case: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(case), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    (folder / "board").mkdir()
    (folder / "board" / "tensorboard").write_text("in the way")
    results = {}
    for name, case in CASES.items():
        words = [*f"{TRAIN} --run-dir {name}".split(), *case.get("words", "").split()]
        record = run({"name": name, **case, "words": words})
        saved = [path.name for path in (folder / name / "checkpoints").glob("ckpt-*")]
        result = folder / name / "result.json"
        before = json.loads(result.read_text()) if result.exists() else {}
        (folder / "taken").unlink(missing_ok=True)
        without_fault = {"name": name, "words": words, "pass_through": case.get("pass_through")}
        again = run(without_fault) if name in CONTINUED else {}
        results[name] = Outcome(folder, record, {**again, "saved": saved, "result_before": before})
    process.stdin.close()
    process.wait(60)
    return results


@pytest.mark.fault("B1")
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("collect", 320),
        ("update", 384),
        ("warm_up", 48),
        ("compile_update", 80),
        ("other_save", None),
    ],
)
def test_sigterm_is_honoured_after_the_iteration(name: str, step: int | None, outcomes: dict[str, Outcome]) -> None:
    run = outcomes[name]
    assert run.code == 75
    assert run.err.count("SIGTERM received: stopping with a checkpoint.") == 1
    assert 0 < run.step < STEPS
    if step is not None:
        assert abs(run.step - step) <= 64
    assert "stopped by SIGTERM" in run.out


@pytest.mark.fault("B1")
@pytest.mark.parametrize("name", ["session", "compile"])
def test_sigterm_with_nothing_to_save_ends_it_at_once(name: str, outcomes: dict[str, Outcome]) -> None:
    run = outcomes[name]
    assert (run.code, run.step) == (75, 0)
    assert run.err.endswith(
        "redline: SIGTERM received before the first update: nothing was trained, nothing is lost. Nothing was saved yet: "
        "the same command starts anew."
    )


@pytest.mark.fault("B1")
@pytest.mark.parametrize("name", ["evaluate", "last_save"])
def test_sigterm_in_the_final_evaluation_or_before_it(name: str, outcomes: dict[str, Outcome]) -> None:
    """Training is complete and saved; the same command evaluates."""
    run = outcomes[name]
    assert (run.code, run.step) == (75, STEPS)
    assert "SIGTERM received in the evaluation: the agent is saved, without a score." in run.err
    assert "score_mean" not in run.again["result_before"]
    result = json.loads((run.path / "result.json").read_text())
    assert result["env_steps"] == STEPS
    assert "score_mean" in result
    assert "evaluation_pending" not in result


@pytest.mark.fault("B1")
@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("hang", True),
        ("hang_unsaved", False),
        ("native_hang", False),
        ("compile_hang", True),
        ("compile_hang_unsaved", False),
    ],
)
def test_a_loop_that_hangs_is_ended_and_the_last_checkpoint_named(
    name: str, saved: bool, outcomes: dict[str, Outcome]
) -> None:
    run = outcomes[name]
    assert run.code == 75
    assert "SIGTERM was received 0.5 seconds ago and training has not come back since" in run.err
    assert bool(run.step) is saved
    expected = (
        f"The last good checkpoint is {name}/checkpoints/ckpt-{run.step:012d}: the same command continues from it."
    )
    assert run.err.endswith(expected if saved else "Nothing was saved yet: the same command starts anew.")


@pytest.mark.fault("B5")
def test_hangup_stops_and_usr1_saves_and_goes_on(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["hup"].code == 75
    assert 0 < outcomes["hup"].step < STEPS
    run = outcomes["usr1"]
    assert run.code == 0
    assert "SIGUSR1 received: writing a checkpoint, training goes on." in run.err
    steps = sorted(int(name.removeprefix("ckpt-")) for name in run.again["saved"])
    assert len(steps) == 2  # no minute has passed: one was asked for, one is the last
    assert abs(steps[0] - 384) <= 64


def test_ctrl_c_stops_with_a_checkpoint(outcomes: dict[str, Outcome]) -> None:
    run = outcomes["int"]
    assert run.code == 130
    assert "press Ctrl-C again to end at once" in run.err
    assert 0 < run.step < STEPS


@pytest.mark.fault("B2")
def test_more_signals_while_the_checkpoint_is_written(outcomes: dict[str, Outcome]) -> None:
    twice, thrice = outcomes["twice"], outcomes["thrice"]
    assert (twice.code, thrice.code) == (75, 75)
    assert 0 < twice.step < STEPS
    assert "the checkpoint is being written; once more ends it at once" in twice.err
    assert thrice.step == 0
    assert thrice.err.endswith("redline: SIGTERM received again: the steps since the last checkpoint are lost.")


@pytest.mark.fault("B1", "B2", "B5")
@pytest.mark.parametrize("name", CONTINUED)
def test_the_same_command_continues(name: str, outcomes: dict[str, Outcome]) -> None:
    run = outcomes[name]
    assert run.again["code"] == 0, run.again["err"]
    assert "Traceback" not in run.again["err"]
    assert read_checkpoint(max((run.path / "checkpoints").glob("ckpt-*"))).step == STEPS
    assert not [entry for entry in os.listdir(run.path / "checkpoints") if entry.startswith(".")]
    if 0 < run.step < STEPS:
        assert f"from ckpt-{run.step:012d}" in " ".join(run.again["err"].split())


@pytest.mark.parametrize("name", CASES)
def test_there_is_never_a_traceback(name: str, outcomes: dict[str, Outcome]) -> None:
    assert "Traceback" not in outcomes[name].err


@pytest.mark.fault("H5")
@pytest.mark.parametrize("name", ["reader_gone", "closed", "full_stopped"])
def test_the_code_stays_when_nobody_reads(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].code == 75
    assert 0 < outcomes[name].step < STEPS


@pytest.mark.fault("H5")
def test_a_full_disk_behind_the_output_is_an_error_of_its_own(outcomes: dict[str, Outcome]) -> None:
    assert (outcomes["full"].code, outcomes["full"].step) == (74, STEPS)


@pytest.mark.fault("H3")
def test_logs_that_fail_do_not_stop_training(outcomes: dict[str, Outcome]) -> None:
    for name, words in {"log_full": "metrics.jsonl", "board": "the TensorBoard log"}.items():
        run = outcomes[name]
        assert (run.code, run.step) == (0, STEPS)
        assert run.err.count(f"Writing {words} fails") == 1
        assert f"records could not be written to {words}" in run.err


@pytest.mark.fault("B6")
def test_a_notice_in_a_file_is_treated_as_sigterm(outcomes: dict[str, Outcome]) -> None:
    run = outcomes["notice"]
    assert run.code == 75
    assert "Preemption notice at taken." in run.err
    assert run.step > 0


class Metadata(BaseHTTPRequestHandler):
    """A metadata server; the answer is the class attribute."""

    answer: tuple[int, bytes] = (404, b"")

    def do_GET(self) -> None:
        status, body = self.answer
        self.send_response(status if self.headers.get("Metadata-Flavor") == "Google" else 403)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def metadata() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/preempted"
    server.shutdown()
    server.server_close()


@pytest.mark.fault("B6")
def test_a_notice_at_a_url_and_errors_that_are_none(metadata: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    for answer in ((404, b""), (500, b"TRUE"), (200, b"FALSE"), (200, b""), (200, b"none\n"), (403, b"TRUE")):
        monkeypatch.setattr(Metadata, "answer", answer)
        assert not has_notice(metadata)
    assert not has_notice("http://127.0.0.1:1/nobody")
    assert not has_notice("http://[not a url")
    messages: list[str] = []
    stopped = threading.Event()
    with StopSignals(messages.append) as signals, watch_for_notice(metadata, signals):
        signals.unsaved = Unsaved.TRAINING
        monkeypatch.setattr(Metadata, "answer", (200, b"TRUE"))
        for _ in range(1000):
            if signals.caught:
                break
            stopped.wait(0.01)
    assert signals.caught == "SIGTERM"
    assert messages[0] == f"Preemption notice at {metadata}."
