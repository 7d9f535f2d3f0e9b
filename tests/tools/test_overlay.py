"""The overlay shows what the policy computed: value, probabilities, the action that was taken."""

import numpy as np
import pytest
import torch
from torch import nn

from a2c.tools.overlay import PANEL, Overlay, Thought
from a2c.tools.rendering import ObservedNet

GREEN, BLUE = (0x70, 0xD0, 0x60), (0x40, 0x80, 0xB0)  # of the bars, in steps of 16


def bars(panel):
    """Pixels of the bar of the action that was taken, and of the others."""
    return [int((panel == colour).all(axis=2).sum()) for colour in (GREEN, BLUE)]


@pytest.mark.parametrize(
    ("size", "width", "n_actions"), [((210, 160), 320, 6), ((400, 600), 480, 2), ((31, 41), 80, 18)]
)
def test_bars_are_as_long_as_the_probabilities(size, width, n_actions):
    overlay = Overlay([f"ACTION{i}" for i in range(n_actions)], width)
    picture = np.full((*size, 3), 200, np.uint8)
    probabilities = np.full(n_actions, 0.4 / (n_actions - 1))
    probabilities[1] = 0.6
    drawn = overlay.draw(picture, 3.0, Thought(0.5, probabilities, 1))
    scale = max(1, width // size[1])
    assert drawn.shape[1] == scale * size[1] + PANEL and drawn.shape[0] >= scale * size[0]
    assert (drawn[: scale * size[0], : scale * size[1]] == 200).all()
    chosen, others = bars(drawn[:, scale * size[1] :])
    assert chosen / (chosen + others) == pytest.approx(0.6, abs=0.15)  # letters are green, too
    over = overlay.draw(picture, 3.0, None)
    assert bars(over[:, scale * size[1] :]) == [0, 0] and over.shape == drawn.shape


def test_the_thought_is_the_output_of_the_network():
    class Net(nn.Module):
        def forward(self, obs):
            return torch.tensor([[0.0, 2.0]]), torch.tensor([[1.5]])

    net = ObservedNet(Net())
    logits, _ = net(torch.zeros(1, 3))
    thought = net.thought(1)
    assert (thought.value, thought.action) == (1.5, 1)
    assert thought.probabilities == pytest.approx(logits.softmax(1)[0].numpy())
