"""A whole iteration on a device that is not the CPU: nothing is left behind, and the device is waited for seldom."""

import inspect
import subprocess
import sys
import textwrap
from contextlib import ExitStack

import pytest
import torch
from fake_device import DeviceCompute, FakeDevice, allow, on_host

from a2c import collector as collector_module
from a2c.algorithms.a2c import A2C
from a2c.cli.flags import parse_config
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.staging import Staging
from a2c.config.resolve import resolve
from a2c.envs.single import probe_spaces
from a2c.learner import Learner
from a2c.normalizers import PixelNorm
from a2c.policy import Policy
from a2c.rollout import Rollout

PONG = ["--preset", "pong-fast", "--backend", "sync", "--num-envs", "16", "--threads", "2", "--rollout-steps", "6"]
PONG += ["--num-minibatches", "3", "--precision", "float32", "--max-episode-frames", "40"]  # truncated after 10 steps
PONG += ["--no-cuda-graphs"]  # as most runs here; `graphs` has them
FEW = [*PONG, "--num-envs", "6"]  # one group, where PONG has two, and sooner started
LSTM = ["--preset", "lstm", "--backend", "sync", "--num-envs", "4", "--max-episode-frames", "40", "--num-minibatches"]
LSTM += ["2", "--rollout-steps", "6"]
RUNS = {
    "pong": PONG,
    "pong windows": [*PONG, "--no-shuffle"],
    "pong lstm": LSTM,
    "cartpole": ["--preset", "cartpole", "--shuffle"],
    "rmsprop": ["--preset", "cartpole", "--optimizer", "rmsprop"],
    "rmsprop inside": ["--preset", "cartpole", "--optimizer", "rmsprop", "--rmsprop-eps-inside"],
    "graphs": [*PONG, "--cuda-graphs"],
    "noise": [*FEW, "--exploration-noise", "1.5"],
}
ITERATIONS = 2
# The log-probabilities of the rollout are looked at, and the losses, norms and parameters of its updates.
WAITS = ["a number is read"] * 2


class OneShard(Compute):
    """The CPU with the sums of a GPU: a minibatch is one shard."""

    def shards(self, size):
        return 1


def iterate(flags, compute_type, mode=None):
    """Collect and learn `ITERATIONS` times; parameters and statistics, metrics, and the waits of each iteration."""
    config = parse_config(flags)
    spaces = probe_spaces(config)
    config, waits = resolve(config, spaces.obs_shape), []
    with ExitStack() as closing:
        compute = compute_type(config)
        closing.callback(compute.close)
        learner = Learner(config, spaces, compute)
        algorithm = A2C(config, spaces, learner, compute)
        closing.callback(algorithm.close)
        algorithm.start(new_run=True)
        for _ in range(ITERATIONS):
            before = len(mode.waits) if mode else 0
            algorithm.training_step()
            waits.append(mode.waits[before:] if mode else [])
        metrics = learner.metrics()
        return {name: on_host(value) for name, value in learner.net.state_dict().items()}, metrics, waits


def check(flags, expected, metrics, monkeypatch):
    """An iteration on the device gives what it gave on the CPU, and waits as often as it has to."""
    allow(monkeypatch)
    with FakeDevice() as mode:
        found, theirs, waits = iterate(flags, DeviceCompute, mode)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert metrics == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    rewards = WAITS[:1] if "--exploration-noise" in flags else []  # their number
    assert all(wait == WAITS + rewards for wait in waits)
    return mode


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_an_iteration_on_another_device_gives_the_numbers_of_the_cpu(flags, monkeypatch):
    mode = check(flags, *iterate(flags, OneShard)[:2], monkeypatch)
    config = parse_config(flags)
    groups = 2 if (config.num_envs, config.threads) == (16, 2) else 1
    assert mode.fetched == ITERATIONS * config.rollout_steps * groups  # the actions, of each group once per decision


NO_WAIT = "decision.actions.value.numpy()"
MUTANTS = {  # what stands in the source of a function, what replaces it, and the run that has to notice
    "the network": (Learner, "__init__", "self.net = net.to(compute.device)", "self.net = net", FEW),
    "the order of decisions": (Learner, "_minibatches", "to_device(order, rollout.obs.device)", "order", FEW),
    "the newest frames": (Staging, "store", ".to(self.device, non_blocking=True)", "", FEW),
    "the rows that begin": (Staging, "_store_rows", "part.to(self.device, non_blocking=True)", "part", FEW),
    "no rows that begin": (Staging, "store", "self._store_rows(obs, np.flatnonzero(ended), out)", "pass", FEW),
    "final observations": (Collector, "collect", "if finals else no_obs", ".cpu() if finals else no_obs", FEW),
    "the final index": (Rollout, "returns", "to_device(self.final_index.T, after.device)", "self.final_index.T", FEW),
    "starts after a rollout": (Rollout, "returns", ", device=after.device", "", LSTM),
    "what is copied at the end": (Collector, "_copy_to_device", "rollout.check()", "return rollout", FEW),
    "starts of episodes": (Collector, "_play", "if policy.recurrent", "if False", LSTM),
    "a check in each decision": (Policy, "decide", "return self._decide(obs, starts)", "return self.act_(obs)", FEW),
    "actions nobody waits for": (Collector, "_play", "staging.actions_on_host(decision.actions)", NO_WAIT, FEW),
    "a number in an update": (
        PixelNorm,
        "update",
        "total = self.count",
        "total = 0 * int(self.count) + self.count",
        FEW,
    ),
}


