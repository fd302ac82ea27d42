"""Evaluation every `eval_every` steps of training: the same held-out games each time, so that scores can be compared.

It decides which checkpoint is the best. It depends only on the weights, not on the clock, and does not affect training, so a
repeated or resumed run gets the same scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redline.engine.out_of_memory import free_caches, is_out_of_memory
from redline.run import final_evaluation
from redline.run.evaluate import evaluate
from redline.run.plan import Plan
from redline.run.progress import Progress
from redline.run.session import Session

_RECORDED = {  # metric -> field of the evaluation
    "eval_score": "score_mean",
    "eval_score_low": "score_low",
    "eval_score_high": "score_high",
    "eval_length": "length_mean",
    "eval_win_rate": "win_rate",
}
_OF_LEVEL = {"score": "score_mean", "win_rate": "win_rate"}


class _Interrupted(Exception):
    pass


class PeriodicEvaluation:
    """Play the run's `eval_episodes` with the greedy policy every `eval_every` steps."""

    def __init__(self, plan: Plan, session: Session, progress: Progress, evaluated_at: int) -> None:
        """Continue a run whose last evaluation was at step `evaluated_at`; 0: it had none."""
        self.plan, self.session, self.progress = plan, session, progress
        self.every, self.evaluated_at = plan.settings.eval_every, evaluated_at
        self.score: float | None = None  # of the weights at step `evaluated_at`

    @property
    def due(self) -> bool:
        return bool(self.every) and self.session.env_steps // self.every > self.evaluated_at // self.every

    def iterations(self, count: int) -> int:
        """Return `count` iterations, or fewer to stop at the next evaluation."""
        if not self.every:
            return count
        missing = self.every - self.session.env_steps % self.every
        return min(count, -(-missing // self.session.steps_per_iteration))

    def run(self, interrupted: Callable[[], Any]) -> dict[str, Any]:
        """Evaluate; return a log record: empty if `interrupted()` became true, without a score if memory ran out."""
        plan, steps, episodes = self.plan, self.session.env_steps, self.plan.settings.eval_episodes

        def show(done: int) -> None:
            if interrupted():
                raise _Interrupted
            self.progress.count(done, episodes, "games")

        self.progress.start_activity("Evaluating")
        try:
            result = evaluate(
                plan.rules,
                final_evaluation.greedy_policy(plan, self.session),
                episodes,
                plan.device,
                progress=show,
                slot_steps=final_evaluation.max_steps(plan.rules.game.spec(plan.rules.config)),
                graph=plan.graph,
                notify=self.progress.say,
            ).summary()
        except _Interrupted:  # the resumed run repeats it
            return {}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            result = {}
        finally:
            self.progress.start_activity("Training")
        if not result:
            free_caches()
            self.progress.say(f"{plan.device} ran out of memory in the evaluation at step {steps:,}; training goes on.")
            return {"env_steps": steps}
        self.progress.say(
            f"Evaluation at step {steps:,}: score {result['score_mean']:.2f} ± {result['score_ci95']:.2f}."
        )
        record = {"env_steps": steps} | {name: result[field] for name, field in _RECORDED.items()}
        for level, figures in result.get("levels", {}).items():
            record |= {f"level/{level}/eval_{name}": figures[field] for name, field in _OF_LEVEL.items()}
        return record

    def accept(self, record: Mapping[str, Any]) -> None:
        """Record a completed evaluation; called on every rank."""
        self.evaluated_at, self.score = record["env_steps"], record.get("eval_score")
