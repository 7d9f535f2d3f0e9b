"""What only a GPU can show: `python -m pytest tests/gpu -m ""` (with the slow one; without `-m ""`, without it).

Tolerances: float32 without TF32. A replayed run rounds its learning rate to float32; sums on a GPU have another order
than on the CPU.
"""

import copy
import gc
import os
import warnings
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from crossings import crossings
from toys import spaces

from a2c.algorithms.captured import CapturedSteps
from a2c.cli.flags import parse_config
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.config.resolve import resolve
from a2c.envs.make import make_envs
from a2c.learner import Learner
from a2c.networks import make_network
from a2c.policy import Policy
from a2c.rollout import Rollout
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
CUDA = "cuda:0"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, at its first matrix product
PONG = ["--preset", "pong-fast", "--backend", "sync", "--num-envs", "16", "--rollout-steps", "8", "--num-minibatches"]
PONG += ["3", "--threads", "2", "--precision", "float32", "--no-progress", "--deterministic", "--cuda"]
CARTPOLE = ["--preset", "cartpole", "--shuffle", "--no-progress", "--cuda", "--total-env-steps", "1000000000"]


@pytest.fixture(autouse=True)
def _no_tf32():
    """Convolutions and matrix products in float32 as the CPU has it."""
    kinds = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [kind.allow_tf32 for kind in kinds]
    for kind in kinds:
        kind.allow_tf32 = False
    yield
    for kind, allowed in zip(kinds, before, strict=True):
        kind.allow_tf32 = allowed


def trained(folder, flags):
    """The last checkpoint of a run, which has replays or not, as `flags` say."""
    run = Trainer(parse_config([*flags, "--run-dir", str(folder)]))
    assert run.compute.cuda_graphs is ("--no-cuda-graphs" not in flags)
    assert run.run().exit_code == 0
    return load_checkpoint(folder / "latest.pt")


def close_to(one, other, atol):
    """Assert that two networks' states are equal but for `atol`."""
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], atol=atol, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def random_rollout(steps, envs, frames):
    """A rollout of noise on the CPU, in which episodes end."""
    draw = torch.Generator().manual_seed(0)
    rollout = Rollout.empty(steps, torch.zeros(envs, *frames, dtype=torch.uint8))
    for field in (rollout.obs, rollout.next_obs):
        field.random_(0, 256, generator=draw)
    rollout.actions.random_(0, 6, generator=draw)
    rollout.rewards.normal_(generator=draw)
    rollout.values.normal_(generator=draw)
    rollout.log_probs.uniform_(-2.0, -1.5, generator=draw)
    rollout.terminated |= torch.rand(steps, envs, generator=draw) < 0.1
    return rollout


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_an_update_on_the_gpu_is_that_of_the_cpu(graphs):
    networks = []
    for cuda in (False, True):
        # Two updates: over dozens, units of ReLU whose inputs are close to 0 switch, and rounding errors grow.
        config = Config(network="nature", precision="float32", num_envs=8, num_minibatches=2, epochs=1, threads=1)
        config = resolve(replace(config, cuda=cuda, cuda_graphs=graphs), (4, 84, 84))
        with closing(Compute(config)) as compute:
            learner = Learner(config, spaces((4, 84, 84), 6, stacked=True), compute)
            assert compute.cuda_graphs is (cuda and graphs)
            if compute.cuda_graphs:
                learner.replace_step(CapturedSteps(learner))
            rollout = random_rollout(6, 8, (4, 84, 84))
            learner.update_normalizer(rollout.obs.to(compute.device))
            learner.learn(rollout.to(compute.device))
            networks.append({name: value.cpu().clone() for name, value in learner.net.state_dict().items()})
    close_to(*networks, atol=2e-5)


def test_a_replayed_run_gives_the_parameters_of_an_eager_one(tmp_path):
    flags = [*PONG, "--total-env-steps", str(3 * 8 * 16)]
    plain, replayed = trained(tmp_path / "a", [*flags, "--no-cuda-graphs"]), trained(tmp_path / "b", flags)
    close_to(plain["network"], replayed["network"], atol=1e-4)


def test_graphs_outlive_those_of_environments_that_failed(tmp_path):
    with closing(Trainer(parse_config([*PONG, "--run-dir", str(tmp_path / "run")]))) as run:
        run.start()
        for _ in range(3):  # each start captures the policies anew; the graphs of the learner's steps stay
            run.algorithm.training_step()
            run.algorithm.close(failed=True)
            gc.collect()
            run.algorithm.start(new_run=False)
        run.algorithm.training_step()
        assert run.learner.env_steps == 4 * 8 * 16
        assert all(parameter.isfinite().all() for parameter in run.learner.net.parameters())


