"""One step of learning: against plain torch, in shards, in bfloat16, and twice the same."""

import copy
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toys import NO_DEFAULTS as CONFIG
from toys import learn, spaces

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.optimizer import make_optimizer
from a2c.compute.replica import make_replica, sync_replica
from a2c.config.config import Config
from a2c.envs.make import make_envs
from a2c.learner import Learner, Shared, entropy_coef, learning_rate
from a2c.losses import a2c_loss
from a2c.networks import MlpA2C, make_network
from a2c.policy import UNREWARDED, exploration_noise, initial_state, replay
from a2c.rollout import Rollout
from a2c.transitions import Experience, Transitions, unpack_batch
from a2c.update import Terms


def random_rollout(steps: int = 6, envs: int = 11, seed: int = 0) -> Rollout:
    """Experience whose log_probs are those of some other policy: the ratios are not 1."""
    draw = torch.Generator().manual_seed(seed)
    rollout = Rollout.empty(steps, torch.randn(envs, 4, generator=draw))
    rollout.obs = torch.randn(steps, envs, 4, generator=draw)
    rollout.next_obs = torch.randn(envs, 4, generator=draw)
    rollout.actions = torch.randint(0, 3, (steps, envs), generator=draw)
    rollout.rewards = 2 * torch.randn(steps, envs, generator=draw)
    rollout.values = torch.randn(steps, envs, generator=draw)
    rollout.log_probs = torch.randn(steps, envs, generator=draw) - 1.0
    rollout.terminated, rollout.truncated = (torch.rand(steps, envs, generator=draw) < 0.2 for _ in range(2))
    rollout.final_index = (rollout.truncated & ~rollout.terminated).nonzero()
    rollout.final_obs = torch.randn(len(rollout.final_index), 4, generator=draw)
    rollout.final_rnn_state = torch.zeros(len(rollout.final_index), 0)
    return rollout


def make_net(seed: int = 0) -> MlpA2C:
    torch.manual_seed(seed)
    return MlpA2C((4,), 3)


def train(
    net: MlpA2C, batches: list, config: Config, optimizer: torch.optim.Optimizer | None = None
) -> list[tuple[Terms, Tensor]]:
    """Learn the batches one after the other; `net` is changed in place."""
    optimizer = optimizer or make_optimizer(net, config)
    with closing(Compute(config)) as compute:
        replica = make_replica(net, compute)
        return [learn(net, replica, optimizer, batch, config, compute) for batch in batches]


def plain_step(
    net: MlpA2C,
    optimizer: torch.optim.Optimizer,
    states: Tensor,
    actions: Tensor,
    returns: Tensor,
    behaviour: Tensor | None,
) -> float:
    """A step of plain torch with the coefficients of `CONFIG`; the mean ratio."""
    loss = a2c_loss(*net(states), actions, returns, entropy_coef=0.05, value_coef=0.7, behaviour_log_probs=behaviour)
    optimizer.zero_grad()
    loss.total.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.4)
    optimizer.step()
    return float(loss.ratio)


def flat(net: MlpA2C) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@torch.no_grad()
def values_now(net, rollout):
    return net(rollout.obs.flatten(0, 1))[1].view(rollout.actions.shape)


