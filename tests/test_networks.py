"""The networks: the classic's names and sizes, the pixel normaliser against numpy, the start of training."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from a2c.config.config import Config
from a2c.config.resolve import network_kind
from a2c.networks import AtariA2C, MlpA2C, SharedA2C, make_network
from a2c.normalizers import FrameNorm, PixelNorm, slots_like

CLASSIC = {  # parameter: shape; the frame shrinks 84 -> 20 -> 9 -> 7, and 64 * 7 * 7 = 3136
    "conv.0.weight": (32, 4, 8, 8),
    "conv.0.bias": (32,),
    "conv.2.weight": (64, 32, 4, 4),
    "conv.2.bias": (64,),
    "conv.4.weight": (64, 64, 3, 3),
    "conv.4.bias": (64,),
    "policy.0.weight": (512, 3136),
    "policy.0.bias": (512,),
    "policy.2.weight": (6, 512),
    "policy.2.bias": (6,),
    "value.0.weight": (512, 3136),
    "value.0.bias": (512,),
    "value.2.weight": (1, 512),
    "value.2.bias": (1,),
}


class NotebookA2C(nn.Module):
    """The module of the classic notebook, with the initialisation and the division by 256 that it has."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1))
        self.conv = nn.Sequential(*(layer for c in convolutions for layer in (c, nn.ReLU())))
        self.policy = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(x.float() / 256).view(len(x), -1)
        return self.policy(features), self.value(features)


def frames(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture(scope="module")
def classic() -> AtariA2C:
    torch.manual_seed(0)
    return AtariA2C()


def test_atari_a2c_has_the_classic_parameter_names_and_shapes(classic):
    assert {name: tuple(tensor.shape) for name, tensor in classic.state_dict().items()} == CLASSIC


def test_atari_a2c_parameter_count_by_hand(classic):
    convolutions = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64
    heads = 2 * (3136 + 1) * 512 + (512 + 1) * (6 + 1)
    assert sum(p.numel() for p in classic.parameters()) == convolutions + heads == 3_293_863


def test_atari_a2c_loads_a_notebook_s_weights_and_computes_the_same(classic):
    torch.manual_seed(1)
    notebook, net = NotebookA2C(), AtariA2C()
    net.load_state_dict(notebook.state_dict(), strict=True)
    obs = frames(3, 4, 84, 84)
    with torch.no_grad():
        torch.testing.assert_close(net(obs), notebook(obs))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("kind", "size"), [("atari", 36), ("atari", 42), ("nature", 42), ("small", 42)])
def test_networks_have_the_documented_output_shapes_and_float_agrees_with_uint8(kind, size, normalize):
    net = make_network(Config(network=kind, normalize_obs=normalize), (4, size, size), 3, stacked=True)
    obs = frames(5, 4, size, size)
    with torch.no_grad():
        logits, values = net(obs)
        as_float = net(obs.float())
    assert (logits.shape, values.shape) == ((5, 3), (5, 1))
    assert torch.equal(as_float[0], logits) and torch.equal(as_float[1], values)
    assert values.std() > 0  # the observation is seen at all


def test_shared_a2c_has_the_documented_layers():
    def shapes(net: nn.Module) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in net.parameters() if p.ndim > 1]

    nature = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (6, 512), (1, 512)]
    nips = [(16, 4, 8, 8), (32, 16, 4, 4), (256, 32 * 9 * 9), (6, 256), (1, 256)]  # 84 -> 20 -> 9
    small = [(16, 4, 4, 4), (32, 16, 4, 4), (256, 32 * 9 * 9), (6, 256), (1, 256)]  # 42 -> 20 -> 9
    for kind, size, documented in (("nature", 84, nature), ("nips", 84, nips), ("small", 42, small)):
        assert shapes(SharedA2C(kind, (4, size, size), 6)) == documented
        assert shapes(make_network(Config(network=kind), (4, size, size), 6, stacked=True)) == documented


