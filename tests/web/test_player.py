"""The player: what it draws, whose weights it plays with, how much of the CPU it takes, and whom it trusts."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

from redline import envs
from redline.games._snake_grid import every_age
from redline.run import live_weights, watch_mark
from redline.run.agent import Agent, load_agent
from redline.run.evaluate import HELD_OUT
from redline.run.run_folder import FORMAT_VERSION
from redline.tools import watch
from redline.web import player as player_module
from redline.web.boards import Outputs, finite
from redline.web.player import Commands, Throttle, WatchedRun, Watching
from redline.web.player_link import PlayerLink
from redline.web.replay import record_games, write_replay
from redline.web.wall import TensorGames, make_wall


def board(message: dict[str, Any]) -> np.ndarray[Any, Any]:
    cells = np.frombuffer(base64.b64decode(message["cells"]), np.uint8)
    return cells.reshape(message["rows"], message["columns"])


def test_game_0_of_the_wall_is_the_game_that_watch_plays(snake_run: Path) -> None:
    """The same held-out game, the same agent: the same boards, scores and endings, through several games."""
    agent = load_agent(snake_run, "cpu")
    agent = dataclasses.replace(agent, rules=agent.rules._replace(time_limit=25))
    wall = make_wall(agent, 3)
    frames = watch.play(agent.rules, agent.policy, HELD_OUT)
    endings = 0
    for _ in range(90):
        frame, message = next(frames), wall.frame()[0]
        assert np.array_equal(frame.picture, board(message))
        assert (frame.result.score, frame.result.length) == (message["score"], message["length"])
        assert message.get("ended") == (frame.result.outcome if frame.ended else None)
        endings += frame.ended
        wall.step()
    assert endings > 1


def test_outputs_are_probabilities_and_values(snake_run: Path, tetris_run: Path) -> None:
    agent = load_agent(snake_run, "cpu")
    message = make_wall(agent, 2).frame()[0]
    assert sum(message["outputs"]) == pytest.approx(1, abs=1e-3)
    assert message["action"] == int(np.argmax(message["outputs"]))
    assert isinstance(message["value"], float)
    masked = make_wall(load_agent(tetris_run, "cpu"), 6).frame()
    assert all(len(game["outputs"]) == 34 for game in masked)
    assert any(None in game["outputs"] for game in masked)  # most pieces have fewer placements than others
    assert all(game["outputs"][game["action"]] is not None for game in masked)
    json.dumps(masked, allow_nan=False)
    assert finite(float("-inf")) is None


class TestColours:
    """A settled piece keeps its colour, rows above a cleared one move down with theirs."""

    rules = envs.make_rules("tetris", {"width": 6, "height": 8, "actions": "keys"})
    narrow = envs.make_rules("tetris", {"width": 4, "height": 8})

    def test_colours_agree_with_cells_and_survive_clears(self) -> None:
        rules, count = self.narrow, 24
        games = TensorGames(rules, count, seed=3)
        generator, cleared, kinds = torch.Generator().manual_seed(0), 0, set()
        for _ in range(40):
            score, over = games.envs.episode.score.clone(), games.over
            legal = rules.game.legal(rules.config, games.envs.game)
            games.play((torch.rand(legal.shape, generator=generator) * legal).argmax(1))
            plain = rules.game.cells(rules.config, games.envs.game)  # type: ignore[misc]
            assert torch.equal(torch.where(plain == 1, 1, games.painted), plain)  # all others exactly as `cells`
            cleared += int(((games.envs.episode.score > score) & ~over).sum())
            assert not ((plain == 1) & (games.painted == 1)).any(), "every settled cell has the colour of a piece"
            kinds |= set(games.painted.unique().tolist())
        assert cleared > 10
        assert set(range(3, 10)) <= kinds

    def test_a_cleared_row_moves_the_others_down(self) -> None:
        """The lowest row is full but for two cells; an O falls into them and leaves its upper half."""
        game, config = self.rules.game, self.rules.config
        state = game.init(config, torch.tensor([1], dtype=torch.int32))
        columns = torch.tensor([[3, 1, 1, 1, 0, 0]], dtype=torch.int32)
        o_piece = torch.ones_like(state.pieces)
        state = state._replace(columns=columns, pieces=o_piece, x=torch.tensor([4], dtype=torch.int8))
        painted = game.cells(config, state)  # type: ignore[misc]
        painted[0, 7, :4], painted[0, 6, 0] = 5, 9
        after, *_ = game.step(config, state, torch.tensor([6]))
        assert after.columns.tolist() == [[1, 0, 0, 0, 1, 1]]
        drawn = game.paint(config, painted, state, after)  # type: ignore[misc]
        assert drawn[0, 7].tolist() == [9, 0, 2, 2, 4, 4]  # 2: where the next piece would land


def test_a_snake_is_one_body_from_head_to_tail() -> None:
    rules = envs.make_rules("snake", {"long_start": 30, "start_length": 5})
    games = TensorGames(rules, 16, seed=1)
    state = games.envs.game
    links = rules.game.links(rules.config, state)  # type: ignore[misc]
    body = every_age(rules.config, state.ages) > 0
    assert torch.equal((links & 15) > 0, body)
    sides = sum((links >> bit) & 1 for bit in range(4))
    assert torch.equal(sides.sum((1, 2)), 2 * (state.length.to(torch.int64) - 1))
    faces = links >> 4
    assert torch.equal((faces > 0).sum((1, 2)), torch.ones(16, dtype=torch.int64))
    assert torch.equal(faces.flatten(1).amax(1), (1 << state.heading.to(torch.int64)).to(torch.uint8))


def test_the_cpu_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 ms of work with a share of 10 %: the next frame is due 400 ms later, but never more than a second."""
    clock = {"cpu": 0.0, "wall": 0.0}
    monkeypatch.setattr(player_module.time, "process_time", lambda: clock["cpu"])
    monkeypatch.setattr(player_module.time, "monotonic", lambda: clock["wall"])
    throttle = Throttle()
    throttle.share = 0.1
    spent = 0.0
    for _ in range(50):
        clock["cpu"] += 0.04
        clock["wall"] += 0.05
        spent += 0.04
        clock["wall"] += throttle.pause(1 / 30)
    assert spent / clock["wall"] == pytest.approx(0.1, rel=0.1)
    clock["cpu"] += 10
    assert throttle.pause(0.1) <= 1.0
    throttle.share = 1.0
    clock["cpu"] += 0.001
    clock["wall"] += 5
    assert throttle.pause(0.1) <= 0.1  # time lost is not caught up in a rush


