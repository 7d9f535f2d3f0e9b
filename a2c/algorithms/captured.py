"""The optimiser steps of a learner as replays: forward, loss, backward, clipping, step (see `Compute.cuda_graphs`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from a2c.compute.graphs import Replay, make_replay
from a2c.learner import Learner, StepResult
from a2c.losses import A2CLoss
from a2c.rollout import ShuffledMinibatch
from a2c.update import Minibatch, Terms


class CapturedSteps:
    """Takes the steps of `learner`, as `Learner.take_step` does, with a replay for each size of minibatch.

    Minibatches have two sizes at most. Without exploration noise, the first one of a rollout has no importance ratios:
    that is another replay.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner, self.device = learner, learner.compute.device
        self.entropy_coef = torch.zeros((), device=self.device)  # a replay reads it, as it does the learning rate
        self.replays: dict[tuple[int, bool], Replay] = {}

    def __call__(self, minibatch: Minibatch, size: int, off_policy: bool, entropy_coef: float) -> StepResult:
        """One step on `minibatch`, all `size` decisions of it; terms of its own, not overwritten by the next one."""
        assert isinstance(minibatch, ShuffledMinibatch) and len(minibatch) == size
        inputs = minibatch.obs, minibatch.actions, minibatch.returns, minibatch.log_probs
        self.entropy_coef.fill_(entropy_coef)
        replay = self.replays.get((len(minibatch), off_policy)) or self._prepare(inputs, off_policy)
        *loss, returns, squares, values, norm = replay(*inputs)[0].clone().unbind()
        return Terms(A2CLoss(*loss), returns, squares, values), norm

    def _prepare(self, inputs: Sequence[Tensor], off_policy: bool) -> Replay:
        learner = self.learner
        moments = [value for state in learner.optimizer.state.values() for value in state.values()]
        changes = [*learner.net.parameters(), *learner.replica.parameters(), *moments]
        step = partial(self._step, off_policy=off_policy)
        replay = self.replays[len(inputs[0]), off_policy] = make_replay(step, inputs, self.device, changes)
        return replay

    def _step(
        self, obs: Tensor, actions: Tensor, returns: Tensor, log_probs: Tensor, off_policy: bool
    ) -> Sequence[Tensor]:
        """The step, and all its terms as one tensor: they are copied before the next replay overwrites them."""
        minibatch = ShuffledMinibatch(obs, actions, returns, log_probs)
        terms, norm = self.learner.take_step(minibatch, len(minibatch), off_policy, self.entropy_coef)
        return [torch.stack([*terms.loss, terms.returns, terms.squared_returns, terms.values, norm])]