def test_replayed_decisions_are_the_eager_ones_for_the_same_noise():
    obs = torch.randint(0, 256, (20, 16, 4, 84, 84), dtype=torch.uint8, device=CUDA)
    net = make_network(Config(), (4, 84, 84), 6, stacked=True).to(CUDA)
    starts = torch.zeros(16, dtype=torch.bool, device=CUDA)
    plain, replayed = Policy(net, 16, CUDA, seed=3), Policy(net, 16, CUDA, seed=3)
    replayed.capture(obs[0])
    for number, one in enumerate(obs):
        for policy in (plain, replayed):
            policy.perturb(number % 3)
        mine, theirs = plain.act(one, starts), replayed.act(one, starts)
        assert torch.equal(mine.actions, theirs.actions)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
    assert torch.equal(plain.generator.get_state(), replayed.generator.get_state())
    replayed.perturb(0.0)
    assert len(torch.stack([replayed.act(obs[0], starts).actions.clone() for _ in range(20)]).unique(dim=0)) > 1


@pytest.mark.parametrize("backend", ["native", "sync", "async"])
def test_stacks_built_on_the_gpu_are_those_of_the_environments(backend):
    config = Config(backend=backend, frame_size=36, num_envs=4, max_episode_frames=44, threads=1)
    with closing(make_envs(config)) as envs:
        ends = 0
        for built, true, ended in crossings(envs, 40, device=CUDA):
            assert torch.equal(built, true)
            ends += ended.sum()
    assert ends == 4 * 3


@pytest.mark.parametrize("graphs", [["--no-cuda-graphs"], []], ids=["eager", "graphs"])
def test_a_run_resumes_on_the_gpu(graphs, tmp_path):
    flags = [*PONG, *graphs, "--total-env-steps", str(4 * 8 * 16)]
    whole = trained(tmp_path / "whole", flags)
    trained(tmp_path / "run", [*flags, "--stop-after", str(2 * 8 * 16)])
    assert Trainer.resume(tmp_path / "run", stop_after=0).run().exit_code == 0
    close_to(whole["network"], load_checkpoint(tmp_path / "run" / "latest.pt")["network"], atol=1e-4)


@pytest.mark.parametrize("flags", [[], ["--shuffle"], ["--algorithm", "ga3c"]], ids=["eager", "graphs", "ga3c"])
def test_a_run_uses_the_gpu_and_learns(flags, tmp_path):
    flags = ["--preset", "cartpole", "--no-progress", "--cuda", "--total-env-steps", "20000", *flags]
    run = Trainer(parse_config([*flags, "--run-dir", str(tmp_path / "run")]))
    assert run.compute.cuda_graphs is ("--shuffle" in flags)
    assert {str(parameter.device) for parameter in run.learner.net.parameters()} == {CUDA}
    assert run.run().exit_code == 0 and run.scores.mean > 15


@pytest.mark.parametrize("graphs", [["--no-cuda-graphs"], []], ids=["eager", "graphs"])
def test_an_iteration_waits_for_the_gpu_no_more_than_it_must(graphs, tmp_path):
    run = Trainer(parse_config([*CARTPOLE, *graphs, "--run-dir", str(tmp_path / "run")]))
    with closing(run):
        run.start()
        for _ in range(3):
            run.algorithm.training_step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.algorithm.training_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) <= 2, waits  # the log-probabilities, and the losses, norms and parameters; events do not count


def memory_after(run, iterations):
    """Bytes that tensors hold on the GPU, and that torch has reserved, after more iterations."""
    for _ in range(iterations):
        run.algorithm.training_step()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("graphs", [["--no-cuda-graphs"], []], ids=["eager", "graphs"])
@pytest.mark.parametrize("iterations", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_stays_constant(iterations, graphs, tmp_path):
    run = Trainer(parse_config([*CARTPOLE, *graphs, "--run-dir", str(tmp_path / "run")]))
    with closing(run):
        run.start()
        before = memory_after(run, 100)
        after = memory_after(run, iterations)
    assert after[0] <= before[0] + 2**16 and after[1] <= before[1] + 2**21


def test_a_network_and_its_copy_act_alike_on_both_devices():
    net = make_network(Config(), (4, 84, 84), 6, stacked=True)
    obs = torch.randint(0, 256, (16, 4, 84, 84), dtype=torch.uint8)
    here = Policy(net, 16, "cpu", greedy=True).act(obs, torch.zeros(16, dtype=torch.bool))
    there = Policy(copy.deepcopy(net).to(CUDA), 16, CUDA, greedy=True)
    found = there.act(obs.to(CUDA), torch.zeros(16, dtype=torch.bool, device=CUDA))
    torch.testing.assert_close(here.values, found.values.cpu(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(here.log_probs, found.log_probs.cpu(), atol=1e-3, rtol=1e-3)
