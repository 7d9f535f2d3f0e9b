"""A policy as an ONNX model: raw observations in, logits and values out, for runtimes other than torch.

================ ============================ ===============================================================
tensor           shape, dtype                 meaning
================ ============================ ===============================================================
obs              [batch, ...] as the          what the environment returns; the model normalises it
                 environment's
rnn_state        [batch, H] float32           recurrent policies: zeros where an episode starts, then what the
                                              last call returned as next_rnn_state
logits           [batch, A] float32           unnormalised log-probabilities of the actions
values           [batch, 1] float32           V(obs)
next_rnn_state   [batch, H] float32           recurrent policies: rnn_state of the next call
================ ============================ ===============================================================

The metadata are `a2c` (its version), `env`, `actions` (their names as a JSON list; Atari games only), `env_steps`
(decisions that were trained) and `config` (JSON, for `Config.from_json` and `make_env`).
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from a2c import __version__
from a2c.config.config import Config
from a2c.envs.single import checked_spec, make_env
from a2c.normalizers import FrameNorm
from a2c.policy import initial_state
from a2c.processes.errors import raising_worker_error
from a2c.run.policies import policy_config

TOLERANCE = 1e-4  # between torch and onnxruntime: absolute, plus the same share of torch's number
DECISIONS = 32  # whose observations are compared
INPUTS, OUTPUTS = ("obs", "rnn_state"), ("logits", "values", "next_rnn_state")


def onnx_model(config: Config, net: nn.Module, state: Mapping[str, Any]) -> bytes:
    """The content of an ONNX file with the network `net` of the checkpoint `state`, as `load_policy` returns them.

    It has been compared with torch on random observations and on those of an episode. Raises FloatingPointError if a
    difference is beyond TOLERANCE, WorkerError if the environment fails. `net` cannot be trained any more.
    """
    module = _Recurrent(net) if getattr(net, "rnn_state_size", 0) else _Feedforward(net)
    with raising_worker_error(ValueError), closing(make_env(config, checked_spec(config), config.seed)) as env:
        batches = [_random(env, 3), _random(env, 1), _played(env, config.seed)]  # [batch, ...] each
        meanings = getattr(env.unwrapped, "get_action_meanings", None)
        facts = {"actions": json.dumps(meanings())} if meanings else {}
    facts |= {"a2c": __version__, "env": config.env, "env_steps": str(state["env_steps"])}
    content = _converted(module, module.arguments(batches[0]), facts | {"config": policy_config(dict(state))})
    _compare(module, content, [module.arguments(batch) for batch in batches])
    return content


class _Feedforward(nn.Module):
    """A network with constants for its statistics."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        normalizer = getattr(net, "normalizer", None)  # which a custom network may not have
        if isinstance(normalizer, FrameNorm):
            net.normalizer = _FixedFrameNorm(normalizer)
        self.net = net.requires_grad_(False).eval()

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        logits, values = self.net(obs)
        return logits, values

    def arguments(self, obs: np.ndarray) -> tuple[Tensor, ...]:
        """The inputs of a call with `obs [batch, ...]`."""
        return (torch.from_numpy(obs),)


class _Recurrent(_Feedforward):
    """A recurrent network, one step of it."""

    def forward(self, obs: Tensor, rnn_state: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        step: tuple[Tensor, ...] = self.net.step(obs, rnn_state)  # type: ignore[operator]
        return step

    def arguments(self, obs: np.ndarray) -> tuple[Tensor, ...]:
        """As above, with an rnn_state in which every unit says something."""
        state = initial_state(self.net, len(obs))
        state.uniform_(-1, 1, generator=torch.Generator().manual_seed(len(obs)))
        return *super().arguments(obs), state


class _FixedFrameNorm(nn.Module):
    """A `FrameNorm` that has stopped learning: the exporter would round its alpha to float32 and then take powers."""

    def __init__(self, normalizer: FrameNorm) -> None:
        super().__init__()
        mean, std = normalizer.moments()
        self.mean, self.std = float(mean), float(std + 1e-8)

    def forward(self, obs: Tensor) -> Tensor:
        return (obs.to(torch.float32) - self.mean) / self.std


def _random(env: gym.Env, number: int) -> np.ndarray:
    """Observations `[number, ...]` drawn from the environment's space: for images, uniform noise."""
    space = env.observation_space
    space.seed(number)
    return np.stack([space.sample() for _ in range(number)])


def _played(env: gym.Env, seed: int) -> np.ndarray:
    """Observations `[DECISIONS, ...]` that random actions lead to."""
    env.action_space.seed(seed)
    obs, ended = [np.array(env.reset(seed=seed)[0])], False
    while len(obs) < DECISIONS:
        if ended:
            obs.append(np.array(env.reset()[0]))
        after, _, terminated, truncated, _ = env.step(env.action_space.sample())
        obs.append(np.array(after))
        ended = terminated or truncated
    return np.stack(obs).astype(env.observation_space.dtype)


def _converted(module: _Feedforward, arguments: tuple[Tensor, ...], facts: Mapping[str, str]) -> bytes:
    import onnx

    batch = torch.export.Dim("batch")
    with _without_notes():
        program = torch.onnx.export(
            module,
            arguments,
            input_names=INPUTS[: len(arguments)],
            output_names=OUTPUTS[: len(arguments) + 1],
            dynamic_shapes=tuple({0: batch} for _ in arguments),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _tidy(model)
    onnx.helper.set_model_props(model, dict(facts))
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


def _tidy(model: Any) -> None:
    """Drop notes, which hold paths of this machine."""
    for part in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
    del model.graph.value_info[:]
    del model.metadata_props[:]


@contextmanager
def _without_notes() -> Iterator[None]:
    """Hide what the exporter says about packages that it looks for and about torch; the model is tested afterwards."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _compare(module: _Feedforward, content: bytes, calls: Sequence[tuple[Tensor, ...]]) -> None:
    """FloatingPointError if onnxruntime and torch differ by more than TOLERANCE in any output of `calls`."""
    from onnxruntime import InferenceSession

    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    for arguments in calls:
        with torch.no_grad():
            expected = [output.numpy() for output in module(*arguments)]
        found = session.run(None, {name: tensor.numpy() for name, tensor in zip(INPUTS, arguments, strict=False)})
        for name, ours, theirs in zip(OUTPUTS, expected, found, strict=False):
            if not np.allclose(theirs, ours, rtol=TOLERANCE, atol=TOLERANCE):
                worst = float(np.abs(theirs - ours).max())
                rule = f"{name} of onnxruntime must match torch's within {TOLERANCE}"
                raise FloatingPointError(f"{rule}, got a difference of {worst}")