def test_clipped_step_equals_plain_torch():
    net = make_net()
    plain = copy.deepcopy(net)
    rollouts = [random_rollout(seed=s) for s in range(4)]
    updates = train(net, rollouts, CONFIG)

    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-4, foreach=False)
    norms = []
    for rollout in rollouts:
        rollout.values = values_now(plain, rollout)
        states, actions, returns = unpack_batch(rollout, plain, gamma=0.9, gae_lambda=0.8, reward_clip=1.5)
        logits, values = plain(states)
        policy = torch.distributions.Categorical(logits=logits)
        log_prob, advantage = policy.log_prob(actions), returns - values.detach()[:, 0]
        ratio = torch.minimum(torch.ones(66), torch.exp(log_prob.detach() - rollout.log_probs.flatten()))
        loss = -(ratio * advantage * log_prob).mean() + 0.7 * ((returns - values[:, 0]) ** 2).mean()
        loss = loss - 0.05 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.sqrt(sum((p.grad**2).sum() for p in plain.parameters()))))
        for p in plain.parameters():
            p.grad *= min(1.0, 0.4 / norms[-1])
        optimizer.step()
    assert min(norms) > 0.4  # the clip was at work
    assert [float(norm) for _, norm in updates] == pytest.approx(norms, rel=1e-4)
    last = updates[-1][0]
    assert float(last.loss.total) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert float(last.returns) == pytest.approx(float(returns.mean()), rel=1e-4)
    assert float(last.values) == pytest.approx(float(values.detach().mean()), rel=1e-4)
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 3])
def test_learn_takes_each_minibatch_once_per_epoch_with_ratios_to_the_policy_that_acted(epochs):
    config = replace(CONFIG, network="mlp", epochs=epochs, num_minibatches=2, num_envs=10, lr_final=1.0, shuffle=False)
    rollout = random_rollout(envs=10)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)
        plain = copy.deepcopy(learner.net)
        with torch.no_grad():  # the policy that acts is the one that learns first
            log_probs = torch.log_softmax(plain(rollout.obs.flatten(0, 1))[0], 1)
        rollout.log_probs = log_probs.gather(1, rollout.actions.flatten()[:, None]).view(6, 10)
        learner.learn(rollout)
    assert learner.updates == 2 * epochs and learner.env_steps == 60
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, eps=1e-4)
    ratios = []
    for half in [*rollout.split(2)] * epochs:
        half.values = values_now(plain, half)
        states, actions, returns = unpack_batch(half, plain, gamma=0.9, gae_lambda=0.8, reward_clip=1.5)
        ratios.append(plain_step(plain, optimizer, states, actions, returns, half.log_probs.flatten()))
    assert ratios[0] == pytest.approx(1.0) and max(ratios[1:]) < 0.9999
    assert learner.metrics()["ratio"] == pytest.approx(ratios[-1], rel=1e-4)
    torch.testing.assert_close(flat(learner.net), flat(plain), rtol=1e-4, atol=1e-6)


