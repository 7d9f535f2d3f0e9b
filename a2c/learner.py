"""The learner: a network, its optimiser, and the count of what they have learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.compute.optimizer import load_optimizer, make_optimizer, set_learning_rate
from a2c.compute.replica import copy_buffers, make_replica, sync_replica, with_own_statistics
from a2c.compute.staging import to_device
from a2c.config.config import Config
from a2c.custom_network import check_network
from a2c.envs.single import Spaces
from a2c.networks import NetworkFn, make_network
from a2c.normalizers import FrameNorm, PixelNorm
from a2c.policy import count_rewards, exploration_noise
from a2c.rollout import Rollout, split_edges
from a2c.update import Minibatch, Terms, check_steps, clipped_step, compute_gradients, describe_update, sum_gradients

StepResult = tuple[Terms, Tensor]  # what an optimiser step computed: terms, and the gradient's norm before clipping
StepFunction = Callable[[Minibatch, int, bool, float], StepResult]
NORMALIZER_STRIDE = 4  # every fourth step of a rollout feeds the pixel statistics: frames in between look alike


class Shared(NamedTuple):
    """What learners in several processes share, in shared memory."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    statistics: PixelNorm | FrameNorm | None  # what this learner's observations feed; `sync` merges those of all
    decisions: int  # of a rollout of all of them


