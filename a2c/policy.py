"""Networks with and without a memory behind the same two calls: one decision, and a rollout again.

A memory `[N, M]` is what a recurrent network carries from one decision to the next, a row per
environment; M is 0 for a network without one. It is emptied where an episode starts, in these
two functions alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def initial_state(net: nn.Module, rows: int, device: str | torch.device = "cpu") -> Tensor:
    """The memory `[rows, M]` in which every episode starts: zeros."""
    return torch.zeros(rows, getattr(net, "rnn_state_size", 0), device=device)


def step(net: nn.Module, obs: Tensor, rnn_state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One decision: `(logits [B, A], values [B, 1], memory [B, M])` of `obs [B, ...]`.

    `starts [B]`: obs begins an episode, so what came before is forgotten.
    """
    if rnn_state.shape[1] == 0:
        return *net(obs), rnn_state
    logits, values, rnn_state = net.step(obs, rnn_state * ~starts[:, None])  # type: ignore[operator]
    return logits, values, rnn_state.float()


def replay(net: nn.Module, obs: Tensor, starts: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
    """The decisions of a rollout again, with gradients: `(logits [T * N, A], values [T * N, 1])`.

    `obs [T, N, ...]`, `starts [T, N]`, and the `memory [N, M]` that was carried into obs[0].
    """
    if rnn_state.shape[1] == 0:
        logits, values = net(obs.flatten(0, 1))
    else:
        logits, values = net.replay(obs, starts, rnn_state)  # type: ignore[operator]
    return logits, values


def sample(logits: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw `actions [B]` from `logits [B, A]`, with their log-probabilities `[B]`."""
    log_probs = torch.log_softmax(logits, dim=1)
    actions = torch.multinomial(log_probs.exp(), 1, generator=generator)  # [B, 1]
    return actions.squeeze(1), log_probs.gather(1, actions).squeeze(1)
