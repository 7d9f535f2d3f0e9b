"""Replays: over static buffers, in the right order, and preparing one leaves no trace."""

import contextlib
import gc
import weakref

import pytest
import torch

from a2c.compute import graphs
from a2c.compute.graphs import EagerReplay, GraphReplay, make_replay

CPU = torch.device("cpu")


def noisy_step(weight, generator, calls=None):
    """A function that changes `weight` in place and draws numbers."""

    def step(obs):
        if calls is not None:
            calls.append("function")
        weight.add_(obs.sum())
        return weight.clone(), torch.rand(2, generator=generator) + obs

    return step


def test_replay_on_the_cpu_gives_what_the_calls_give_and_preparing_leaves_no_trace():
    weights, generators = [torch.zeros(3), torch.zeros(3)], [torch.Generator().manual_seed(1) for _ in range(2)]
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    step = noisy_step(weights[0], generators[0])
    replay = make_replay(noisy_step(weights[1], generators[1]), [first], CPU, [weights[1]], generators[1])
    assert isinstance(replay, EagerReplay) and weights[1].tolist() == [0, 0, 0]
    for obs in (first, second, first):
        assert all(map(torch.equal, step(obs), replay(obs)))
    assert torch.equal(*weights) and torch.equal(*(generator.get_state() for generator in generators))


def test_replay_overwrites_its_results_and_copies_its_inputs():
    replay = make_replay(lambda obs: [obs], [torch.zeros(2)], CPU)
    obs = torch.tensor([1.0, 2.0])
    (first,) = replay(obs)
    obs.zero_()
    assert first.tolist() == [1, 2]
    (second,) = replay(torch.tensor([3.0, 4.0]))
    assert second is first and first.tolist() == [3, 4]


class Fakes:
    """Stands in for `torch.cuda`: notes what happens, in order."""

    def __init__(self, log):
        self.log, self.current = log, "caller's stream"

    def patch(self, monkeypatch):
        for name in ("Stream", "CUDAGraph", "graph", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self):
        return FakeStream("caller's stream", self.log)

    def Stream(self):
        return FakeStream("side stream", self.log)

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("off")

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.log.append(f"capture on {stream.name}")
        yield
        self.log.append("captured")

    def CUDAGraph(self):
        return FakeGraph(self.log)


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, log):
        self.log = log

    def register_generator_state(self, generator):
        self.log.append(f"register {type(generator).__name__}")

    def replay(self):
        self.log.append("replay")


def test_graph_is_warmed_up_on_a_side_stream_restored_captured_and_replayed(monkeypatch):
    log = []
    Fakes(log).patch(monkeypatch)
    weight, generator = torch.zeros(3), torch.Generator().manual_seed(1)
    drawn = generator.get_state()
    unchanged = graphs.unchanged

    @contextlib.contextmanager
    def noting(tensors, generator):
        log.append("save")
        with unchanged(tensors, generator):
            yield
        log.append("restore")
        assert weight.tolist() == [0, 0, 0] and torch.equal(generator.get_state(), drawn)

    monkeypatch.setattr(graphs, "unchanged", noting)
    step = noisy_step(weight, generator, log)
    replay = make_replay(step, [torch.ones(2)], torch.device("cuda", 0), [weight], generator)
    before = [
        *("save", "side stream waits for caller's stream", "on side stream"),
        *(["function"] * graphs.WARM_UP),
        *("off", "caller's stream waits for side stream"),
        *("register Generator", "capture on side stream", "function", "captured", "restore"),
    ]
    assert log == before
    outputs = replay(torch.full((2,), 5.0))
    assert log == [*before, "replay"]  # the function is not called again
    assert outputs is replay(torch.zeros(2)) and replay.inputs[0].tolist() == [0, 0]


def test_what_a_graph_reads_lives_as_long_as_the_graph(monkeypatch):
    Fakes([]).patch(monkeypatch)
    read = torch.zeros(1)  # by its address: a graph holds no reference
    alive = weakref.ref(read)
    replay = make_replay(lambda obs, read=read: [obs + read], [torch.zeros(1)], torch.device("cuda", 0))
    del read
    gc.collect()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


def test_make_replay_captures_on_a_gpu_alone(monkeypatch):
    Fakes([]).patch(monkeypatch)
    assert isinstance(make_replay(lambda obs: [obs], [torch.zeros(1)], torch.device("cuda", 0)), GraphReplay)
    assert isinstance(make_replay(lambda obs: [obs], [torch.zeros(1)], CPU), EagerReplay)


def test_unchanged_restores_where_parameters_require_gradients():
    parameter = torch.nn.Parameter(torch.zeros(2))
    with graphs.unchanged([parameter]), torch.no_grad():
        parameter.add_(1)
    assert parameter.tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [[], [torch.zeros(2), torch.zeros(2)]])
def test_replay_refuses_another_number_of_inputs(wrong):
    replay = make_replay(lambda obs: [obs], [torch.zeros(2)], CPU)
    with pytest.raises(ValueError):
        replay(*wrong)