@pytest.fixture(scope="module")
def expected():
    """What the runs of `MUTANTS` give on the CPU."""
    return {" ".join(flags): iterate(flags, OneShard)[:2] for flags in (FEW, LSTM)}


def act_(policy, obs):
    """`decide` with a look at each decision."""
    decision = policy._decide(obs, None)
    assert not decision.log_probs.isnan().any()
    return decision


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_what_stays_on_the_cpu_or_waits_is_noticed(mutant, expected, monkeypatch):
    owner, name, old, new, flags = mutant
    monkeypatch.setattr(Policy, "act_", act_, raising=False)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1
    namespace = dict(vars(sys.modules[owner.__module__]))
    exec("from __future__ import annotations\n" + source.replace(old, new), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    with pytest.raises((RuntimeError, AssertionError), match=r"on the same device|may still read it|assert False"):
        check(flags, *expected[" ".join(flags)], monkeypatch)


def collect(flags, rollouts):
    """Collect on the device, without the learner's wait between two rollouts."""
    config = parse_config(flags)
    spaces = probe_spaces(config)
    config = resolve(config, spaces.obs_shape)
    with FakeDevice(), ExitStack() as closing:
        compute = DeviceCompute(config)
        closing.callback(compute.close)
        algorithm = A2C(config, spaces, Learner(config, spaces, compute), compute)
        closing.callback(algorithm.close)
        algorithm.start(new_run=True)
        for _ in range(rollouts):
            algorithm.collector.collect()


@pytest.mark.parametrize("flags", [PONG, LSTM], ids=["pong", "lstm"])
def test_no_buffer_on_the_host_is_used_again_before_the_device_has_read_it(flags, monkeypatch):
    allow(monkeypatch)
    collect(flags, 3)
    monkeypatch.setattr(collector_module, "check_finite", lambda log_probs: None)
    with pytest.raises(RuntimeError, match="memory is written to while the device may still read it"):
        collect(flags, 3)


ACTING = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from a2c.config.config import Config
from a2c.networks import make_network
from a2c.policy import Policy

generator = torch.Generator
torch.Generator = type("Generator", (), {"__new__": lambda cls, device="cpu": generator("cpu")})  # none of a GPU here
device = torch.device("cuda", 0)
mode = FakeTensorMode(allow_non_fake_inputs=True)


def move(net, dtype):
    # Fake tensors of the GPU for the parameters, of `dtype`, and for the buffers of `net`.
    for module in net.modules():
        kept = getattr(module, "keeps_float32", False)
        for name, value in module._parameters.items():
            fake = mode.from_tensor(value.data if kept else value.data.to(dtype)).to(device)
            module._parameters[name] = torch.nn.Parameter(fake)
        for name, value in module._buffers.items():
            module._buffers[name] = mode.from_tensor(value).to(device)


def act(net):
    policy = Policy(net, 5, device)
    policy.generator = None  # fake tensors are drawn without one
    obs = torch.zeros(5, 4, 42, 42, dtype=torch.uint8, device=device)
    for greedy in (False, True):
        policy.greedy = greedy
        decision = policy.decide(obs, torch.zeros(5, dtype=torch.bool, device=device))
        assert {(one.device, tuple(one.shape)) for one in decision} == {(device, (5,))}
    assert policy.rnn_state.device == device


with torch.no_grad():
    for kind, precision in (("small", torch.float32), ("small", torch.bfloat16), ("atari", torch.bfloat16)):
        net = make_network(Config(network=kind), (4, 42, 42), 6, stacked=True)
        with mode:
            move(net, precision)
            act(net)
print("acted")
"""


def test_networks_act_on_fake_tensors_of_a_gpu():
    done = subprocess.run([sys.executable, "-c", ACTING], capture_output=True, text=True, timeout=300)
    assert done.stdout == "acted\n", done.stderr[-3000:]


def test_a_network_on_the_cpu_does_not_act_on_fake_tensors_of_a_gpu():
    # Otherwise the test above could not fail.
    wrong = ACTING.replace("            move(net", "            (net")
    done = subprocess.run([sys.executable, "-c", wrong], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "device" in done.stderr