def test_pixel_norm_update_equals_numpy_over_all_batches():
    norm, generator = PixelNorm((5, 7)), np.random.default_rng(0)
    scale = generator.integers(1, 256, (5, 7))
    batches = [generator.integers(0, scale, (n, 5, 7)) // (i + 1) for i, n in enumerate((1, 40, 3, 17))]
    for batch in batches:
        norm.update(torch.from_numpy(batch.astype(np.uint8)))
    whole = np.concatenate(batches)
    np.testing.assert_allclose(norm.mean, whole.mean(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(norm.var.sqrt(), whole.std(0), rtol=1e-4, atol=1e-3)
    assert int(norm.count) == len(whole)


def test_pixel_norm_merge_equals_numpy_over_all_frames():
    batches = [frames(n, 5, 7, seed=n) // (n % 3 + 1) for n in (40, 3, 17)]
    whole = torch.cat([frames(2, 5, 7), *batches]).double().numpy()
    saved = PixelNorm((5, 7))
    saved.update(frames(2, 5, 7))
    parts = slots_like(saved, 4)
    for part, batch in zip(parts, batches, strict=False):  # the fourth has seen nothing
        part.update(batch)
    norm = PixelNorm((5, 7))
    for _ in range(2):  # what was merged before is of no account
        norm.merge(parts)
        np.testing.assert_allclose(norm.mean, whole.mean(0), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(norm.var.sqrt(), whole.std(0), rtol=1e-4, atol=1e-3)
        assert int(norm.count) == len(whole) == 62


@pytest.mark.parametrize("kind", [partial(PixelNorm, (5, 7)), FrameNorm], ids=["pixels", "frames"])
def test_merge_of_one_part_changes_no_bit(kind):
    part, norm = kind(), kind()
    for fed in (0, 1, 30, 3):
        part.update(frames(fed, 5, 7, seed=fed)) if fed else None
        norm.merge([part, *slots_like(part, 3)[1:]])
        assert all(torch.equal(mine, own) for mine, own in zip(norm.buffers(), part.buffers(), strict=True))


def test_frame_norm_merge_weights_averages_by_what_each_has_seen():
    saved = FrameNorm()
    saved.update(frames(50, 5, 7))
    parts = slots_like(saved, 3)
    parts[1].update(frames(7, 5, 7, seed=1) // 3)
    norm = FrameNorm()
    norm.merge(parts)
    weights = [1 - 0.9999**50, 1 - 0.9999**7]
    averages = [float(part.mean) / weight for part, weight in zip(parts, weights, strict=False)]
    assert averages[0] > 2 * averages[1]
    assert float(norm.mean) / (1 - 0.9999**57) == pytest.approx(np.average(averages, weights=weights), rel=1e-9)
    assert int(norm.count) == 57


def test_pixel_norm_centres_scales_and_clips():
    norm = PixelNorm((1, 2))
    norm.update(torch.tensor([[[10, 200]], [[10, 206]]], dtype=torch.uint8))
    # Pixel 0 never moves: mean 10, variance 0 + 1. Pixel 1: mean 203, variance 9 + 1.
    obs = torch.tensor([[[10, 203]], [[12, 213]], [[255, 0]]], dtype=torch.uint8).unsqueeze(1)  # [3, 1, 1, 2]
    expected = torch.tensor([[0.0, 0.0], [2.0, math.sqrt(10)], [5.0, -5.0]]).reshape(3, 1, 1, 2)
    for given in (obs, obs.float()):
        torch.testing.assert_close(norm(given), expected)
    assert obs.flatten().tolist() == [10, 203, 12, 213, 255, 0]  # the input is left alone


def test_pixel_norm_statistics_are_changed_by_update_alone():
    net = make_network(Config(network="small"), (4, 42, 42), 6, stacked=True).train()
    net.normalizer.update(frames(9, 42, 42))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net(frames(8, 4, 42, 42, seed=1))[1].sum().backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    net.normalizer.update(frames(9, 42, 42, seed=2))
    assert not torch.equal(before["normalizer.mean"], net.normalizer.mean)


def test_pixel_norm_statistics_are_in_the_state_dict():
    trained, fresh = (make_network(Config(network="small"), (4, 42, 42), 6, stacked=True) for _ in range(2))
    trained.normalizer.update(frames(9, 42, 42))
    assert {"normalizer.mean", "normalizer.var", "normalizer.count"} <= set(trained.state_dict())
    fresh.load_state_dict(trained.state_dict())
    obs = frames(2, 4, 42, 42, seed=1)
    assert torch.equal(trained(obs)[0], fresh(obs)[0])
    assert int(fresh.normalizer.count) == 9


def test_orthogonal_init_makes_orthogonal_weights(classic):
    gains = dict.fromkeys((name for name in CLASSIC if name.endswith("weight")), math.sqrt(2))
    gains |= {"policy.2.weight": 0.01, "value.2.weight": 1.0}
    state = classic.state_dict()
    for name, gain in gains.items():
        rows = state[name].flatten(1)  # never more rows than columns here, so the rows are orthogonal
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-4 * gain**2)
    assert all(not state[name].any() for name in CLASSIC if name.endswith("bias"))


@pytest.mark.parametrize(("kind", "shape"), [("atari", (4, 84, 84)), ("nature", (4, 42, 42)), ("small", (4, 42, 42))])
def test_orthogonal_init_gives_an_almost_uniform_policy(kind, shape):
    torch.manual_seed(0)
    net = make_network(Config(network=kind), shape, 6, stacked=True)
    with torch.no_grad():
        probabilities = net(frames(16, *shape))[0].softmax(1)
    assert (probabilities - 1 / 6).abs().max() < 0.02


@pytest.mark.parametrize(
    ("network", "shape", "kind"),
    [
        ("auto", (4, 42, 42), AtariA2C),
        ("atari", (4, 42, 42), AtariA2C),
        ("nature", (4, 42, 42), SharedA2C),
        ("small", (4, 42, 42), SharedA2C),
        ("auto", (4,), MlpA2C),
        ("mlp", (3, 2), MlpA2C),
    ],
)
def test_make_network_builds_what_the_config_names(network, shape, kind):
    assert type(make_network(Config(network=network), shape, 2, stacked=True)) is kind


@pytest.mark.parametrize("kind", ["atari", "small"])
def test_scale_pixels_makes_channels_last_for_learning_in_float32_with_the_same_gradient(kind, monkeypatch):
    shape, seen = (4, 42, 42), []
    net = make_network(Config(network=kind, frame_size=42), shape, 6, stacked=True)
    net.conv[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    obs = frames(16, *shape)

    def gradients():
        logits, values = net(obs)
        return torch.autograd.grad((logits.exp() + values).mean(), list(net.parameters()))

    fast = gradients()
    with torch.no_grad():
        net(obs)
    with monkeypatch.context() as plain:
        plain.setattr(torch, "is_grad_enabled", lambda: False)  # what the network asks
        slow = gradients()
    net.bfloat16()
    net(obs)
    innermost = [x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() for x in seen]
    assert innermost == [True, False, False, False]
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["atari", "small", "lstm"])
def test_flat_features_keeps_gradients_in_the_layout_of_the_features(kind):
    shape = (4, 60, 60)
    net = make_network(Config(network=kind, frame_size=60), shape, 6, stacked=True)
    layouts = []
    for layer in net.conv:
        layer.register_full_backward_pre_hook(
            lambda _, gradients: layouts.append(gradients[0].is_contiguous(memory_format=torch.channels_last))
        )
    logits, values = net(frames(16, *shape).float().requires_grad_())
    (logits.exp() + values).mean().backward()
    assert layouts == [True] * len(net.conv)


def test_make_network_makes_the_normalizer_optional():
    assert isinstance(make_network(Config(), (4, 42, 42), 2, stacked=True).normalizer, PixelNorm)
    assert make_network(Config(normalize_obs=False), (4, 42, 42), 2, stacked=True).normalizer is None


def test_make_network_must_be_told_whether_channels_are_frames_or_colours():
    with pytest.raises(TypeError, match="stacked"):
        make_network(Config(), (3, 42, 42), 2)


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        ("atari", (4,), r"network must be mlp or lstm for observations of shape \[4\], got atari"),
        ("small", (3, 2), r"network must be mlp or lstm for observations of shape \[3, 2\], got small"),
        ("atari", (4, 35, 84), "network must be nips, small, lstm or custom for images of 35x84 pixels, got atari"),
        ("nips", (4, 84, 19), "network must be small, lstm or custom for images of 84x19 pixels, got nips"),
        ("nature", (4, 84, 20), "network must be nips, small, lstm or custom for images of 84x20 pixels, got nature"),
        ("nature", (4, 84, 19), "network must be small, lstm or custom for images of 84x19 pixels, got nature"),
    ],
)
def test_make_network_refuses_observations_that_it_cannot_take(network, shape, message):
    with pytest.raises(ValueError, match=message):
        make_network(Config(network=network), shape, 2, stacked=True)


@pytest.mark.parametrize(
    ("network", "size", "kind"),
    [
        ("auto", 10, "small"),
        ("auto", 35, "small"),
        ("auto", 36, "atari"),
        ("nature", 36, "nature"),
        ("nips", 20, "nips"),
    ],
)
def test_make_network_takes_images_down_to_the_size_that_the_convolutions_need(network, size, kind):
    config = Config(network=network)
    assert network_kind(config, (4, size, 84)) == kind
    net = make_network(config, (4, size, 84), 2, stacked=True)
    logits, values = net(torch.zeros(2, 4, size, 84, dtype=torch.uint8))
    assert (logits.shape, values.shape) == ((2, 2), (2, 1))


def test_images_that_are_too_small_for_convolutions_are_vectors():
    assert network_kind(Config(), (4, 9, 84)) == network_kind(Config(), (4, 84, 9)) == "mlp"


@pytest.mark.parametrize("shape", [(84, 84, 6), (84, 84, 3), (84, 84), (4, 84, 84, 3)])
def test_images_in_another_layout_are_vectors_only_where_that_is_asked_for(shape):
    with pytest.raises(ValueError, match=r"network auto must have images of shape \[C, H, W\], or uint8 ones of "):
        network_kind(Config(), shape)
    assert network_kind(Config(network="mlp"), shape) == "mlp"


@pytest.mark.parametrize(("network", "kind"), [("auto", "mlp"), ("lstm", "lstm")])
def test_observations_that_are_single_numbers_are_refused(network, kind):
    with pytest.raises(ValueError, match=f"must be custom for observations that are single numbers, got {kind}"):
        network_kind(Config(network=network), ())


def test_networks_refuse_images_that_are_too_small_for_their_convolutions():
    with pytest.raises(ValueError, match=r"input_shape must be larger for these convolutions, got \[4, 35, 84\]"):
        AtariA2C((4, 35, 84), 2)
