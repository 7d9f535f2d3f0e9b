"""The model card of a run: what its policy is for, what it was trained on, how well it does, what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from a2c.metrics.meters import WINDOW
from a2c.tools.read_run import frames_per_decision, number_in

NAMED = (  # settings in the card
    *("algorithm", "preset", "network", "num_envs", "rollout_steps", "num_minibatches", "epochs", "optimizer"),
    *("learning_rate", "gamma", "gae_lambda", "entropy_coef"),
)
LIMITS = (
    "Number of seeds: 1. Another seed may need several times as many decisions, or end with another score, so this run "
    "alone does not rank settings or algorithms. The policy knows this environment with this preprocessing only, and "
    "acts by sampling: greedy actions may score lower."
)


def model_card(settings: dict[str, Any], summary: Mapping[str, str]) -> list[tuple[str, str]]:
    """Headings and texts, from the `settings` of a run and the rows of its summary."""
    use = f"Plays {summary['Game']}. For the study of actor-critic methods, and as a baseline; for nothing else."
    named = "; ".join(f"{name} {settings[name]}" for name in NAMED if name in settings)
    return [
        ("Intended use", use),
        ("Training data", _training_data(settings, summary)),
        ("Settings", f"{named}. All are in the table below."),
        ("Results", _results(summary)),
        ("Limits", LIMITS),
    ]


def _training_data(settings: dict[str, Any], summary: Mapping[str, str]) -> str:
    decisions, game = summary["Decisions"].partition(" ")[0], summary["Game"]
    text = f"No data set: {decisions} decisions of its own in {game}."
    if (frames := frames_per_decision(game)) == 1:
        return text
    sticky, size = number_in(settings, "sticky_actions"), settings.get("frame_size", "-")
    protocol = [
        f"{frames} emulator frames per decision",
        f"up to {settings.get('noop_max', '-')} no-ops at the start of an episode",
        f"sticky actions {'as registered for the id' if sticky is None else f'with probability {sticky:g}'}",
        f"episodes of at most {number_in(settings, 'max_episode_frames') or 0:,.0f} frames",
        f"observations of {settings.get('frame_stack', '-')} grey frames of {size} by {size} pixels",
        f"a lost life {'is' if settings.get('terminal_on_life_loss') is True else 'is not'} terminal for the learner",
    ]
    if clip := number_in(settings, "reward_clip"):
        protocol.append(f"training rewards clipped at {clip:g} (scores are not)")
    return f"{text} Protocol: {'; '.join(protocol)}."


def _results(summary: Mapping[str, str]) -> str:
    rows = [f"{name}: {text}. " for name, text in summary.items() if name.startswith(("Best", "Mean", "Target"))]
    text = f"One run, seed {summary['Seed']}. {''.join(rows)}"
    if "Evaluation" in summary:
        return text + f"Evaluation of the frozen policy: {summary['Evaluation']}."
    return text + f"Means are of {WINDOW} training episodes, while the policy changed; no frozen policy was evaluated."