def test_learn_shuffles_all_decisions_anew_in_each_epoch_with_returns_of_its_beginning():
    config = replace(CONFIG, network="mlp", epochs=2, num_minibatches=3, num_envs=11, lr_final=1.0)
    rollout = random_rollout()
    seen: list[Tensor] = []
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)
        plain = copy.deepcopy(learner.net)

        def spy(minibatch, *args):
            seen.append(minibatch.obs)
            return learner.take_step(minibatch, *args)

        learner.replace_step(spy)
        learner.learn(rollout)
    assert [len(obs) for obs in seen] == [22] * 6
    everything = rollout.obs.flatten(0, 1)
    places = [int((everything == row).all(1).nonzero()) for obs in seen for row in obs]
    for epoch in (places[:66], places[66:]):
        assert sorted(epoch) == list(range(66)) and epoch != sorted(epoch)
        assert len({place % 11 for place in epoch[:22]}) > 5  # of most environments, not the window of a few
    assert places[:66] != places[66:]

    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, eps=1e-4)
    columns = rollout.actions.flatten(), rollout.log_probs.flatten()
    for step, index in enumerate(torch.tensor(places).split(22)):
        if step % 3 == 0:
            if step:
                rollout.values = values_now(plain, rollout)
            returns = unpack_batch(rollout, plain, gamma=0.9, gae_lambda=0.8, reward_clip=1.5)[2]
        actions, behaviour = (column[index] for column in columns)
        plain_step(plain, optimizer, everything[index], actions, returns[index], behaviour if step else None)
    torch.testing.assert_close(flat(learner.net), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("log_eps", [None, 0.2])
@pytest.mark.parametrize("off_policy", [False, True])
def test_compute_gradients_passes_the_policy_lag_and_log_eps_to_the_loss(off_policy, log_eps):
    net, rollout = make_net(), random_rollout()
    rollout.values = values_now(net, rollout)
    states, actions, returns = unpack_batch(rollout, net, gamma=0.9, gae_lambda=0.8, reward_clip=1.5)
    behaviour = rollout.log_probs.flatten() if off_policy else None
    expected = a2c_loss(*net(states), actions, returns, log_eps=log_eps or 0.0, behaviour_log_probs=behaviour)
    config = replace(CONFIG, log_eps=log_eps)
    with closing(Compute(config)) as compute:
        loss = learn(net, net, make_optimizer(net, config), rollout, config, compute, off_policy)[0].loss
    torch.testing.assert_close((loss.policy, loss.ratio), (expected.policy, expected.ratio))
    assert (float(loss.ratio) < 1) == off_policy


@pytest.mark.parametrize(("bound", "clipped"), [(0.05, True), (100.0, False)])
def test_clipped_step_is_no_longer_than_max_grad_norm(bound, clipped):
    # A step of plain gradient descent at rate 1 is as long as the gradient itself.
    net = make_net()
    before = flat(net)
    config = replace(CONFIG, max_grad_norm=bound)
    ((_, norm),) = train(net, [random_rollout()], config, torch.optim.SGD(net.parameters(), lr=1.0))
    assert (float(norm) > bound) == clipped  # reported before clipping
    length = float((flat(net) - before).norm())
    assert length == pytest.approx(bound if clipped else float(norm), rel=1e-3)


@pytest.mark.parametrize("form", ["rollout", "decisions", "list"])
def test_compute_gradients_on_two_threads_equals_one(form):
    # 11 environments make shards of 6 and 5, 65 decisions or transitions shards of 33 and 32: their weights differ.
    batches = [random_rollout(seed=s) for s in range(3)]
    config = CONFIG
    if form == "list":
        config = replace(CONFIG, gae_lambda=1.0)
        batches = [Transitions(list(map(Experience, *flat_transitions(rollout)))[:65]) for rollout in batches]
    if form == "decisions":
        indices = [torch.randperm(66, generator=torch.Generator().manual_seed(0))[:65]]
        batches = [d for rollout in batches for d in rollout.shuffled(make_net(), indices, 0.9, 0.8, 1.5)]
    nets = [make_net(), make_net()]
    one, two = (train(net, batches, replace(config, threads=t)) for net, t in zip(nets, (1, 2), strict=True))
    torch.testing.assert_close(flat(nets[0]), flat(nets[1]), rtol=1e-4, atol=1e-6)
    for (mine, norm), (theirs, their_norm) in zip(one, two, strict=True):
        torch.testing.assert_close((mine[1:], norm), (theirs[1:], their_norm), rtol=1e-4, atol=1e-5)


class Masking(MlpA2C):
    """Gives the first action no chance at all, also where it was taken."""

    def forward(self, obs):
        logits, values = super().forward(obs)
        return logits.index_fill(1, torch.tensor([0]), -torch.inf), values


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_learn_raises_at_an_infinite_loss_though_its_gradients_are_finite(advantage):
    net, rollout = Masking((4,), 3), random_rollout()
    rollout.actions.zero_()
    rollout.rewards.fill_(100 * advantage)
    shared = Shared(net, make_optimizer(net, CONFIG), None, 0)
    with closing(Compute(CONFIG)) as compute:
        learner = Learner(CONFIG, spaces((4,), 3), compute, shared)
        with pytest.raises(FloatingPointError, match=r"policy loss is -?inf at update 1;"):
            learner.learn(rollout, [rollout])
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_learn_raises_at_a_parameter_that_a_step_has_made_infinite():
    config = replace(CONFIG, network="mlp", epochs=1)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)
        step = learner.optimizer.step

        def poison():
            step()
            with torch.no_grad():
                learner.net.policy[0].weight[0, 0] = torch.inf

        learner.optimizer.step = poison
        with pytest.raises(FloatingPointError, match="parameters are NaN or infinite after update 1;"):
            learner.learn(random_rollout(), num_minibatches=1)


