"""One contender of compare_sb3.py: training in a process of its own, one window per request.

    python benchmarks/contender.py '{"kind": "ours", "args": ["--backend", "native"]}'

It writes to stdout when it is ready (`{"note", "precision", "start"}`), then replies to each request on stdin
(`{"seconds", "threads"}`, threads 0 = torch's own choice) with `{"steps", "seconds", "threads"}`,
or with `{"error"}` before it fails. Each is one line of JSON; everything else goes to stderr. Nothing heavy
is imported at the top, because SB3's workers import this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], int]  # trains for a moment, returns its decisions


def build_ours(spec: dict[str, Any]) -> tuple[Step, Callable[[], None], str, str]:
    """Our training, as `train.py` would run it with the flags `spec["args"]`; its description and precision."""
    from a2c.cli.flags import parse_config
    from a2c.run.trainer import Trainer

    training = Trainer(parse_config(spec["args"]))
    training.start()
    config, precision = training.config, training.compute.precision_name
    batch = config.sliding_batch or config.rollout_steps * config.num_envs // config.num_minibatches
    network = type(training.learner.net).__name__
    return (
        lambda: training.algorithm.training_step().env_steps,
        training.close,
        f"{config.num_envs} envs, {network}, {precision}, batch {batch}",
        precision,
    )


def build_sb3(spec: dict[str, Any]) -> tuple[Step, Callable[[], None], str, str]:
    """Stable-Baselines3's A2C with its defaults. The first step is one rollout with its update, as ours; each of the
    others is 2,000 decisions, so that what `learn` does once per call takes no part of their time.
    """
    from stable_baselines3 import A2C
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    # "ale_py:" makes every worker register the Atari games, which SB3 does not.
    how = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": spec["start_method"]}}
    envs = VecFrameStack(make_atari_env(f"ale_py:{spec['env']}", spec["num_envs"], seed=0, **how), n_stack=4)
    model = A2C("CnnPolicy", envs, n_steps=5, device="cuda" if spec["cuda"] else "cpu", seed=0)
    batch = model.n_steps * envs.num_envs

    def training_step() -> int:
        before = model.num_timesteps
        rollouts = max(1, 2000 // batch) if before else 1
        model.learn(total_timesteps=rollouts * batch, reset_num_timesteps=False)
        return model.num_timesteps - before

    return (
        training_step,
        envs.close,
        f"{envs.num_envs} envs, {type(model.policy).__name__}, float32, batch {batch}",
        "float32",
    )


def main(spec: dict[str, Any]) -> int:
    """Build the contender, then reply to each request until stdin ends."""
    replies = os.dup(1)
    os.dup2(2, 1)  # everything else that is printed, here or in a worker, goes to stderr

    def reply(message: dict[str, Any]) -> None:
        os.write(replies, (json.dumps(message) + "\n").encode())

    began = time.perf_counter()
    try:
        training_step, close, note, precision = (build_ours if spec["kind"] == "ours" else build_sb3)(spec)
        import torch
        from common import window

        default_threads = torch.get_num_threads()
        training_step()
        reply({"note": note, "precision": precision, "start": time.perf_counter() - began})
        for line in sys.stdin:
            request = json.loads(line)
            torch.set_num_threads(request["threads"] or default_threads)
            steps, seconds = window(training_step, request["seconds"])
            reply({"steps": steps, "seconds": seconds, "threads": torch.get_num_threads()})
        close()
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"[:2000]})
        raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
