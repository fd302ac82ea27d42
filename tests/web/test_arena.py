"""Playing yourself: ticks, keys, levels, the opponent on the same seed, and high scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import train_tiny

from redline.core.errors import UserError
from redline.games import load
from redline.web.arena import Arena, board_name, human_rules
from redline.web.scores import KEPT, add_score, read_scores


class Clock:
    """Time that passes only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Match(Arena):
    """An arena with a clock of its own, whose messages are kept."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        usual = {"env": "snake", "options": {}, "seed": 1, "against": None, "trust": False}
        super().__init__(usual | {"scores": str(folder / "scores.json")} | job, self.sent.append, Clock())

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.advance()
            self.clock.now += 1 / self.controls.ticks + 1e-6  # type: ignore[attr-defined]

    def press(self, *keys: str) -> None:
        for key in keys:
            self.obey({"do": "key", "value": key})


def test_the_first_key_starts_and_the_last_one_goes_on(tmp_path: Path) -> None:
    match = Match(tmp_path)
    head = lambda: int(match.you.envs.game.head[0])  # noqa: E731
    start = head()
    match.tick(3)
    assert (match.phase, head()) == ("ready", start)
    match.press("q", "Enter")  # no keys of the game
    assert match.phase == "ready"
    match.press("ArrowUp")
    match.tick(2)
    assert head() == start - 20
    match.press("ArrowLeft", "ArrowDown")  # both are played, one a step
    match.tick(2)
    assert head() == start - 20 - 1 + 10
    match.obey({"do": "pause", "value": True})
    match.tick(5)
    assert head() == start - 20 - 1 + 10
    match.obey({"do": "pause", "value": False})
    match.tick(20)
    assert match.phase == "over"  # into the wall
    assert "ended" in match.sent[-1]["games"][0]
    length = int(match.you.envs.episode.length[0])
    match.tick(5)
    match.press("ArrowUp")
    assert int(match.you.envs.episode.length[0]) == length
    match.press("Enter")
    assert match.phase == "ready"


def test_tetris_falls_by_itself_and_faster_on_higher_levels(tmp_path: Path) -> None:
    controls = load("tetris").controls
    assert controls
    config = human_rules("tetris", {}).config
    gravity = [controls(config, level).options["gravity"] for level in range(1, 30)]  # type: ignore[union-attr]
    assert gravity[0] == 20
    assert gravity == sorted(gravity, reverse=True)
    assert gravity[-1] == 1
    match = Match(tmp_path, env="tetris")
    match.press("ArrowLeft")
    row = int(match.you.envs.game.y[0])
    match.tick(22)
    assert int(match.you.envs.game.y[0]) == row - 1
    episode = match.you.envs.episode
    match.you.envs = match.you.envs._replace(episode=episode._replace(score=episode.score + 10))
    match.tick(1)
    assert match.level == 2
    assert match.you.rules.config.gravity == gravity[1]
    assert match.sent[-2]["level"] == 2


def test_the_agent_plays_the_same_seed_at_its_own_pace(tetris_run: Path, tmp_path: Path) -> None:
    match = Match(tmp_path, env="tetris", against=str(tetris_run))
    assert match.opponent
    mine, others = match.you.envs.game.pieces[0], match.opponent.envs.game.pieces[0]
    assert mine[: len(others)].tolist() == others.tolist()
    match.press("ArrowLeft")
    match.tick(52)  # two seconds and a bit
    assert int(match.opponent.envs.episode.length[0]) in (2, 3)
    assert int(match.you.envs.episode.length[0]) > 40
    stages: list[dict[str, Any]] = []
    match.send = stages.append  # type: ignore[assignment]
    match.send_stages()
    assert [stage["run"] for stage in stages] == [0, 1]


def test_the_board_of_the_agent_is_the_board_of_the_person(tmp_path: Path) -> None:
    run = train_tiny(tmp_path / "small", steps="256", **{"env.width": "6", "env.height": "5"})
    match = Match(tmp_path, against=str(run))
    assert (match.base_rules.config.width, match.base_rules.config.view) == (6, "planes")
    assert match.board == "snake height=5 width=6"


def test_games_without_keys_are_refused() -> None:
    with pytest.raises(UserError, match="cannot be played by keys"):
        human_rules("tetris", {"actions": "placement", "hold": "false"})
    with pytest.raises(UserError, match=r"env\.width is 'x'"):
        human_rules("tetris", {"width": "x"})


def test_boards_have_scores_of_their_own() -> None:
    assert board_name("tetris", human_rules("tetris", {})) == "tetris"
    assert board_name("tetris", human_rules("tetris", {"width": "6"})) == "tetris width=6"


def test_high_scores_are_sorted_bounded_and_survive_damage(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "scores.json"
    assert add_score(path, "a", 0, 9) is None  # nothing to be proud of
    assert [add_score(path, "a", score, 1) for score in (5, 9, 7, 7)] == [1, 1, 2, 3]
    assert add_score(path, "b", 1, 1) == 1
    assert [entry["score"] for entry in read_scores(path, "a")] == [9, 7, 7, 5]
    for score in range(10, 40):
        add_score(path, "a", score, 1)
    assert len(read_scores(path, "a")) == KEPT
    assert add_score(path, "a", 1, 1) is None
    assert len(read_scores(path, "b")) == 1
    path.write_text("{garbage")
    assert read_scores(path, "a") == []
    assert add_score(path, "a", 3, 1) == 1
    assert json.loads(path.read_text())["a"][0]["score"] == 3
    path.write_text('{"a": [1, {"score": "x"}, {"score": 2}]}')
    assert read_scores(path, "a") == [{"score": 2}]


def test_a_score_that_cannot_be_kept_does_not_end_the_game(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert add_score(tmp_path / "file" / "scores.json", "a", 3, 1) == 1


def test_a_game_that_waits_for_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2048, from outside the package: every key is a step, a key that moves nothing is none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "twenty48"))
    match = Match(tmp_path, env="twenty48")
    match.press("ArrowUp", "ArrowLeft")
    for _ in range(5):
        match.advance()
    steps = int(match.you.envs.episode.length[0])
    assert 1 <= steps <= 2
    match.clock.now += 100  # type: ignore[attr-defined]
    match.advance()
    assert int(match.you.envs.episode.length[0]) == steps
    board = match.you.envs.game.board
    legal = match.base_rules.game.legal(match.base_rules.config, match.you.envs.game)[0].tolist()
    keys = ("ArrowUp", "ArrowRight", "ArrowDown", "ArrowLeft")
    for key in (key for key, allowed in zip(keys, legal, strict=True) if not allowed):
        match.press(key)
        match.advance()
        assert match.you.envs.game.board.equal(board)
