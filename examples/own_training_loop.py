"""A custom training loop on `redline.make`: one-step Q-learning over thousands of Snake games at once.

    python examples/own_training_loop.py --device cuda --num-envs 4096 --steps 5000 --profile profile.md

Everything stays on one device: observations, actions and rewards are tensors, and nothing waits for the host between
two log lines. There is no replay memory: with many games in parallel, one step is a batch. --profile writes a report on
where the time goes.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import redline

GAMMA = 0.98


def q_network(env: redline.Env) -> nn.Module:
    """Return a network from observations (N, planes, H, W) to action values (N, A)."""
    planes, height, width = env.spec.obs_shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(planes * height * width, 256),
        nn.LayerNorm(256),
        nn.ReLU(),
        nn.Linear(256, env.spec.num_actions),
    )


def scaled(env: redline.Env, obs: torch.Tensor) -> torch.Tensor:
    """Return observations as float32, scaled to about 1: `obs_scale` has a factor for each plane."""
    return obs.float() * torch.tensor(env.spec.obs_scale, device=obs.device).view(-1, 1, 1)


def train(num_envs: int, steps: int, device: str, seed: int = 0, profile: str | None = None) -> tuple[float, float]:
    """Train for `steps` steps of all games; return the mean scores of the first and the last tenth of training.

    profile: file for a report on the time that each part of a step takes.
    """
    torch.manual_seed(seed)
    env = redline.make("snake", num_envs, device, seed, width=6, height=6)
    net = q_network(env).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scores = torch.zeros(10, device=device)  # sums over the episodes that ended in each tenth of training
    episodes = torch.zeros(10, device=device)

    profiler = redline.Profiler(device, env_workers=0)  # the games are tensors
    obs = scaled(env, env.reset())
    for step in range(steps):
        with profiler.step(batch_size=num_envs):
            epsilon = max(0.05, 1 - 2 * step / steps)
            with profiler.span("inference"):
                values = net(obs)
                random_action = torch.randint(env.spec.num_actions, (num_envs,), device=device)
                explore = torch.rand(num_envs, device=device) < epsilon
                action = torch.where(explore, random_action, values.argmax(1))
            with profiler.span("environment"):
                result = env.step(action)
                obs = scaled(env, result.obs)
            with profiler.span("forward"):
                # A truncated episode could have continued: bootstrap from its final observation. After a terminated one,
                # the value is 0.
                with torch.no_grad():
                    next_value = net(scaled(env, result.final_obs)).max(1).values
                target = result.reward + GAMMA * next_value * ~result.terminated
                loss = F.smooth_l1_loss(values.gather(1, action.unsqueeze(1)).squeeze(1), target)
            with profiler.span("backward"):
                optimizer.zero_grad()
                loss.backward()
            with profiler.span("optimizer"):
                optimizer.step()

        ended, tenth = result.terminated | result.truncated, 10 * step // steps
        scores[tenth] += (result.episode.score * ended).sum()
        episodes[tenth] += ended.sum()
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1}: {scores[tenth] / episodes[tenth].clamp(min=1):.2f} foods per game")
    if profile is not None:
        print(profiler.report(profile)["bottleneck"])
    means = (scores / episodes.clamp(min=1)).tolist()
    return means[0], means[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profile", help="Markdown file for a report of where the time goes")
    arguments = parser.parse_args()
    train(arguments.num_envs, arguments.steps, arguments.device, profile=arguments.profile)
