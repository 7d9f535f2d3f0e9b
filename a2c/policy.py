"""The policy: a network that acts, and what it carries from one decision to the next.

An `rnn_state [N, H]` is what a recurrent network carries, a row per environment; H is 0 for any other network.
It is set to zero where an episode starts: by `step` here, and by the network's own `replay`.

`replay` evaluates the decisions of a rollout again, with gradients. A `Replay` (`a2c.compute.graphs`) is something
else: a function that is called again over the same memory, on a GPU as a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from a2c.compute.graphs import Replay, make_replay
from a2c.config.config import Config

UNREWARDED = 200  # decisions without a reward that lower the count of rewards by 1: see `count_rewards`


class Decision(NamedTuple):
    """What a policy decided for `N` environments."""

    actions: Tensor  # [N] int64
    log_probs: Tensor  # [N] float32, log-probability of each action
    values: Tensor  # [N] float32, V(obs)


class Policy:
    """Acts for `num_envs` environments: samples from the network's distribution, or takes its mode (`greedy`)."""

    def __init__(
        self, net: nn.Module, num_envs: int, device: str | torch.device, seed: int = 0, greedy: bool = False
    ) -> None:
        self.net, self.greedy = net, greedy
        self.generator = torch.Generator(device).manual_seed(seed)
        self.rnn_state = initial_state(net, num_envs, device)
        self.captured: Replay | None = None
        self.noise_scale = 0.0
        self.noise: Tensor | None = None  # [N, A]; the first decision that has noise says how many actions there are

    def capture(self, obs: Tensor) -> None:
        """Capture the decision on observations like `obs [N, ...]`: all later ones replay it, each overwriting the
        results of the one before (see `a2c.compute.graphs`). For networks without an rnn_state.
        """
        starts = torch.zeros(len(obs), dtype=torch.bool, device=obs.device)  # which no such network reads
        with torch.no_grad():
            self.noise = torch.zeros_like(step(self.net, obs, self.rnn_state, starts)[0], dtype=torch.float32)
        self.captured = make_replay(lambda obs: self._decide(obs, starts), [obs], obs.device, generator=self.generator)

    def perturb(self, scale: float) -> None:
        """Let each environment have a policy of its own until the next call, with normal noise added to its logits.

        `scale` is the standard deviation (nats; 0 = no noise). The noise is a number per environment and action, as
        if the biases of the last layer were perturbed: see Plappert et al. (2018), "Parameter space noise for
        exploration", and Fortunato et al. (2018), "Noisy networks for exploration".
        """
        self.noise_scale = scale
        if self.noise is not None:
            self._draw_noise(self.noise)

    def begin(self, num_envs: int) -> None:
        """Begin new episodes in `num_envs` environments."""
        self.rnn_state = initial_state(self.net, num_envs, self.rnn_state.device)

    @property
    def recurrent(self) -> bool:
        """Whether the network carries an rnn_state, which `starts` sets to zero."""
        return self.rnn_state.shape[1] > 0

    def act(self, obs: Tensor, starts: Tensor) -> Decision:
        """Decide for `obs [N, ...]`; `starts [N]`: the observation begins an episode.

        Raises FloatingPointError if the logits are NaN or plus infinity (minus infinity masks an action).
        """
        decision = self.decide(obs, starts)
        check_finite(decision.log_probs)
        return decision

    def decide(self, obs: Tensor, starts: Tensor) -> Decision:
        """`act` without its check, which would wait for a GPU: the caller calls `check_finite`, once for a rollout."""
        return self._decide(obs, starts) if self.captured is None else Decision(*self.captured(obs))

    @torch.no_grad()
    def _decide(self, obs: Tensor, starts: Tensor) -> Decision:
        logits, values, self.rnn_state = step(self.net, obs, self.rnn_state, starts)
        if self.noise is None and self.noise_scale > 0:
            self.noise = self._draw_noise(torch.empty(logits.shape, device=logits.device))
        if self.noise is not None:
            logits = logits + self.noise
        log_probs = torch.log_softmax(logits.float(), dim=1)  # [N, A]
        # Greedy by the logits: log_softmax rounds, and of equal entries argmax takes the first.
        actions = logits.argmax(dim=1, keepdim=True) if self.greedy else self._sample(log_probs)  # [N, 1]
        return Decision(actions.squeeze(1), log_probs.gather(1, actions).squeeze(1), values.float().squeeze(1))

    def _draw_noise(self, noise: Tensor) -> Tensor:
        """Fill `noise [N, A]` with what `perturb` asked for."""
        return noise.normal_(0.0, self.noise_scale, generator=self.generator) if self.noise_scale > 0 else noise.zero_()

    def _sample(self, log_probs: Tensor) -> Tensor:
        """Actions `[N, 1]` with probabilities `exp(log_probs [N, A])`.

        With E[a] from an exponential distribution of rate 1, independent for each action, argmax_k probs[k] / E[k] is
        action a with probability probs[a]. `torch.multinomial` samples in the same way, but it also checks the
        probabilities, for which it waits for a GPU.
        """
        probs = log_probs.exp()
        exponential = torch.empty_like(probs).exponential_(1.0, generator=self.generator)
        return (probs / exponential).argmax(dim=1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        """What the next decision depends on besides the network; the tensors are references, not copies."""
        return {"rnn_state": self.rnn_state, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], new_episodes: bool = False) -> None:
        """Restore what `state_dict` returned; `new_episodes`: without its rnn_state.

        ValueError if the rnn_state is of another number of environments or another network.
        """
        self.generator.set_state(state["generator"])
        if new_episodes:
            return
        saved = state["rnn_state"]
        if (saved.shape, saved.dtype) != (self.rnn_state.shape, self.rnn_state.dtype):
            raise ValueError(f"rnn_state must be float32 {list(self.rnn_state.shape)}, got {list(saved.shape)}")
        self.rnn_state = saved.to(self.rnn_state.device)


