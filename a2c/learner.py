"""What learns: a network, its optimiser, and the account of what they have seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from a2c.batch import SlidingWindows
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica, sync_replica
from a2c.config.config import Config
from a2c.networks import make_network
from a2c.normalizers import FrameNorm, PixelNorm
from a2c.rollout import Rollout
from a2c.update import Batch, Update, learn, learning_rate, load_optimizer, make_optimizer

NORMALIZER_STRIDE = 4  # every fourth step of a rollout feeds the pixel statistics: frames in between look alike


class Learner:
    """Turns rollouts into a better policy.

    `net` holds the parameters; `twin`, its working copy, acts and learns (see
    `Compute.working_copy`). `env_steps` and `updates` count what was learned from.
    """

    def __init__(
        self,
        config: Config,
        input_shape: tuple[int, ...],
        n_actions: int,
        compute: Compute,
        stacked: bool,
        shared: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    ) -> None:
        """`shared`: network and optimiser that other processes move too, instead of new ones.

        `stacked`: see `make_network`.
        """
        self.config, self.compute = config, compute
        if shared is None:
            with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it was
                torch.default_generator.manual_seed(config.seed)
                self.net = make_network(config, input_shape, n_actions, stacked).to(compute.device)
            self.optimizer = make_optimizer(self.net, config)
        else:
            self.net, self.optimizer = shared
        self.replica = make_replica(self.net, compute, always_copy=shared is not None)
        self.windows = SlidingWindows(
            config.num_envs, config.rollout_steps, config.sliding_batch, config.gamma, config.reward_clip
        )
        self.env_steps = self.updates = 0
        # What `observe` feeds: a worker of A3C has its own.
        self.statistics: PixelNorm | FrameNorm | None = getattr(self.net, "normalizer", None)
        self.last_update: Update | None = None
        self.policy_lag = 0.0  # updates between acting and learning, mean over the newest rollout
        self.last_metrics: dict[str, float] = {}  # metrics of an update of an earlier session or another process

    def learn(self, rollout: Rollout, batches: int | None = None, count: Callable[[], int] | None = None) -> None:
        """One optimiser step on each batch of the rollout (`batches`: so many), then the pixel statistics.

        `count`, called after each step, tells how many updates there are now; without it, one more.
        Raises FloatingPointError when a gradient is NaN or infinite; the network is of no more use then.
        """
        rollout.check()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.env_steps)
        done: list[Update] = []
        policy_lags: list[float] = []
        for batch in self._batches(rollout, batches or self.config.num_minibatches):
            policy_lags.append(self.updates - float(batch.policy_version.mean()) if isinstance(batch, Rollout) else 0.0)
            # Where there is a lag, the policy is no longer the one that acted.
            done.append(
                learn(self.net, self.replica, self.optimizer, batch, self.config, self.compute, policy_lags[-1] > 0)
            )
            self.updates = count() if count else self.updates + 1
        self._check(done)
        self.policy_lag = sum(policy_lags) / max(1, len(policy_lags))
        self.last_update = done[-1] if done else self.last_update
        self.update_normalizer(rollout.obs[::NORMALIZER_STRIDE])
        self.env_steps += len(rollout)

    def update_normalizer(self, obs: torch.Tensor) -> None:
        """Feed `obs [T, N, K, H, W]` to the normaliser, if there is one: of a stack of frames the newest."""
        norm = self.statistics
        if norm is not None:
            norm.update((obs[:, :, -1] if norm.stacked else obs).flatten(0, 1))

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest update, of an earlier session's where this one has none yet; empty before the first."""
        if self.last_update is not None:
            self.last_metrics = {
                **learning_metrics(self.last_update, self.net, self.config),
                "policy_lag": self.policy_lag,
            }
        return self.last_metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `learn` depends on; tensors and lists are the live ones."""
        return {
            "network": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "windows": self.windows.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "learning": self.metrics(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.net.load_state_dict(state["network"])
        sync_replica(self.replica, self.net)
        load_optimizer(self.optimizer, state["optimizer"])
        self.windows.load_state_dict(state["windows"])
        self.env_steps, self.updates = int(state["env_steps"]), int(state["updates"])
        self.last_update, self.last_metrics = None, {name: float(value) for name, value in state["learning"].items()}

    def _batches(self, rollout: Rollout, batches: int) -> Iterable[Batch]:
        if self.config.sliding_batch:
            return self.windows.push(rollout)
        return rollout.split(batches)

    def _check(self, done: list[Update]) -> None:
        """FloatingPointError naming the first bad quantity and its update; one copy to the host per rollout."""
        if not done:
            return
        sizes = [size for update in done for size in (update.loss.total, update.grad_norm)]
        sizes += torch._foreach_norm(list(self.net.parameters()))
        if torch.stack([size.detach() for size in sizes]).isfinite().all():
            return
        for number, update in enumerate(done, start=self.updates - len(done) + 1):
            terms = {f"{name} loss": getattr(update.loss, name) for name in ("policy", "value", "total")}
            for name, value in {**terms, "gradient's norm": update.grad_norm}.items():
                if not math.isfinite(value):
                    raise FloatingPointError(
                        f"the {name} is {float(value)} at update {number}; the last checkpoint is kept: "
                        "try a lower learning_rate"
                    )
        raise FloatingPointError(
            f"the network's parameters are NaN or infinite after update {number}; the last checkpoint is kept: "
            "try a lower learning_rate or a higher epsilon of the optimiser"
        )


def check_finite(network: dict[str, Tensor]) -> None:
    """FloatingPointError where a network's state holds NaN or infinity."""
    if not all(value.isfinite().all() for value in network.values() if value.is_floating_point()):
        raise FloatingPointError("the network's parameters are NaN or infinite; the last checkpoint is kept")


def learning_metrics(update: Update, net: nn.Module, config: Config) -> dict[str, float]:
    """Metrics of the newest update (host copies: call it once per logged row, not per update)."""
    norm = float(update.grad_norm)
    entries = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    undo_clip = max(1.0, norm / (config.max_grad_norm or math.inf))
    return {
        "advantage": float(update.loss.advantage),
        "values": float(update.values),
        "batch_rewards": float(update.returns),
        "loss_entropy": -config.entropy_coef * float(update.loss.entropy),
        "loss_policy": float(update.loss.policy),
        "loss_value": float(update.loss.value),
        "loss_total": float(update.loss.total),
        "entropy": float(update.loss.entropy),
        "ratio": float(update.loss.ratio),
        "grad_l2": norm,
        "grad_max": float(entries.abs().max()) * undo_clip,
        "grad_var": float(entries.var(unbiased=False)) * undo_clip**2,
    }
