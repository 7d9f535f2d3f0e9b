"""The log files of a run: rows of CSV files and points for TensorBoard."""

import math
from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from runs import row_of, rows, tiny
from tensorboardX.proto.event_pb2 import Event
from toys import ConstantEnv, learn, vector

from a2c.compute.compute import Compute
from a2c.compute.optimizer import make_optimizer
from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.losses import A2CLoss
from a2c.metrics.logger import METRICS, SCORES, TAGS, EventFile, RunLogger
from a2c.metrics.meters import EPISODE_COLUMNS
from a2c.metrics.results import read_episodes
from a2c.metrics.text import format_number
from a2c.networks import MlpA2C
from a2c.transitions import Experience, Transitions
from a2c.update import Terms, compute_gradients, describe_update, explained_variance


def events(run_dir):
    """TensorBoard's records: 8 bytes of length, 4 of checksum, the event, 4 of checksum."""
    found = {}
    for path in (run_dir / "tensorboard").glob("events.*"):
        content, at = path.read_bytes(), 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + length])
            values = [value for value in event.summary.value if value.WhichOneof("value") == "simple_value"]
            found |= {(value.tag, event.step): value.simple_value for value in values}
            at += 16 + length
    return found


def test_run_logger_writes_a_row_to_the_csv_file_and_to_tensorboard(tmp_path):
    logger = RunLogger(tmp_path, Config())
    logger.add_metrics(row_of(64, reward_100=math.nan, speed=123456.789))
    logger.write()
    (row,) = rows(tmp_path / "metrics.csv")  # flushed before it is closed
    logger.close()
    assert tuple(row) == tuple(METRICS)
    assert row["env_steps"] == "64" and float(row["speed"]) == pytest.approx(123456.789, rel=1e-5)
    assert row["reward_100"] == ""
    logged = events(tmp_path)
    assert logged["time/speed", 64] == pytest.approx(123456.789)
    assert {tag for tag, _ in logged} == set(TAGS.values()) - {"score/reward_100"}  # NaN draws no point


def test_run_logger_writes_a_row_per_finished_episode(tmp_path):
    logger = RunLogger(tmp_path, Config())
    logger.add_episodes(40, 1.5, [Episode(0, -21.0, 900), Episode(3, 2.5, 800)])
    logger.add_episodes(80, 2.0, [])
    assert not rows(tmp_path / "episodes.csv")
    logger.write()
    assert [tuple(row.values()) for row in rows(tmp_path / "episodes.csv")] == [
        ("40", "1.50", "-21", "900"),
        ("40", "1.50", "2.5", "800"),
    ]
    assert tuple(rows(tmp_path / "episodes.csv")[0]) == EPISODE_COLUMNS
    assert read_episodes(tmp_path)["score"].tolist() == [-21.0, 2.5]
    logger.close()


@pytest.mark.parametrize("points", [21.0, -21.0, 1234567.0, 98765432.25, 0.1 + 0.2, 1e22, -0.0, math.inf])
def test_run_logger_writes_scores_exactly(points, tmp_path):
    assert float(format_number(points)) == points
    logger = RunLogger(tmp_path, Config())
    logger.add_episodes(40, 1.5, [Episode(0, points, 900)])
    logger.add_metrics(row_of(40, **dict.fromkeys(SCORES, points)))
    logger.write()
    logger.close()
    assert read_episodes(tmp_path)["score"].tolist() == [points]
    (row,) = rows(tmp_path / "metrics.csv")
    assert all(row[name] == (format_number(points) if math.isfinite(points) else "") for name in SCORES)
    assert format_number(21.0) == "21" and format_number(-1234567.0) == "-1234567"


