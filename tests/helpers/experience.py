"""Rollouts of random experience and the n-step transitions in them, worked out one by one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from a2c.rollout import Rollout
from a2c.transitions import Experience

GAMMA = 0.9
FLAGS = ("terminated", "truncated")


class Toy(nn.Module):
    """V(s) is a learned weighted sum of four bytes."""

    def __init__(self, weights: tuple[float, ...] = (0.5, -0.25, 0.125, 1.0)) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        values = (obs.float() * self.weights).sum(1, keepdim=True)
        return values.expand(-1, 3), values


def blank(steps: int, envs: int, features: int = 4) -> Rollout:
    """A rollout of zeros in which no episode ends."""
    return Rollout.empty(steps, torch.zeros(envs, features, dtype=torch.uint8))


def random_rollout(steps: int, envs: int, seed: int, rate: float = 0.25) -> Rollout:
    """What a collector would hand over; the first three bytes of an observation name it."""
    draw = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (steps + 1, envs, 4), generator=draw, dtype=torch.uint8)
    frames[..., 0], frames[..., 1], frames[..., 2] = torch.arange(steps + 1)[:, None], torch.arange(envs), 0
    rollout = blank(steps, envs)
    rollout.obs, rollout.next_obs = frames[:-1], frames[-1]
    rollout.actions = torch.randint(0, 3, (steps, envs), generator=draw)
    rollout.rewards = torch.randn(steps, envs, generator=draw) * 2
    rollout.terminated, rollout.truncated = (torch.rand(steps, envs, generator=draw) < rate for _ in FLAGS)
    rollout.final_index = (rollout.truncated & ~rollout.terminated).nonzero()
    rollout.final_obs = torch.randint(0, 256, (len(rollout.final_index), 4), generator=draw, dtype=torch.uint8)
    rollout.final_rnn_state = torch.zeros(len(rollout.final_index), 0)
    rollout.values = Toy()(rollout.obs.flatten(0, 1))[1].detach().reshape(steps, envs)
    return rollout


def window(rollout: Rollout, t: int, n: int, steps: int) -> Experience | None:
    """The transition of at most `steps` decisions that begins at (t, n); None where the rollout ends too early."""
    finals = dict(zip(map(tuple, rollout.final_index.tolist()), rollout.final_obs, strict=True))
    reward, action = 0.0, int(rollout.actions[t, n])
    for i in range(steps):
        k = t + i
        if k == len(rollout.actions):
            return None
        reward += GAMMA**i * float(rollout.rewards[k, n])
        if rollout.terminated[k, n]:
            return Experience(rollout.obs[t, n].numpy(), action, reward, None, i + 1)
        if rollout.truncated[k, n]:
            return Experience(rollout.obs[t, n].numpy(), action, reward, finals[k, n].numpy(), i + 1)
    last = rollout.next_obs[n] if t + steps == len(rollout.actions) else rollout.obs[t + steps, n]
    return Experience(rollout.obs[t, n].numpy(), action, reward, last.numpy(), steps)


def time_slice(rollout: Rollout, low: int, high: int) -> Rollout:
    """The decisions `low <= t < high`, in memory that the next rollout may overwrite."""
    names = ("obs", "actions", "rewards", *FLAGS, "starts", "values", "log_probs")
    next_obs = rollout.next_obs if high == len(rollout.actions) else rollout.obs[high]
    mine = (rollout.final_index[:, 0] >= low) & (rollout.final_index[:, 0] < high)
    return Rollout(
        *(getattr(rollout, name)[low:high].clone() for name in names),
        rnn_state=rollout.rnn_state,
        policy_version=rollout.policy_version,
        next_obs=next_obs.clone(),
        next_rnn_state=rollout.next_rnn_state,
        final_index=rollout.final_index[mine] - torch.tensor([low, 0]),
        final_obs=rollout.final_obs[mine],
        final_rnn_state=rollout.final_rnn_state[mine],
    )
