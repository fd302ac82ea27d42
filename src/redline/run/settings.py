"""Settings: the options of `redline train` as requested, before anything is chosen. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from redline.core.errors import UserError
from redline.run import options

DEFAULT_MINUTES = 3.0
MAX_SEED = 2**46  # limit of training seeds; larger ones are reserved for evaluation
_MINIMA = {"num_envs": 1, "accumulate": 1, "eval_episodes": 0, "eval_every": 0, "seed": 0}
_MINIMA |= {"backplay_steps": 1, "publish": 0, "staged_rows": 0}
_ABOVE_ZERO = (
    "steps",
    "episodes",
    "minutes",
    "threads",
    "interop_threads",
    "checkpoint_minutes",
    "log_seconds",
    "grace",
    "rank_timeout",
)
_MIN_RING = 4  # rows of an actor's ring: one being written, one being read, and one waiting for its successor
# Algorithm options that have a shorthand without the algorithm's prefix: --n-step is --dqn.n_step.
ALGO_SHORTHANDS = ("batch_size", "n_step", "train_every", "replay", "replay_capacity", "prioritized")


@dataclass(frozen=True)
class Settings:
    """Options of `redline train`. None: chosen by recipe and hardware."""

    env: str  # environment: a game, mario[:WORLD-STAGE], gym:ID, or the import name of a game of your own
    algo: str = "auto"  # algorithm; auto: the one the recipe recommends
    preset: str | None = None  # named set of algorithm options, as rainbow of dqn; options given besides win
    num_envs: int | None = None  # environments played in parallel
    batch_size: int | None = None  # samples per gradient step
    n_step: int | None = None  # steps per return before bootstrapping
    train_every: int | None = None  # steps that every environment plays per update
    replay: str | None = None  # kind of replay memory; `redline list` shows them
    replay_capacity: int | str | None = None  # transitions in replay memory; auto: what fits half of the free memory
    prioritized: bool | None = None  # sample transitions by TD error (prioritized replay)
    steps: int | None = None  # stop after this many environment steps in total
    episodes: int | None = None  # stop after this many finished episodes in total
    minutes: float | None = (
        None  # stop after this much training time in total; 3, or the recipe's, if no limit is given
    )
    seed: int = 0  # seed of weights, environments and exploration
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    precision: str = "auto"  # auto, fp32, tf32, bf16, fp16
    compile: bool | None = None  # compile with torch.compile
    compile_mode: Literal["default", "max-autotune"] = "default"  # max-autotune times several kernels for each product
    graph: bool | None = None  # replay whole iterations as CUDA graphs
    cudnn_benchmark: bool = False  # let cuDNN time its convolutions and take the fastest
    fused_optimizer: bool = True  # update all weights as one vector; else layer by layer
    inference_mode: bool = False  # play under torch's inference mode instead of no_grad
    pin_memory: bool = True  # page-lock the host memory from which a GPU copies transitions
    threads: int | None = None  # CPU threads of torch in the training process; default: measured
    interop_threads: int | None = None  # CPU threads for operations that run beside each other; default: torch's
    oom: Literal["backoff", "stop"] = "backoff"  # out of memory: backoff (split batches, same gradient) or stop
    accumulate: int = 1  # batches per gradient step, for batches larger than memory
    time_limit: int = 0  # steps until an episode is truncated; 0: no limit
    run_dir: str | None = None  # folder of the run; default runs/ENV-ALGO
    resume: str = "auto"  # auto, must, never, or the path of a checkpoint
    deterministic: bool = False  # refuse operations whose result depends on the order of threads
    checkpoint_minutes: float = 1.0  # minutes between checkpoints
    fallback_dir: str | None = None  # folder for a last checkpoint when the run folder cannot be written any more
    grace: float = 20.0  # seconds after SIGTERM until the process ends without a checkpoint if the loop is stuck
    preemption_notice: str | None = None  # file or URL that appears before the machine is taken; treated as SIGTERM
    save_replay: bool = True  # store the replay memory in checkpoints
    eval_episodes: int = 256  # greedy episodes of an evaluation; 0: no evaluation
    eval_every: int = (
        0  # steps between evaluations in training, by which the best checkpoint is kept; 0: at the end only
    )
    log_seconds: float = 1.0  # seconds between log points, at which the host reads metrics from the device
    tensorboard: bool = False  # write TensorBoard files into the run folder
    wandb: bool = False  # log to Weights & Biases, with the account that `wandb login` has set up
    actors: int | None = None  # processes that step CPU environments; 0: step them in the training process
    inference: str = "auto"  # where actions are chosen: auto, actors (in each process) or central (for all at once)
    publish: int = 0  # updates between two copies of the weights to actors; 0: automatic
    ring_rows: int = 0  # steps of its environments that an actor may be ahead of the learner; 0: automatic
    staged_rows: int = 0  # steps of all environments moved from actors to the learner at once, at least; 0: automatic
    drop_oldest: bool = False  # overwrite steps that the learner has not read in time; otherwise actors wait
    rank_timeout: float = 600.0  # seconds that a rank waits for the others before it gives up (torchrun)
    backplay: float | None = None  # fraction of episodes that start shortly before the last loss; not counted in scores
    backplay_steps: int | None = None  # steps before the loss, up to twice as many; default: the recipe's, or 32
    curriculum: bool | None = (
        None  # change environment options as training progresses; default: if the recipe has phases
    )
    curriculum_file: str | None = None  # JSON file with phases: [{"name", "from", "to", "env": {option: value}}]
    env_options: dict[str, Any] = field(default_factory=dict)  # --env.*
    algo_options: dict[str, Any] = field(default_factory=dict)  # --dqn.* and so on

    def check(self) -> None:
        """Raise UserError for a value that is impossible for any environment and machine."""
        for name, least in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; expected at least {least}.")
        if self.seed >= MAX_SEED:
            raise UserError(
                f"seed is {self.seed}; expected 0 to {MAX_SEED - 1:,}: larger seeds are held out for evaluation."
            )
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} is {value}; expected a number above 0.")
        if self.eval_every and not self.eval_episodes:
            raise UserError(
                f"eval_every is {self.eval_every}, but eval_episodes is 0; give the games of an evaluation."
            )
        if self.ring_rows < 0 or 0 < self.ring_rows < _MIN_RING:
            raise UserError(f"ring_rows is {self.ring_rows}; expected at least {_MIN_RING}, or 0 for automatic.")
        if self.backplay is not None and not 0 <= self.backplay < 1:
            raise UserError(f"backplay is {self.backplay}; expected a number from 0 to below 1.")
        if self.time_limit < 0:
            raise UserError(f"time_limit is {self.time_limit}; expected 0 (none) or a number of steps.")
        if self.inference not in ("auto", "actors", "central"):
            raise UserError(f"inference is '{self.inference}'; expected auto, actors or central.")
        if self.resume not in ("auto", "must", "never") and not Path(self.resume).is_dir():
            raise UserError(f"resume is '{self.resume}'; expected auto, must, never or the folder of a checkpoint.")
        if self.curriculum_file is not None and self.curriculum is False:
            raise UserError("Both curriculum_file and no-curriculum are given; drop one of them.")


def from_words(env: str, words: dict[str, Any]) -> Settings:
    """Return Settings from option names and words, including `env.*` and the algorithm's options."""
    from redline import algos

    algo = words.get("algo", Settings.algo)
    algo = _algo_of(words) if algo == "auto" else algo
    if algo != "auto" and algos.registry.locate(algo) is None:
        algos.load(algo)  # an external module, or UserError
    plain, groups = split_groups(words, algo)
    plain = {"env": env} | plain | ({} if algo == "auto" else {"algo": algo})
    for name in ("env_options", "algo_options"):
        if name in plain:
            raise UserError(f"There is no option {name}; use --env.NAME or --ALGO.NAME.")
    return options.build(
        Settings, plain, "", {"env_options": groups["env"], "algo_options": groups[algos.group_of(algo)]}
    )


def _algo_of(words: Mapping[str, Any]) -> str:
    """Return the algorithm whose options are given, or "auto"."""
    from redline import algos

    given = [name for name in algos.names() if any(word.startswith(f"{name}.") for word in words)]
    if len(given) > 1:
        raise UserError(f"Options of {' and '.join(given)} are given; choose one algorithm: --algo {given[0]}.")
    return given[0] if given else "auto"


def split_groups(words: Mapping[str, Any], algo: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the options without a group, and the options of each group (`env` and the algorithm), by name without prefix."""
    from redline import algos

    plain: dict[str, Any] = {}
    own = algos.group_of(algo)
    groups: dict[str, dict[str, Any]] = {"env": {}, own: {}}
    for name, word in words.items():
        group, dot, option = name.partition(".")
        if not dot:
            plain[name] = word
        elif group in groups:
            groups[group][option] = word
        elif algo == "auto":
            known = ", ".join(f"{name}.*" for name in algos.names())
            raise UserError(
                f"There is no option group {group}.*; there are env.* and those of the algorithms: {known}."
            )
        else:
            raise UserError(f"There is no option group {group}.*; with --algo {algo} there are env.* and {own}.*.")
    return plain, groups
