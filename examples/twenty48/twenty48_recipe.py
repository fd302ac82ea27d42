"""Recipe for 2048: the settings that learn fastest on a few CPU cores."""

from __future__ import annotations

from redline.recipes.recipe import Request, Setting


def settings(request: Request) -> dict[str, Setting]:
    """Return the settings of PPO."""
    if request.algo != "ppo":
        return {}
    return {
        "hidden": Setting((64, 64), "the features carry most of the information; each move evaluates four boards"),
        "gamma": Setting(0.99, "merges pay off within a hundred moves"),
        "learning_rate": Setting(1e-3, "few updates fit into two minutes"),
    }