class Tenths(ConstantEnv):
    """Pays 0.7 for each of ten decisions."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 0.7, *rest


def test_vector_env_sums_fractions_of_points_exactly():
    envs, scores = vector(Tenths(), Tenths()), []
    envs.reset()
    for _ in range(10):
        *_, info = envs.step(np.zeros(2, np.int64))
        scores += [episode.score for episode in info["episodes"]]
    assert scores == [7.000000000000001] * 2  # added one by one; from Python 3.12 sum() rounds once


def test_run_logger_drops_rows_that_will_be_replayed(tmp_path):
    for keep_until in (None, 20):
        logger = RunLogger(tmp_path, Config(), keep_until)
        for env_steps in (10, 20, 30) if keep_until is None else (40,):
            logger.add_metrics(row_of(env_steps))
            logger.add_episodes(env_steps, 1.0, [Episode(0, 1.0, 5)])
        logger.write()
        logger.close()
    for name in ("metrics.csv", "episodes.csv"):
        assert [row["env_steps"] for row in rows(tmp_path / name)] == ["10", "20", "40"]


def test_run_logger_drops_a_half_written_last_line(tmp_path):
    RunLogger(tmp_path, Config()).close()
    with open(tmp_path / "episodes.csv", "a", encoding="utf-8") as file:
        file.write("10,1.00,5,6\n12,1.")
    RunLogger(tmp_path, Config(), keep_until=20).close()
    assert [row["env_steps"] for row in rows(tmp_path / "episodes.csv")] == ["10"]


def test_describe_update_measures_the_gradient_before_the_clip():
    config = Config(threads=1, precision="float32", sliding_batch=4, gae_lambda=1.0, num_minibatches=1, epochs=1)
    batch = Transitions([Experience(np.ones(3, np.float32) * i, i % 2, 5.0, None) for i in range(4)])
    found = []
    for max_grad_norm in (1e6, 1e-3):  # a clip that does nothing, one that does
        compute = Compute(config)
        torch.manual_seed(0)
        net = MlpA2C((3,), 2)
        changed = Config(**vars(config) | {"max_grad_norm": max_grad_norm})
        terms, norm = learn(net, net, make_optimizer(net, changed), batch, changed, compute)
        found.append(describe_update(terms, norm, net, changed.max_grad_norm, changed.entropy_coef))
        compute.close()
    free, clipped = found
    assert free["grad_l2"] > 0.1
    for name in free:
        assert clipped[name] == pytest.approx(free[name], rel=1e-3, nan_ok=True), name
    total = free["loss_policy"] + config.value_coef * free["loss_value"] + free["loss_entropy"]
    assert free["loss_total"] == pytest.approx(total, rel=1e-5)
    assert free["advantage"] == pytest.approx(free["batch_rewards"] - free["values"], rel=1e-5)
    assert free["loss_entropy"] == pytest.approx(-config.entropy_coef * free["entropy"]) and free["entropy"] > 0.6


@pytest.mark.parametrize(("max_grad_norm", "clip"), [(0.0, 1.0), (12.0, 1.0), (3.0, 0.5)])
def test_describe_update_by_hand(max_grad_norm, clip):
    loss = A2CLoss(*map(torch.tensor, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)))
    terms = Terms(loss, *map(torch.tensor, (9.0, 125.0, 10.0)))
    net = torch.nn.Linear(2, 2)
    net.weight.grad = torch.tensor([[-5.0, 1.0], [0.0, 2.0]])  # the bias has none
    assert describe_update(terms, torch.tensor(6.0), net, max_grad_norm, entropy_coef=0.25) == {
        "advantage": 5.0,
        "values": 10.0,
        "batch_rewards": 9.0,
        "loss_entropy": -0.25 * 4.0,
        "loss_policy": 2.0,
        "loss_value": 3.0,
        "loss_total": 1.0,
        "entropy": 4.0,
        "ratio": 6.0,
        "approx_kl": 7.0,
        "clip_fraction": 8.0,
        "explained_variance": 1 - (3 - 5**2) / (125 - 9**2),
        "grad_l2": 6.0,
        "grad_max": 5.0 / clip,
        "grad_var": ((5**2 + 1**2 + 2**2) / 4 - 0.5**2) / clip**2,
    }


def test_event_file_holds_what_tensorboard_reads(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    file = EventFile(tmp_path / "board", first_step=40)
    file.add(50, 1.0, {"reward": 2.5, "nothing": float("nan")})
    file.close()
    content = next((tmp_path / "board").iterdir()).read_bytes()
    events, at = [], 0
    while at < len(content):  # length, checksum, event, checksum
        length = int.from_bytes(content[at : at + 8], "little")
        events.append(Event.FromString(content[at + 12 : at + 12 + length]))
        at += 16 + length
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 40 and events[1].session_log.status == 1
    (value,) = events[2].summary.value
    assert (events[2].step, value.tag, value.simple_value) == (50, "reward", 2.5)
    assert len(events) == 3


def test_run_logger_may_lose_points_but_no_rows(tmp_path):
    logger = RunLogger(tmp_path, tiny(tmp_path / "run"))
    (tmp_path / "tensorboard").write_text("in the way")
    for _ in range(2):
        with pytest.raises(OSError, match="exists"):
            logger.add_metrics({"env_steps": 80})
            logger.write()
    (tmp_path / "tensorboard").unlink()
    logger.rewind(40)
    logger.add_metrics({"env_steps": 80})
    logger.write()
    logger.close()
    assert [row["env_steps"] for row in rows(tmp_path / "metrics.csv")] == ["80"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_run_logger_begins_another_event_file_after_one_that_the_disk_has_cut(tmp_path, monkeypatch):
    logger = RunLogger(tmp_path, Config(), keep_until=5)  # resumed: the first file drops what was after 5
    add, init, firsts = EventFile.add, EventFile.__init__, []

    def note(self, directory, first_step):
        firsts.append(first_step)
        init(self, directory, first_step)

    monkeypatch.setattr(EventFile, "__init__", note)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    for env_steps in range(10, 60, 10):
        monkeypatch.setattr(EventFile, "add", refuse if env_steps == 20 else add)
        logger.add_metrics(row_of(env_steps))
        with pytest.raises(OSError, match="No space") if env_steps == 20 else nullcontext():
            logger.write()
    logger.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert {step for _, step in events(tmp_path)} == {10, 30, 40, 50}
    assert firsts == [6, None]  # the second file drops nothing of the first
    assert [row["env_steps"] for row in rows(tmp_path / "metrics.csv")] == ["10", "20", "30", "40", "50"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("deviation", "shift"), [(1.0, 0.0), (0.01, 5.0), (0.003, 500.0)])
def test_explained_variance_is_that_of_all_shards_together(threads, deviation, shift):
    """Also where the returns are nearly equal: float32 would lose their variance."""
    rng, net = np.random.default_rng(0), MlpA2C((3,), 2)
    with torch.no_grad():
        net.value[-1].bias.fill_(shift)
        net.value[-1].weight.mul_(deviation)
    rewards = [shift + deviation * float(rng.normal()) for _ in range(64)]
    transitions = [Experience(rng.normal(size=3).astype(np.float32), 0, reward, None) for reward in rewards]
    config = Config(threads=threads, precision="float32", reward_clip=0.0, num_minibatches=1, epochs=1)

    def measured(transitions):
        with closing(Compute(config)) as compute:
            return explained_variance(compute_gradients(net, Transitions(transitions), config, compute, False, 0.01)[1])

    with torch.no_grad():
        values = net(torch.tensor(np.array([one.state for one in transitions])))[1].squeeze(1).double().numpy()
    returns = np.float32(rewards).astype(np.float64)
    expected = 1.0 - (returns - values).var() / returns.var()
    assert measured(transitions) == pytest.approx(expected, abs=1e-3 if shift else 1e-4) and abs(expected) > 0.01
    for equal in (0.1, shift):
        assert math.isnan(measured([one._replace(reward=equal) for one in transitions]))
