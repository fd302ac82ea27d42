"""Help, completion, --config and usage errors: their text, and that they appear without torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline import algos, cli, games
from redline.cli import catalog
from redline.cli.command import COMMANDS, Request
from redline.cli.parse import fold, merge_config, parse, read_config, split
from redline.core.errors import UserError
from redline.run.run_folder import FORMAT_VERSION
from redline.run.settings import from_words

SOURCE = Path(__file__).parents[2] / "src"
IMPOSSIBLE = (
    "--num-envs 0",
    "--minutes -1",
    "--minutes 0",
    "--steps 0",
    "--episodes -3",
    "--seed -1",
    "--seed 1e15",
    "--threads 0",
    "--ring-rows 2",
    "--accumulate 0",
    "--time-limit -1",
    "--eval-episodes -1",
    "--checkpoint-minutes 0",
    "--backplay 2",
    "--backplay-steps 0",
    "--inference both",
    "--resume sometimes",
    "--no-curriculum --curriculum-file phases.json",
    "--dqn.gamma 0.5 --ppo.gamma 0.5",
    "--algo dqn --num-envs 0",
)
WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    ["trian"],
    *([name, "--help"] for name in COMMANDS.names()),
    *(["train", name, "--help"] for name in games.names()),
    ["train", "gym:CartPole-v1", "--help"],
    ["train", "snake", "--stpes", "5"],
    ["train", "snake", "--num-envs", "many"],
    ["train", "snake", "--env.widht", "5"],
    ["train", "snake", "--env.width", "wide"],
    ["train", "snake", "--env.view", "plans"],
    ["train", "snake", "--dqn.net", "cn"],
    ["train", "snake", "--algo", "dqm"],
    ["train", "snak"],
    ["train", "CartPole-v1"],
    ["train", "snake", "--config", "missing.toml"],
    ["doctor", "--env", "snak"],
    ["bench", "envv"],
    ["eval", "run", "--episodes", "few"],
    ["watch", "run"],
    ["watch", "run", "--gif", "out.mp4"],
    ["completion", "bash"],
    ["completion", "fish"],
    *(["train", "snake", *words.split()] for words in IMPOSSIBLE),
    ["eval", "nowhere"],
    ["eval", "."],
    ["eval", "run", "--episodes", "0"],
    ["eval", "run", "--seed", "-1"],
    ["watch", "nowhere", "--terminal"],
    ["watch", "run", "--terminal", "--fps", "0"],
    ["watch", "run", "--terminal", "--games", "0"],
    ["report", "nowhere"],
    ["check", "gym:CartPole-v1"],
    ["bench", "replay", "--env", "gym:CartPole-v1"],
    ["train", "gym"],
    ["train", "gym:"],
    ["train", "snake", "--ppo.hidden", "a,b"],
    ["help", "nothing"],
    ["profile", "snake", "--num-envs", "0"],
    ["train", "gym:CartPole-v1", "--env.kwargs", "3"],
]
PROGRAM = """
import contextlib, io, json, sys
from redline import cli
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([words, code, err.getvalue(), "torch" in sys.modules]))
"""


def call(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main(words)
    assert isinstance(end.value.code, int)
    return end.value.code, out.getvalue(), err.getvalue()


def test_help_and_usage_errors_do_not_import_torch(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(WITHOUT_TORCH)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout
    outcomes = [json.loads(line) for line in output.splitlines()]
    assert len(outcomes) == len(WITHOUT_TORCH)
    for words, code, err, torch_imported in outcomes:
        assert not torch_imported, words
        help_wanted = words[-1] in ("--help", "--version", "bash")
        assert code == (0 if help_wanted else 2), (words, err)
        assert help_wanted == (err == "")
        if err:
            (sentence,) = err.splitlines()
            assert sentence.startswith("redline: ")


RUN = {"format_version": FORMAT_VERSION, "env": "snake", "algo": "ppo", "env_options": {}, "algo_options": {}}
# Ctrl-C comes as soon as torch is imported.
INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from redline import cli
cli.main()
"""


@pytest.mark.parametrize(
    "words",
    [
        "train snake",
        "train snake --algo dqn --json",
        "train snake --print-config",
        "eval run",
        "watch run --terminal",
        "watch run --gif a.gif",
        "bench env",
        "profile snake",
        "tune snake",
        "check snake",
        "doctor",
        "list",
    ],
)
def test_the_first_word_comes_before_torch_and_an_interrupt_is_acknowledged(words: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(RUN))
    program = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *words.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert program.stderr.splitlines() == ["Loading PyTorch…", "redline: Interrupted."]
    assert (program.returncode, program.stdout) == (130, "")
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(tmp_path / "run") == ["config.json"]


def test_an_interrupt_that_a_library_turned_into_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("the compiler failed") from None

    monkeypatch.setattr(catalog, "registries", convert)
    assert call("list") == (130, "", "redline: Interrupted.\n")