@pytest.mark.fault("H6")
def test_weights_are_published_only_while_somebody_watches(tmp_path: Path) -> None:
    weights, calls = live_weights.LiveWeights(tmp_path), []

    def model() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"a": torch.arange(3.0)}

    weights.publish(model, 5)
    assert not calls
    assert live_weights.published_at(tmp_path) == 0
    watch_mark.watch(tmp_path)
    weights.publish(model, 7)
    weights.publish(model, 8)  # too soon
    tensors, step = live_weights.read(tmp_path)
    assert (len(calls), step, tensors["a"].tolist()) == (1, 7, [0, 1, 2])
    os.utime(tmp_path / ".watched", (1, 1))
    assert not watch_mark.is_watched(tmp_path)
    (tmp_path / "live.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="no safetensors"):
        live_weights.read(tmp_path)


@pytest.mark.fault("H6")
def test_a_link_in_place_of_the_mark_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "outside"
    target.write_text("keep")
    os.utime(target, (1, 1))
    run = tmp_path / "run"
    run.mkdir()
    (run / ".watched").symlink_to(target)
    watch_mark.watch(run)
    assert os.stat(target).st_mtime == 1
    (run / "live.safetensors").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        live_weights.read(run)


def test_newer_weights_are_taken_and_damaged_ones_left(snake_run: Path, tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "run"
    shutil.copytree(snake_run, path)
    sent: list[dict[str, Any]] = []
    run = WatchedRun(0, path, 2, False, 0)
    run.refresh(sent.append)
    assert [message["type"] for message in sent] == ["stage", "weights"]
    saved = sent[-1]["env_steps"]
    agent = load_agent(path, "cpu")
    model = {f"net.{k}".removeprefix("net.net."): v for k, v in agent.net.state_dict().items()}
    model = {name.removeprefix("net."): tensor for name, tensor in model.items()}
    watch_mark.watch(path)
    live_weights.LiveWeights(path).publish(lambda: model, saved + 1000)
    run._look_at = 0
    run.refresh(sent.append)
    assert sent[-1] == {"type": "weights", "run": 0, "env_steps": saved + 1000}
    (path / "live.safetensors").write_bytes(b"garbage")
    run._look_at = 0
    run.refresh(sent.append)
    assert sent[-1]["env_steps"] == saved  # back to the checkpoint


@pytest.mark.fault("H6")
def test_a_run_of_somebody_else_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_game.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    config = {
        "format_version": FORMAT_VERSION,
        "env": "evil_game",
        "algo": "ppo",
        "env_options": {},
        "algo_options": {},
    }
    (run / "config.json").write_text(json.dumps(config))
    sent: list[dict[str, Any]] = []
    WatchedRun(0, run, 2, False, 0).refresh(sent.append)
    assert sent[0]["type"] == "problem"
    assert "does not carry your signature" in sent[0]["text"]
    assert not (tmp_path / "ran").exists()


def test_a_run_without_weights_says_so_once(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    run = WatchedRun(0, tmp_path, 2, False, 0)
    for _ in range(2):
        run._look_at = 0
        run.refresh(sent.append)
    assert [message["text"] for message in sent] == ["The run is starting."]


def test_pause_speed_and_step() -> None:
    watching = Watching([], lambda message: None)  # noqa: ARG005
    for do, value in (("viewers", 2), ("speed", 1e9), ("share", 0.5), ("step", None), ("nonsense", 1)):
        watching.obey({"do": do, "value": value})
    assert (watching.viewers, watching.speed, watching.throttle.share) == (2, player_module.MAX_SPEED, 0.5)
    assert (watching.paused, watching.steps) == (True, 1)


def test_commands_that_are_no_json_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(player_module.os, "_exit", ended.append)
    commands = Commands(io.StringIO('garbage\n{"do": "a"}\n'))
    end = time.monotonic() + 10
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    assert commands.wait(1) == [{"do": "a"}]
    assert ended == [0]  # the process ends with its commands


@pytest.mark.fault("H6")
def test_commands_to_a_player_that_does_not_read_are_dropped(snake_run: Path) -> None:
    link = PlayerLink({"kind": "watch", "runs": [str(snake_run)], "games": 1, "trust": False, "seed": 0})
    link.start()
    try:
        for _ in range(20_000):  # more than a pipe holds, before it has loaded torch
            link.command("speed", 8)
    finally:
        link.close()
    assert link.process is not None
    assert link.process.poll() is not None


def test_what_the_network_says_is_what_the_policy_does(snake_run: Path) -> None:
    agent = load_agent(snake_run, "cpu")
    obs = torch.randint(0, 3, (32, *agent.rules.game.spec(agent.rules.config).obs_shape), dtype=torch.uint8)
    assert torch.equal(Outputs(agent, obs, None).actions, agent.policy(obs, None))


class Strip(gymnasium.Env[Any, Any]):
    """A walk of five steps; the picture is one colour, as bright as the place."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (as Gymnasium has it)
    observation_space = gymnasium.spaces.Box(0, 8, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += int(action)
        return np.full(1, self.place, np.float32), float(action), self.place == 5, False, {}

    def render(self) -> Any:
        return np.full((40, 60, 3), 40 * self.place, np.uint8)

    def get_action_meanings(self) -> list[str]:
        return ["STAY", "GO"]


class GoesOn(torch.nn.Module):
    """Values 0 and 1: the second action, always."""

    def forward(self, obs: torch.Tensor, legal: torch.Tensor | None = None) -> torch.Tensor:
        del legal
        return torch.tensor([[0.0, 1.0]]).expand(len(obs), 2)


@pytest.fixture
def strip_agent() -> Iterator[Agent]:
    gymnasium.register("Strip-v0", Strip)
    rules = envs.make_rules("gym:Strip-v0")
    yield Agent(Path("strip"), {"algo": "dqn", "env": "gym:Strip-v0"}, rules, GoesOn(), torch.device("cpu"), 0)
    del gymnasium.registry["Strip-v0"]


def shown_place(frame: dict[str, Any]) -> int:
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(frame["picture"].partition(",")[2]))))
    return round(picture.mean() / 40)


def test_a_gymnasium_environment_in_a_replay(strip_agent: Agent, tmp_path: Path) -> None:
    """`--html`: every step of the recording is a picture of its own, the last one that of the end."""
    record = record_games(strip_agent, 0, 2, 100)
    assert record["stage"]["kind"] == "picture"
    for frames in record["games"]:
        assert [shown_place(frame) for frame in frames] == [0, 1, 2, 3, 4, 5]
        assert frames[-1]["ended"] == "game over"
    write_replay(tmp_path / "strip.html", record, 12.0)
    assert record["games"][1][3]["picture"] in (tmp_path / "strip.html").read_text()


def test_a_gymnasium_environment_on_the_wall(strip_agent: Agent) -> None:
    wall = make_wall(strip_agent, 12)
    stage, shown = wall.stage(), []
    for _ in range(8):
        frame = wall.frame()
        shown.append((shown_place(frame[0]), frame[0]["length"], frame[0].get("ended")))
        wall.step()
    wall.close()
    assert len(frame) == 4  # rendering costs: a small wall
    assert (stage["kind"], stage["actions"], stage["outputs"]) == ("picture", ["stay", "go"], "Q-values")
    assert frame[0]["outputs"] == [0.0, 1.0]
    assert shown[:6] == [(0, 0, None), *((place, place, None) for place in range(1, 5)), (5, 5, "game over")]
    assert shown[6][0] == 1  # the next episode has begun