def test_learn_raises_at_a_norm_that_is_nan_though_the_loss_is_finite():
    config = replace(CONFIG, network="mlp", epochs=1)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)

        def step(*args):
            terms, norm = learner.take_step(*args)
            return terms, norm * torch.nan

        learner.replace_step(step)
        with pytest.raises(FloatingPointError, match="the gradient's norm is nan at update 1;"):
            learner.learn(random_rollout(), num_minibatches=1)


def flat_transitions(rollout: Rollout) -> tuple[list, list, list, list]:
    """States, actions, rewards and last states of some transitions; which, does not matter."""
    states = list(rollout.obs.flatten(0, 1).numpy())
    rewards = rollout.rewards.flatten().tolist()
    return states, rollout.actions.flatten().tolist(), rewards, [*states[1:], None]


def test_learn_from_transitions_equals_learn_from_the_rollout():
    # One decision per window, none ending, and the log_probs of the network itself: ratios of 1.
    config = replace(CONFIG, gae_lambda=1.0, rollout_steps=1, reward_clip=0.0)
    nets, rollout = [make_net(), make_net()], random_rollout(steps=1, envs=40)
    rollout.terminated[:], rollout.truncated[:] = False, False
    rollout.final_index, rollout.final_obs = rollout.final_index[:0], rollout.final_obs[:0]
    rollout.final_rnn_state = rollout.final_rnn_state[:0]
    with torch.no_grad():
        log_probs = nets[0](rollout.obs[0])[0].log_softmax(1)
    rollout.log_probs = log_probs.gather(1, rollout.actions[0][:, None]).T
    states, actions, rewards, _ = flat_transitions(rollout)
    transitions = Transitions(list(map(Experience, states, actions, rewards, rollout.next_obs.numpy())))
    for net, batch in zip(nets, (rollout, transitions), strict=True):
        train(net, [batch], config)
    torch.testing.assert_close(flat(nets[0]), flat(nets[1]), rtol=1e-4, atol=1e-6)


def test_learning_rate_moves_linearly_to_lr_final_or_stays():
    falling = Config(learning_rate=0.004, total_env_steps=1000, lr_final=0.0, schedule_end=1.0)
    assert [learning_rate(falling, n) for n in (0, 250, 500, 1000, 2000)] == pytest.approx([0.004, 0.003, 0.002, 0, 0])
    assert learning_rate(replace(falling, lr_final=1.0), 900) == 0.004
    short = replace(falling, lr_final=0.25, schedule_end=0.5)
    assert [learning_rate(short, n) for n in (0, 250, 500, 900)] == pytest.approx([0.004, 0.0025, 0.001, 0.001])


def test_entropy_coef_is_held_and_then_moves_linearly_to_entropy_final():
    config = Config(entropy_coef=0.02, total_env_steps=1000, entropy_final=1.0, schedule_end=1.0)
    assert [entropy_coef(config, n) for n in (0, 900, 2000)] == [0.02] * 3
    falling = replace(config, entropy_final=0.5, entropy_hold=0.4)
    wanted = [0.02, 0.02, 0.015, 0.01, 0.01]
    assert [entropy_coef(falling, n) for n in (0, 400, 700, 1000, 2000)] == pytest.approx(wanted)
    at_the_end = replace(falling, entropy_hold=1.0, schedule_end=0.5)
    assert [entropy_coef(at_the_end, n) for n in (0, 499, 500, 900)] == pytest.approx([0.02] * 4)
    at_once = replace(falling, entropy_hold=0.0, schedule_end=0.5)
    assert [entropy_coef(at_once, n) for n in (0, 250, 500)] == pytest.approx([0.02, 0.015, 0.01])