# ---- help


@pytest.mark.parametrize("algo", algos.names())
def test_help_of_a_game_shows_its_options_and_those_of_the_algorithm(algo: str) -> None:
    _, text, _ = call("train", "snake", "--help", "--algo", algo)
    listed = [line.split()[0].replace("--no-", "--") for line in text.splitlines() if line.startswith("  --")]
    expected = [f"--env.{option.name}" for option in catalog.env_options("snake")]
    expected += [f"--{algo}.{option.name}" for option in catalog.algorithm_options(algo)]
    assert listed == [name.replace("_", "-") for name in expected]
    assert "  --env.width N " in text
    assert "columns, 4 to 40 [10]" in text


def test_help_of_a_game_takes_the_algorithm_of_its_recipe() -> None:
    _, text, _ = call("train", "snake", "--help")
    assert "options of ppo:" in text
    assert "redline doctor --env snake shows the values for this machine." in text
    assert "--dqn." not in text
    assert "--steps N" not in text
    _, text, _ = call("train", "snake", "--dqn.dueling", "--help")
    assert "options of dqn:" in text


@pytest.mark.parametrize(
    "words",
    [("train", "snake", "--algo", "mine"), ("train", "--algo", "mine", "snake"), ("train", "snake", "--algo=mine")],
)
def test_help_with_an_algorithm_of_ones_own(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("class Config:\n    speed: int = 3  # how fast\n\nclass Learner: ...\n")
    monkeypatch.chdir(tmp_path)
    code, text, _ = call(*words, "--help")
    assert code == 0
    assert "options of snake:" in text
    assert "options of mine:\n  --mine.speed N " in text
    assert "ppo" not in text
    code, _, err = call("train", "snake", "--algo", "mien", "--help")
    assert (code, "There is no algorithm 'mien'" in err) == (2, True)


def test_general_help_shows_no_options_of_a_game_or_algorithm() -> None:
    _, text, _ = call("train", "--help")
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert "--steps" in listed
    assert "--config" in listed
    assert "--save-replay / --no-save-replay" in text
    assert not any("." in name for name in listed)


def test_help_of_a_command_by_either_name() -> None:
    assert call("help", "train") == call("train", "--help")
    assert call("help", "train", "snake") == call("train", "snake", "--help")


@pytest.mark.fault("H1")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "gym"), "'gym' names no environment; give its id, as in gym:CartPole-v1."),
        (("train", "snake", "--ppo.hidden", "a,b"), "ppo.hidden is 'a,b'; expected whole numbers separated by commas"),
        (("train", "gym:X-v0", "--env.kwargs", "3"), "env.kwargs needs a name: give --env.kwargs.NAME VALUE for each."),
        (("check", "gym:CartPole-v1"), "redline check runs the contract of tensor games, and gym:CartPole-v1 is a CPU"),
        (("bench", "replay", "--env", "mario"), "redline bench replay measures the memory of tensor games, and mario"),
        (("eval", "snake"), "There is no run folder snake; did you mean 'runs/snake-ppo'?"),
        (
            ("report", "damaged"),
            "damaged/config.json could not be read: it is not valid JSON; restore it or train into",
        ),
    ],
)
def test_a_mistake_is_explained(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("runs/snake-ppo", json.dumps(RUN)), ("damaged", "{")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    _, _, err = call(*words)
    assert err.startswith(f"redline: {sentence}")


def test_help_for_an_environment_that_does_not_exist() -> None:
    code, _, err = call("train", "snak", "--help")
    assert (code, err.startswith("redline: There is no game 'snak'; did you mean 'snake'?")) == (2, True)


# ---- commands


def test_a_command_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import redline.cli.commands as package

    text = '''
"""Greets."""
from dataclasses import dataclass
from redline.cli.command import Command, Request, options_of

@dataclass(frozen=True)
class Options:
    times: int = 1  # greetings

def run(request: Request) -> int:
    print("hello " * request.build(Options).times)
    return 0

COMMAND = Command("greet", run, "", options_of(Options))
'''
    (tmp_path / "hello.py").write_text(text.lstrip())
    (tmp_path / "broken.py").write_text("COMMAND = missing")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package.__spec__, "submodule_search_locations", package.__path__)
    monkeypatch.setattr(
        "redline.cli.schema.locate",
        lambda name, real=cli_locate: tmp_path / "hello.py" if "hello" in name else real(name),
    )
    COMMANDS.refresh()
    try:
        assert call("hello", "--times", "2")[1] == "hello hello \n"
        assert "  hello " in call("--help")[1]
        assert "  train " in call("--help")[1]
        code, _, err = call("broken")
        assert (code, "NameError" in err) == (2, True)
    finally:
        COMMANDS.refresh()


from redline.cli.schema import locate as cli_locate  # noqa: E402

# ---- completion