class Learner:
    """Turns rollouts into a better policy.

    `net` holds the float32 parameters; `replica`, `net` itself or a copy of it, computes actions and gradients.
    `env_steps` counts the decisions that were learned from, `updates` the optimiser steps; `reward_count`, with
    exploration noise only (see `count_rewards`), was last updated after `counted_at` decisions.
    """

    def __init__(
        self,
        config: Config,
        spaces: Spaces,
        compute: Compute,
        shared: Shared | None = None,
        network: NetworkFn | None = None,
    ) -> None:
        """`shared`: what other processes learn with, too; without it, a new network and optimiser.
        `network`: makes a custom network; ValueError if it cannot be used.
        """
        self.config, self.compute = config, compute
        if shared is None:
            with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it was
                torch.default_generator.manual_seed(config.seed)
                net = make_network(config, spaces.obs_shape, spaces.n_actions, spaces.stacked, network)
                if network:
                    check_network(net, spaces, compute)  # its first call may draw parameters of lazy layers
            self.net = net.to(compute.device)
            compute.ranks.broadcast(map(torch.detach, (*self.net.parameters(), *self.net.buffers())))
            self.optimizer = make_optimizer(self.net, config, compute.cuda_graphs)
        else:
            self.optimizer = shared.optimizer  # merged statistics are each learner's own
            self.net = with_own_statistics(shared.net) if shared.statistics else shared.net
        normalizer = getattr(self.net, "normalizer", None)  # which may be anything in a custom network
        self.normalizer = normalizer if isinstance(normalizer, PixelNorm | FrameNorm) else None
        self.statistics = self.normalizer if shared is None else shared.statistics  # what `update_normalizer` feeds
        self.replica = make_replica(self.net, compute, always_copy=shared is not None)
        self.env_steps, self.updates, self.counted_at, self.reward_count = 0, 0, 0, 0.0
        self.rollout_decisions = shared.decisions if shared else config.num_envs * config.rollout_steps
        self.entropy_coef = config.entropy_coef  # of the last rollout
        self.policy_lag = 0.0  # updates between acting and learning, mean over the last rollout
        self.last_update: StepResult | None = None
        self.step: StepFunction = self.take_step
        self.last_metrics: dict[str, float] = {}  # of the update described last, here or elsewhere

    @property
    def noise(self) -> float:
        """Scale of the exploration noise in the rollout that is collected and learned from next (`Policy.perturb`)."""
        return exploration_noise(self.config, self.reward_count)

    def learn(
        self,
        rollout: Rollout,
        minibatches: Sequence[Minibatch] | None = None,
        count: Callable[[], int] | None = None,
        num_minibatches: int | None = None,
    ) -> None:
        """Take one optimiser step on each minibatch, then update the pixel statistics.

        `minibatches`: by default `num_minibatches` of the rollout in each of `config.epochs`, as `config.shuffle` says.
        `count`, called after each step, returns the number of updates so far; without it, each step adds one. Raises
        ValueError for a rollout on a CPU that `Rollout.check` refuses, and FloatingPointError if a loss, the
        gradient's norm or a parameter is NaN or infinite: after a bad parameter the network is unusable.
        """
        if rollout.terminated.device.type == "cpu":  # on a GPU: checked before the flags were copied there
            rollout.check()
        set_learning_rate(self.optimizer, learning_rate(self.config, self.env_steps))
        self.entropy_coef = entropy_coef(self.config, self.env_steps)
        done: list[StepResult] = []
        version, lags = float(rollout.policy_version.mean()), []
        if minibatches is None:
            dealt = self._minibatches(rollout, num_minibatches)
        else:
            dealt = ((minibatch, len(minibatch)) for minibatch in minibatches)
        for minibatch, size in dealt:
            lags.append(self.updates - version)
            off_policy = lags[-1] > 0 or self.noise > 0
            done.append(self.step(minibatch, size, off_policy, self.entropy_coef))
            self.updates = count() if count else self.updates + 1
        check_steps(done, self.net, self.updates)
        self.policy_lag = sum(lags) / max(1, len(lags))
        self.last_update = done[-1] if done else self.last_update
        self.update_normalizer(rollout.obs[::NORMALIZER_STRIDE])
        if self.config.network == "custom":  # forward passes may have changed buffers
            self.compute.ranks.broadcast(self.net.buffers())
            self.sync()
        self.env_steps += self._decisions(rollout)
        if self.config.exploration_noise > 0:
            rewards = int(self.compute.ranks.all_reduce(rollout.rewards.count_nonzero()))
            unrewarded = self.env_steps - self.counted_at
            if rewards or unrewarded >= self.rollout_decisions:  # a3c and ga3c also learn from parts of a rollout
                self.reward_count = count_rewards(self.config, self.reward_count, rewards, unrewarded)
                self.counted_at = self.env_steps

    def _decisions(self, rollout: Rollout) -> int:
        """Decisions of the whole rollout, of which this rank may have a part."""
        return len(rollout) if self.compute.ranks.size == 1 else len(rollout.obs) * self.config.num_envs

    def _minibatches(self, rollout: Rollout, number: int | None) -> Iterator[tuple[Minibatch, int]]:
        """The whole rollout in each epoch: its decisions in random order, or the windows of its environments.

        All ranks draw the same order. Yields up to `number` pairs per epoch: this rank's part, the whole one's size.
        """
        config, ranks, steps = self.config, self.compute.ranks, len(rollout.obs)
        number, num_envs = number or config.num_minibatches, self._decisions(rollout) // steps
        for epoch in range(config.epochs):
            if rollout.rnn_state.shape[1] > 0 or not config.shuffle:
                for low, high in pairwise(split_edges(num_envs, number)):
                    yield rollout.slice_envs(*ranks.columns(low, high)), steps * (high - low)
            else:
                if epoch:  # the network has changed; cut by minibatches, the parts do not depend on the threads
                    rollout = rollout.valued_by(self.replica, number, self.compute.map)
                # Seeded anew in each epoch: a resumed run has the same order without saving a generator.
                decisions = np.random.default_rng((config.seed, self.updates)).permutation(steps * num_envs)
                parts = np.array_split(decisions, min(number, len(decisions)))
                own = [ranks.own(part, num_envs) for part in parts]
                order = torch.from_numpy(np.concatenate(own))
                indices = torch.split(to_device(order, rollout.obs.device), [len(part) for part in own])
                dealt = rollout.shuffled(self.replica, indices, config.gamma, config.gae_lambda, config.reward_clip)
                yield from zip(dealt, map(len, parts), strict=True)

    def take_step(self, minibatch: Minibatch, size: int, off_policy: bool, entropy_coef: float | Tensor) -> StepResult:
        """One optimiser step on `minibatch`, this rank's part of `size` samples; the terms are over all of them."""
        config, compute = self.config, self.compute
        gradients, terms = compute_gradients(self.replica, minibatch, config, compute, off_policy, entropy_coef)
        terms = sum_gradients(self.net, gradients, terms, compute.ranks, share=len(minibatch) / size)
        norm = clipped_step(self.net, self.optimizer, config.max_grad_norm)
        if config.network == "custom":
            copy_buffers(self.net, self.replica)
        self.sync()
        return terms, norm

    def replace_step(self, step: StepFunction) -> None:
        """Use `step`, which has the signature of `take_step`, for all later steps."""
        self.step = step

    def update_normalizer(self, obs: Tensor) -> None:
        """Feed `obs [T, N, stack, H, W]` to the normaliser, if there is one: the last frame where they are stacked."""
        if (norm := self.statistics) is not None:
            frames = (obs[:, :, -1] if norm.stacked else obs).flatten(0, 1)
            norm.update(frames, self.compute.ranks, steps=len(obs))

    def sync(self, statistics: Sequence[PixelNorm | FrameNorm] = ()) -> None:
        """Copy the current parameters into the replica; `statistics`: of the pixels, of all learners, to be merged."""
        if self.normalizer is not None and statistics:
            self.normalizer.merge(statistics)
        if self.replica is not self.net:
            sync_replica(self.replica, self.net)

    def set_counts(self, env_steps: int, updates: int, reward_count: float, counted_at: int | None = None) -> None:
        """Set the counts to those of all learners of the run together; `counted_at` None: to `env_steps`."""
        self.env_steps, self.updates, self.reward_count = env_steps, updates, reward_count
        self.counted_at = env_steps if counted_at is None else counted_at

    def add_remote(self, env_steps: int, updates: int, reward_count: float, metrics: dict[str, float]) -> None:
        """Count what a learner of another process has done; `metrics`: of its last update, empty if it sent none."""
        self.set_counts(self.env_steps + env_steps, self.updates + updates, self.reward_count + reward_count)
        self.last_metrics = metrics or self.last_metrics

    def metrics(self) -> dict[str, float]:
        """Counts, schedules, and the terms of the last update (of an earlier session where this one has none)."""
        schedules = {"learning_rate": learning_rate(self.config, self.env_steps), "exploration_noise": self.noise}
        return {"env_steps": self.env_steps, "updates": self.updates, **schedules, **self.update_metrics()}

    def update_metrics(self) -> dict[str, float]:
        """Terms of the last update, empty before the first (host copies: call it once per logged row)."""
        if self.last_update is not None:
            terms = describe_update(*self.last_update, self.net, self.config.max_grad_norm, self.entropy_coef)
            self.last_metrics = {**terms, "policy_lag": self.policy_lag}
        return self.last_metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `learn` depends on; tensors are references, not copies."""
        return {
            "network": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "rewards": max(0.0, self.reward_count),  # a3c's workers may both lower it, below 0
            "metrics": self.update_metrics(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.net.load_state_dict(state["network"])
        self.sync()
        load_optimizer(self.optimizer, state["optimizer"])
        rewards = float(state.get("rewards", 0.0))  # absent from checkpoints of release 0.4.0
        self.set_counts(int(state["env_steps"]), int(state["updates"]), rewards)
        self.last_update, self.last_metrics = None, {name: float(value) for name, value in state["metrics"].items()}


def learning_rate(config: Config, env_steps: int) -> float:
    """The learning rate after `env_steps` decisions: linear to the share `lr_final`, then constant."""
    return config.learning_rate * _fallen_to(config.lr_final, _progress(config, env_steps))


def entropy_coef(config: Config, env_steps: int) -> float:
    """The weight of the entropy bonus after `env_steps` decisions: held, linear to `entropy_final`, then constant."""
    hold, progress = config.entropy_hold, _progress(config, env_steps)
    return config.entropy_coef * _fallen_to(config.entropy_final, max(0.0, progress - hold) / max(1.0 - hold, 1e-9))


def _progress(config: Config, env_steps: int) -> float:
    """The part of the schedules that is over, 0 to 1."""
    return min(1.0, env_steps / (config.schedule_end * config.total_env_steps))


def _fallen_to(final: float, progress: float) -> float:
    """1 at the beginning, `final` at the end; exactly 1 throughout where `final` is 1."""
    return 1.0 - progress + final * progress if final < 1.0 else 1.0