def test_exploration_noise_falls_linearly_to_zero_at_its_end():
    config = Config(exploration_noise=2.0, exploration_rewards=500)
    assert [exploration_noise(config, n) for n in (0, 125, 250, 500, 900)] == pytest.approx([2.0, 1.5, 1.0, 0.0, 0.0])
    assert [exploration_noise(Config(), n) for n in (0, 900)] == [0.0, 0.0]


@pytest.mark.parametrize(("noise", "rewards"), [(0.0, 0), (1.0, 0), (1.0, 1000)])
def test_with_exploration_noise_the_first_step_weighs_decisions_by_their_ratios_too(noise, rewards):
    config = replace(CONFIG, network="mlp", num_minibatches=1, num_envs=10, epochs=1, exploration_noise=noise)
    rollout = random_rollout(envs=10)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)
        with torch.no_grad():
            log_probs = learner.net(rollout.obs.flatten(0, 1))[0].log_softmax(1)
        taken = log_probs.gather(1, rollout.actions.flatten()[:, None]).squeeze(1)
        weighed = noise > 0 and rewards < 1000
        ratio = (taken - rollout.log_probs.flatten()).exp().clamp(max=1.0).mean() if weighed else 1.0
        learner.set_counts(0, 0, rewards)
        learner.learn(rollout)
    assert learner.metrics()["ratio"] == pytest.approx(float(ratio))
    assert float(ratio) < 0.95 or not weighed


def test_exploration_noise_falls_with_rewards_and_returns_where_there_are_none():
    config = replace(CONFIG, network="mlp", num_minibatches=2, num_envs=10, rollout_steps=6, epochs=2)
    config = replace(config, exploration_noise=2.0, exploration_rewards=4)
    rollout, seen = random_rollout(envs=10), []
    share = len(rollout) / UNREWARDED  # what a rollout without a reward takes back
    with closing(Compute(config)) as compute:
        learner, resumed = (Learner(config, spaces((4,), 3), compute) for _ in range(2))
        for rewards in ([0.0, 0.0], [1.0, -0.5], [0.0, 0.0], [100.0, 0.0], [-1.0, 1.0], [0.0, 0.0]):
            rollout.rewards.zero_()
            rollout.rewards[[0, 3], [4, 9]] = torch.tensor(rewards)
            learner.learn(rollout)
            resumed.load_state_dict(learner.state_dict())
            assert learner.metrics()["exploration_noise"] == resumed.metrics()["exploration_noise"]
            assert resumed.metrics()["exploration_noise"] == pytest.approx(2.0 - resumed.reward_count / 2)
            seen.append(resumed.reward_count)
        old = {name: value for name, value in learner.state_dict().items() if name != "rewards"}
        resumed.load_state_dict(old)
    assert seen == pytest.approx([0, 2, 2 - share, 3 - share, 4, 4 - share])  # 0 to 4
    assert resumed.reward_count == 0 and resumed.env_steps == learner.env_steps


def test_exploration_noise_returns_after_a_whole_rollout_of_decisions_without_reward_in_however_many_parts():
    config = replace(CONFIG, network="mlp", num_minibatches=2, num_envs=10, rollout_steps=6, epochs=1)
    config = replace(config, exploration_noise=2.0, exploration_rewards=100)
    rewards = torch.zeros(4, 6, 10)  # of four rollouts, each learned whole or in five parts of two environments
    rewards[0, 2, 3] = rewards[2, 5, 9] = 1.0
    counts = []
    with closing(Compute(config)) as compute:
        for parts in (1, 5):
            learner, rollout = Learner(config, spaces((4,), 3), compute), random_rollout(envs=10)
            learner.set_counts(0, 0, 50.0)
            for paid in rewards:
                rollout.rewards.copy_(paid)
                for part in rollout.split(parts):
                    learner.learn(part)
                counts.append(learner.reward_count)
    fall = 60 / UNREWARDED
    assert counts[:4] == pytest.approx([51, 51 - fall, 52 - fall, 52 - 2 * fall])
    # The second of five parts was paid, so the count falls with the second of each rollout after it.
    assert counts[4:] == pytest.approx([51, 51 - fall, 52 - 2 * fall, 52 - 3 * fall])