def complete(line: str, script: str) -> list[str]:
    """Return what bash offers for the last word of a line."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    program = f"""
{script}
COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}
_shtab_redline
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return subprocess.run(["bash", "-c", program], check=True, capture_output=True, text=True).stdout.split()


def test_completion_in_bash() -> None:
    _, script, _ = call("completion", "bash")
    assert set(complete("redline ", script)) >= set(COMMANDS.names())
    assert complete("redline trai", script) == ["train"]
    assert complete("redline train sn", script) == ["snake"]
    assert "--env.start-length" in complete("redline train snake --env.st", script)
    assert complete("redline train snake --dqn.duel", script) == ["--dqn.dueling"]
    assert set(complete("redline train snake --algo ", script)) == {"auto", *algos.names()}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_completion_of_other_shells(shell: str) -> None:
    code, script, err = call("completion", shell)
    assert (code, err) == (0, "")
    assert "env.width" in script


def test_completion_of_an_unknown_shell() -> None:
    code, _, err = call("completion", "bsh")
    assert code == 2
    assert err == "redline: There is no completion for 'bsh'; did you mean 'bash'? Shells: bash, zsh, tcsh.\n"


# ---- --config


def settings_from(path: Path, text: str, *words: str) -> Any:
    path.write_text(text)
    request = parse("train", COMMANDS.load("train"), ["snake", "--config", str(path), *words])
    merged = merge_config("train", COMMANDS.load("train"), request)
    return from_words("snake", merged.options)


CONFIG = """
steps = "20M"
num-envs = 64
compile = false
minutes = 1.5

[env]
width = 6
start = "random"

[dqn]
hidden = [32, 16]
dueling = true
learning_rate = 1e-3
"""


def test_a_config_file_gives_any_option(tmp_path: Path) -> None:
    settings = settings_from(tmp_path / "a.toml", CONFIG)
    assert (settings.steps, settings.num_envs, settings.compile, settings.minutes) == (20_000_000, 64, False, 1.5)
    same = "--steps 20M --num-envs 64 --no-compile --minutes 1.5 --env.width 6 --env.start random"
    same += " --dqn.hidden 32,16 --dqn.dueling --dqn.learning_rate 1e-3"
    request = parse("train", COMMANDS.load("train"), ["snake", *same.split()])
    expected = from_words("snake", request.options)
    assert settings.algo == expected.algo == "dqn"
    assert {k: str(v) for k, v in settings.env_options.items()} == {k: str(v) for k, v in expected.env_options.items()}
    assert settings.algo_options.keys() == expected.algo_options.keys()


def test_the_command_line_wins_over_the_config_file(tmp_path: Path) -> None:
    settings = settings_from(tmp_path / "a.toml", CONFIG, "--steps", "5", "--compile", "--env.width=9")
    assert (settings.steps, settings.compile, settings.num_envs) == (5, True, 64)
    assert settings.env_options["width"] == "9"


@pytest.mark.fault("H1")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stpes = 5", "redline train has no option stpes; did you mean 'steps'?"),
        ("[env]\nwidht = 5", "There is no option env.widht; did you mean 'width'?"),
        ("[dqm]\ngamma = 0.5", "There is no option group dqm.*; there are env.* and those of the algorithms"),
        ("[dqn]\nnet = 'cn'", "dqn.net is 'cn'; did you mean 'cnn'?"),
        ("steps = 'many'", "steps is 'many'; expected a number"),
        ("steps = 1.5", "steps is '1.5'; expected a whole number."),
        ("steps = ", "is not valid TOML"),
        ("config = 'b.toml'", "redline train has no option config"),
    ],
)
def test_mistakes_in_a_config_file(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        settings_from(tmp_path / "a.toml", text)
    assert str(error.value).startswith(f"config {tmp_path / 'a.toml'}")
    assert sentence in str(error.value)


@pytest.mark.fault("H1")
def test_a_config_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"config none\.toml could not be read: No such file or directory\."):
        merge_config("train", COMMANDS.load("train"), Request(["snake"], {"config": "none.toml"}))


# ---- --env.kwargs.NAME


def test_constructor_arguments_are_collected_as_values(tmp_path: Path) -> None:
    words = (
        "--env.kwargs.map_name 8x8 --env.kwargs.is_slippery false --env.kwargs.size=[2, 3] --env.kwargs.p 0.5 --steps 5"
    )
    command = COMMANDS.load("train")
    options = split("train", command, ["gym:FrozenLake-v1", *words.replace("[2, 3]", "[2,3]").split()]).options
    kwargs = {"map_name": "8x8", "is_slippery": False, "size": [2, 3], "p": 0.5}
    assert fold(options) == {"env.kwargs": kwargs, "steps": "5"}
    (tmp_path / "a.toml").write_text('[env.kwargs]\nmap_name = "8x8"\nis_slippery = false\nsize = [2, 3]\np = 0.5')
    assert fold(read_config(str(tmp_path / "a.toml"))) == {"env.kwargs": kwargs}
