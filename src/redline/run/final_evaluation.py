"""The evaluation at the end of training: the greedy policy on held-out seeds."""

from __future__ import annotations

from typing import Any

from redline.core.records import Spec
from redline.run.evaluate import Policy, evaluate, greedy
from redline.run.plan import Plan
from redline.run.progress import Progress
from redline.run.session import Session

_MAX_STEPS = 4_000  # of a slot, in a game without an end: an agent that never loses must not play forever
_MAX_STEPS_TO_WIN = 40_000  # of a slot, in a game that can be won: filling a 20x20 board in Snake takes 9,000
_MUCH = 0.25  # difference between sampled and greedy score that triggers a hint, as a fraction of the larger one


def max_steps(spec: Spec) -> int:
    """Return the largest number of steps of a slot in an evaluation during or after training."""
    return _MAX_STEPS_TO_WIN if spec.winnable else _MAX_STEPS


def evaluate_session(plan: Plan, session: Session, progress: Progress) -> dict[str, Any]:
    """Close the session's environments, play the run's `eval_episodes` and return the fields of the result."""
    episodes, spec = plan.settings.eval_episodes, plan.rules.game.spec(plan.rules.config)
    limit = max_steps(spec)
    progress.say(
        f"Evaluating: {episodes} greedy games on held-out seeds, at most {limit:,} steps each; Ctrl-C skips it."
    )
    progress.start_activity("Evaluating")
    session.stop_playing()  # free the cores for the evaluation
    summary = evaluate(
        plan.rules,
        greedy_policy(plan, session),
        episodes,
        plan.device,
        progress=lambda done: progress.count(done, episodes, "games"),
        slot_steps=limit,
        compile=plan.compile,
        graph=plan.graph,
        notify=progress.say,
    ).summary()
    fields = {f"eval_{k}" if k in ("episodes", "stopped_by") else k: value for k, value in summary.items()}
    return fields | {"eval_max_steps": limit, "winnable": spec.winnable}


def greedy_policy(plan: Plan, session: Session) -> Policy:
    """Return the policy as `redline eval` will load it: in float32, whatever precision training used."""
    spec = plan.rules.game.spec(plan.rules.config)
    model = session.learner.trained_state()["model"]
    return greedy(plan.algo.policy_network(spec, plan.algo_config, model).to(plan.device), plan.device)


def sampling_hint(plan: Plan, result: dict[str, Any], training_score: float | None) -> str:
    """Return a hint about --sample if the greedy policy scores far below the sampled policy at the end of training, or "".

    training_score: mean score of the last log point that had one. It is comparable: a curriculum's last phase uses the run's
    own options, and with backplay only whole games are counted. An evaluation that stopped games early is not comparable.
    """
    if training_score is None or not plan.algo.STOCHASTIC or "score_mean" not in result:
        return ""
    if result.get("eval_stopped_by") == "max_steps":
        return ""
    lost = training_score - result["score_mean"]
    if lost <= max(_MUCH * max(abs(training_score), abs(result["score_mean"])), 2 * result["score_ci95"]):
        return ""
    return (
        f"Sampled actions scored {training_score:.2f} at the end of training, the greedy ones {result['score_mean']:.2f}: "
        f"compare with redline eval {plan.run_dir} --sample."
    )