def test_learn_uses_the_schedules_at_the_decisions_before_the_rollout():
    config = replace(CONFIG, network="mlp", num_minibatches=1, num_envs=10, total_env_steps=240, max_grad_norm=0.0)
    config = replace(config, lr_final=0.2, entropy_final=0.4, entropy_hold=0.0, schedule_end=1.0)
    rollout = random_rollout(envs=10)
    with closing(Compute(config)) as compute:
        scheduled = Learner(config, spaces((4,), 3), compute)
        constant = replace(config, learning_rate=0.006, lr_final=1.0, entropy_coef=0.035, entropy_final=1.0)
        expected = Learner(constant, spaces((4,), 3), compute)
        for learner in (scheduled, expected):
            learner.set_counts(120, 0, 0)
            learner.learn(rollout)
            learner.sync()
    torch.testing.assert_close(flat(scheduled.net), flat(expected.net))
    metrics = scheduled.metrics()
    assert metrics["loss_entropy"] == pytest.approx(-0.035 * metrics["entropy"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_learn_cuts_a_rollout_into_as_many_minibatches_as_it_is_told(shuffle):
    config = replace(CONFIG, network="mlp", num_envs=10, num_minibatches=5, epochs=2, shuffle=shuffle)
    rollout = random_rollout(envs=10)
    with closing(Compute(config)) as compute:
        told = Learner(config, spaces((4,), 3), compute)
        told.learn(rollout, num_minibatches=3)
        expected = Learner(replace(config, num_minibatches=3), spaces((4,), 3), compute)
        expected.learn(rollout)
    assert told.updates == expected.updates == 2 * 3
    torch.testing.assert_close(flat(told.net), flat(expected.net), rtol=0, atol=0)


def test_learn_moves_nothing_once_the_learning_rate_has_fallen_to_zero():
    config = replace(CONFIG, network="mlp", lr_final=0.0, schedule_end=0.5, total_env_steps=1000)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)
        before = flat(learner.net)
        learner.set_counts(500, 0, 0.0)
        learner.learn(random_rollout())
        assert learner.updates > 0 and torch.equal(flat(learner.net), before)
        learner.set_counts(400, 0, 0.0)
        learner.learn(random_rollout())
        assert not torch.equal(flat(learner.net), before)


@pytest.mark.parametrize("threads", [1, 2])
def test_learn_with_the_same_seed_gives_the_same_weights_bit_for_bit(threads):
    config = replace(CONFIG, env="CartPole-v1", backend="sync", num_envs=8, rollout_steps=8, threads=threads)

    def weights(seed: int) -> Tensor:
        compute = Compute(config)  # before the network: orthogonal starts depend on torch's thread count
        torch.manual_seed(seed)
        net = MlpA2C((4,), 2)
        with closing(make_envs(replace(config, seed=seed))) as envs, closing(compute):
            collector, optimizer = Collector([envs], net, 8, compute, seed), make_optimizer(net, config)
            for _ in range(3):
                for batch in collector.collect().rollout.split(2):
                    learn(net, net, optimizer, batch, config, compute)
        return flat(net)

    first = weights(0)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_sync_replica_copies_float32_parameters_to_bfloat16():
    config = replace(CONFIG, precision="bfloat16")
    master = make_net()
    before, optimizer = flat(master), make_optimizer(master, config)
    with closing(Compute(config)) as compute:
        replica = make_replica(master, compute)
        for seed in range(3):
            update, _ = learn(master, replica, optimizer, random_rollout(seed=seed), config, compute)
    outputs = {"policy.4.weight", "policy.4.bias", "value.4.weight", "value.4.bias"}
    assert replica is not master
    for name, parameter in replica.named_parameters():
        assert parameter.dtype == (torch.float32 if name in outputs else torch.bfloat16), name
    assert {p.dtype for p in master.parameters()} == {p.grad.dtype for p in master.parameters()} == {torch.float32}
    assert not torch.equal(flat(master), before)
    assert not torch.equal(flat(master).bfloat16().float(), flat(master))  # the master keeps its fine digits
    for mine, theirs in zip(replica.parameters(), master.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))
    assert update.loss.total.dtype == torch.float32