def initial_state(net: nn.Module, num_envs: int, device: str | torch.device = "cpu") -> Tensor:
    """The rnn_state `[num_envs, H]` in which every episode starts: zeros."""
    return torch.zeros(num_envs, getattr(net, "rnn_state_size", 0), device=device)


def step(net: nn.Module, obs: Tensor, rnn_state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One decision: `(logits [B, A], values [B, 1], rnn_state [B, H])` of `obs [B, ...]`; `starts [B]` as in `act`."""
    if rnn_state.shape[1] == 0:
        return *net(obs), rnn_state
    logits, values, rnn_state = net.step(obs, rnn_state * ~starts[:, None])  # type: ignore[operator]
    return logits, values, rnn_state.float()


def replay(net: nn.Module, obs: Tensor, starts: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
    """The decisions of a rollout again, with gradients: `(logits [T, N, A], values [T, N])`.

    `obs [T, N, ...]`, `starts [T, N]`, and the `rnn_state [N, H]` that was carried into obs[0].
    """
    if rnn_state.shape[1] == 0:
        logits, values = net(obs.flatten(0, 1))
    else:
        logits, values = net.replay(obs, starts, rnn_state)  # type: ignore[operator]
    return logits.unflatten(0, starts.shape), values.view(starts.shape)


def exploration_noise(config: Config, reward_count: float) -> float:
    """The scale of `Policy.perturb`: falls linearly to 0 as `reward_count` rises to `exploration_rewards`."""
    return config.exploration_noise * min(max(1.0 - reward_count / config.exploration_rewards, 0.0), 1.0)


def count_rewards(config: Config, reward_count: float, rewards: int, unrewarded: int) -> float:
    """`reward_count` after a rollout, `rewards` decisions of which had a reward other than 0.

    It grows by `rewards`, up to `exploration_rewards`. Without any it falls by 1 for every `UNREWARDED` of the last
    `unrewarded` decisions, down to 0: the noise returns where the policy finds no rewards any more.
    """
    reward_count += rewards if rewards else -unrewarded / UNREWARDED
    return min(max(reward_count, 0.0), float(config.exploration_rewards))


def check_finite(log_probs: Tensor) -> None:
    """FloatingPointError if log-probabilities of chosen actions are NaN: one NaN or plus infinite logit suffices."""
    if log_probs.isnan().any():
        raise FloatingPointError(
            "the policy's logits are NaN or infinite: an observation or a parameter is NaN, infinite or too large"
        )