def test_learn_in_bfloat16_takes_nearly_the_step_of_float32():
    steps = []
    for precision in ("float32", "bfloat16"):
        net = make_net()
        before = flat(net)
        train(net, [random_rollout()], replace(CONFIG, precision=precision), torch.optim.SGD(net.parameters(), lr=1.0))
        steps.append(flat(net) - before)
    assert torch.cosine_similarity(*steps, dim=0) > 0.99


def test_make_replica_shares_the_pixel_statistics():
    net = make_network(Config(network="small"), (4, 42, 42), 6, stacked=True)
    with closing(Compute(CONFIG)) as exact, closing(Compute(replace(CONFIG, precision="bfloat16"))) as compute:
        assert make_replica(net, exact) is net
        replica = make_replica(net, compute)
    net.normalizer.update(torch.randint(0, 256, (9, 42, 42), dtype=torch.uint8))
    assert torch.equal(replica.normalizer.mean, net.normalizer.mean)
    assert {x.dtype for x in (replica.normalizer.mean, replica.normalizer.var)} == {torch.float64}
    assert replica.conv(torch.zeros(2, 4, 42, 42, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_make_replica_shares_the_pixel_statistics_of_a_normaliser_that_is_a_layer_too():
    net = make_network(Config(network="small"), (4, 42, 42), 6, stacked=True)
    net.first = torch.nn.Sequential(net.normalizer)
    with closing(Compute(replace(CONFIG, precision="bfloat16"))) as compute:
        replica = make_replica(net, compute)
    assert replica.first[0] is replica.normalizer is net.normalizer
    sync_replica(replica, net)  # which pairs their buffers


def test_learner_that_shares_its_network_has_its_own_statistics_in_every_layer():
    net = make_network(Config(network="small"), (4, 42, 42), 6, stacked=True)
    net.first = torch.nn.Sequential(net.normalizer, torch.nn.BatchNorm2d(4))
    with closing(Compute(CONFIG)) as compute:
        shared = Shared(net, make_optimizer(net, CONFIG), copy.deepcopy(net.normalizer), 0)
        learner = Learner(CONFIG, spaces((4, 42, 42), 6), compute, shared)
    assert learner.normalizer is learner.net.normalizer is learner.net.first[0] is not net.normalizer
    assert learner.replica.first[0] is learner.normalizer  # which `sync` sets to the merged statistics
    theirs = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, mine in (*learner.net.named_parameters(), *learner.net.named_buffers()):
        assert (mine is theirs[name]) == ("normalizer" not in name), name  # steps reach the shared network
    with torch.no_grad():
        net.normalizer.mean.fill_(9.0)
    assert not learner.net.first[0].mean.eq(9.0).any()


@pytest.mark.parametrize(
    ("network", "shape"), [("atari", (4, 42, 42)), ("small", (4, 42, 42)), ("mlp", (4,)), ("lstm", (4,))]
)
def test_make_replica_has_values_finer_than_bfloat16(network, shape):
    # Near 90 bfloat16 has the halves alone; a value head in it could say nothing else.
    torch.manual_seed(0)
    config = replace(CONFIG, precision="bfloat16")
    net = make_network(replace(config, network=network), shape, 3, stacked=True)
    last = net.value[-1] if isinstance(net.value, torch.nn.Sequential) else net.value
    with torch.no_grad():
        last.bias.fill_(90.0)
    obs = torch.randint(0, 256, (2, 16, *shape), dtype=torch.uint8)
    with closing(Compute(config)) as compute, torch.no_grad():
        replica = make_replica(net, compute)
        outputs = [*replica(obs[0]), *replay(replica, obs, torch.zeros(2, 16).bool(), initial_state(net, 16))]
    assert [x.dtype for x in outputs] == [torch.float32] * 4
    for values in outputs[1::2]:
        assert len(values.unique()) > 10 and (values != values.bfloat16()).float().mean() > 0.5


def test_learn_in_bfloat16_fits_large_returns_as_in_float32():
    # Returns of 90 that spread by 0.2. A value head in bfloat16 would err by half of its grid, 0.15 and more.
    obs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    returns = 90.0 + 0.2 * torch.tanh(obs[:, 0])
    batch = Transitions([Experience(state, 0, float(g), None) for state, g in zip(obs, returns, strict=True)])
    errors = {}
    for precision in ("float32", "bfloat16"):
        config = replace(CONFIG, gae_lambda=1.0, precision=precision, value_coef=1.0, max_grad_norm=0.0)
        net = make_net()
        with torch.no_grad():
            net.value[-1].bias.fill_(89.0)
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        with closing(Compute(config)) as compute:
            replica = make_replica(net, compute)
            for step in range(300):
                optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 300)
                learn(net, replica, optimizer, batch, config, compute)
            with torch.no_grad():
                errors[precision] = float((replica(obs)[1][:, 0].float() - returns).std())
    assert errors["float32"] < 0.05 < returns.std(), errors
    assert errors["bfloat16"] < 1.2 * errors["float32"], errors


def make_learner(compute, **changes):
    return Learner(replace(CONFIG, network="mlp", num_envs=11, epochs=1, **changes), spaces((4,), 3), compute)


def test_learner_draws_its_first_parameters_from_the_seed():
    with closing(Compute(CONFIG)) as compute:
        nets = [make_learner(compute, seed=seed).net.state_dict().values() for seed in (1, 1, 2)]
    assert all(map(torch.equal, nets[0], nets[1])) and not all(map(torch.equal, nets[0], nets[2]))


def test_learn_shuffles_in_another_order_for_each_seed_and_rollout():
    def orders(seed):
        seen = []
        with closing(Compute(CONFIG)) as compute:
            learner = make_learner(compute, num_minibatches=1, seed=seed)
            take_step = learner.take_step
            learner.replace_step(lambda minibatch, *rest: seen.append(minibatch.obs) or take_step(minibatch, *rest))
            for _ in range(2):
                learner.learn(random_rollout())
        return seen

    first, second = orders(0)
    assert all(map(torch.equal, (first, second), orders(0)))
    assert not torch.equal(first, second) and not torch.equal(first, orders(1)[0])


def test_learn_feeds_the_normalizer_after_its_steps():
    config, counts = replace(CONFIG, network="small", num_envs=2, num_minibatches=2, epochs=2), []
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4, 42, 42), 3, stacked=True), compute)
        take_step = learner.take_step
        learner.replace_step(lambda *args: counts.append(int(learner.normalizer.count)) or take_step(*args))
        for _ in range(2):
            learner.learn(Rollout.empty(5, torch.zeros(2, 4, 42, 42, dtype=torch.uint8)))
    assert counts == [0] * 4 + [4] * 4  # the policy acted with these; 2 of 5 steps of 2 environments are counted


def test_learn_refuses_a_rollout_without_the_final_observation_of_a_truncated_step():
    rollout = random_rollout()
    rollout.final_index = rollout.final_index[1:]
    with closing(Compute(CONFIG)) as compute:
        learner = make_learner(compute, num_minibatches=1)
        with pytest.raises(ValueError, match="final_index must name each step"):
            learner.learn(rollout)
        assert learner.updates == 0


def test_metrics_of_a_learner_are_those_of_its_last_update_or_of_the_checkpoint_it_went_back_to():
    with closing(Compute(CONFIG)) as compute:
        learner = make_learner(compute, num_minibatches=1)
        learner.learn(random_rollout())
        state = learner.state_dict()
        first = dict(state["metrics"])
        assert first and first == learner.update_metrics()
        learner.learn(random_rollout(seed=1))
        assert learner.update_metrics() != first
        learner.load_state_dict(state)
        assert learner.update_metrics() == first
