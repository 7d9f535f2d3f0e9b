"""--vary and --seeds: which runs they mean, and what is refused."""

import pytest

from a2c.cli.flags import parse_command, parse_config
from a2c.cli.grid import make_runs, parse_seeds
from a2c.config.config import Config

FLAGS = ["--preset", "cartpole"]


def runs_of(*args):
    return make_runs(*parse_command(["compare", "out", *args]))


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ("0..4", [0, 1, 2, 3, 4]),
        ("0,3,7", [0, 3, 7]),
        ("0 1 2", [0, 1, 2]),
        ("7,0..2 5", [7, 0, 1, 2, 5]),
        ("3..3", [3]),
        ("10..12, 2", [10, 11, 12, 2]),
    ],
)
def test_seeds_may_be_numbers_and_ranges_in_any_mixture(words, seeds):
    assert parse_seeds(words.split()) == parse_seeds([words]) == seeds
    assert sorted({run.config.seed for run in runs_of(*FLAGS, "--seeds", *words.split())}) == sorted(seeds)


def test_every_combination_of_values_is_trained_with_every_seed():
    runs = runs_of(*FLAGS, "--vary", "rollout_steps=20,64", "--vary", "gamma=0.9,0.99", "--seeds", "3,1")
    assert [run.name for run in runs] == [  # all settings of a seed first
        f"gamma={gamma},rollout_steps={steps}/seed-{seed}" for seed in (3, 1) for steps in (20, 64)
        for gamma in (0.9, 0.99)
    ]  # fmt: skip
    for run in runs:
        assert parse_config(run.flags) == run.config
        assert dict(run.varied) == {"gamma": str(run.config.gamma), "rollout_steps": str(run.config.rollout_steps)}


def test_without_vary_the_setting_is_named_by_its_preset():
    (run,) = runs_of(*FLAGS, "--gamma", "0.9")
    assert run.name == "cartpole/seed-0" and run.varied == {} and run.config.gamma == 0.9


@pytest.mark.parametrize(
    ("vary", "names", "values"),
    [
        ("learning-rate=1e-3,0.002", ["learning_rate=0.001", "learning_rate=0.002"], [0.001, 0.002]),
        ("lr=1e-3,0.002", ["learning_rate=0.001", "learning_rate=0.002"], [0.001, 0.002]),
        (
            "env=boxing,CartPole-v1",
            ["env=BoxingNoFrameskip-v4", "env=CartPole-v1"],
            ["BoxingNoFrameskip-v4", "CartPole-v1"],
        ),
        ("normalize_obs=true,false", ["normalize_obs=true", "normalize_obs=false"], [True, False]),
        ("target_score=-5,5", ["target_score=-5.0", "target_score=5.0"], [-5.0, 5.0]),
        ("sticky_actions=None,0.25", ["sticky_actions=None", "sticky_actions=0.25"], [None, 0.25]),
        ("env=ALE/Pong-v5,CartPole-v1", ["env=ALE-Pong-v5", "env=CartPole-v1"], ["ALE/Pong-v5", "CartPole-v1"]),
        ("preset=lstm,pong-fast", ["preset=lstm", "preset=pong-fast"], ["lstm", "pong-fast"]),
        ("algorithm=a2c,a3c,ga3c", [f"algorithm={name}" for name in ("a2c", "a3c", "ga3c")], ["a2c", "a3c", "ga3c"]),
    ],
)
def test_any_field_can_be_varied_and_its_values_are_those_of_train(vary, names, values):
    runs = runs_of("--vary", vary)
    field = names[0].split("=")[0]
    assert [run.setting for run in runs] == names
    assert [getattr(run.config, field) for run in runs] == values


def test_a_preset_that_is_varied_brings_its_other_settings():
    first, second = runs_of("--vary", "preset=cartpole,pong-fast")
    assert first.config == Config.from_preset("cartpole") and second.config == Config.from_preset("pong-fast")


@pytest.mark.parametrize(
    ("args", "threads"),
    [
        (["--jobs", "1"], 0),
        (["--jobs", "2"], 4),
        (["--jobs", "3"], 2),
        (["--jobs", "20"], 1),
        (["--jobs", "2", "--threads", "3"], 3),
        (["--jobs", "2", "--threads", "0"], 0),
        (["--jobs", "2", "--vary", "threads=5"], 5),
        (["--jobs", "2", "--preset", "cartpole-lstm"], 1),  # what the preset says
    ],
)
def test_runs_share_the_cores_where_nothing_sets_their_threads(args, threads, monkeypatch):
    monkeypatch.setattr("a2c.cli.grid.available_cores", lambda: 8)
    (run,) = runs_of(*args)
    assert run.config.threads == parse_config(run.flags).threads == threads


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--vary", "rollout_stps=1"],
            "vary must name an option of train, got 'rollout_stps'; did you mean rollout_s",
        ),
        (["--vary", "gamma"], "vary must be FIELD=VALUE,VALUE, got 'gamma'"),
        (["--vary", "gamma=2"], "gamma must be at least 0.0 and at most 1.0, got 2.0"),
        (["--vary", "gamma=0.9,x"], "--gamma"),
        (["--vary", "gamma=0.9,"], "--gamma"),
        (["--vary", "gamma=0.9,0.90"], "vary must make different settings, got gamma=0.9 twice"),
        (["--num-envs", "4", "--no-shuffle", "--vary", "num_minibatches=4,5"], "got num_minibatches=4 twice"),
        (["--vary", "gamma=0.9", "--vary", "gamma=1"], "vary must name gamma once, got it twice"),
        (["--gamma", "0.9", "--vary", "gamma=0.8"], "gamma must be left out where --vary names it"),
        (
            ["--no-normalize_obs", "--vary", "normalize-obs=true"],
            "normalize_obs must be left out where --vary names it",
        ),
        (["--vary", "normalize_obs=1"], "normalize_obs must be true or false, got '1'"),
        (["--vary", "algorithm=a2c,a4c"], "a4c"),
        (["--vary", "preset=pong-fats"], "did you mean pong-fast"),
        (["--vary", "seed=1,2"], "vary must not name seed: use --seeds"),
        (["--vary", "run_dir=x"], "vary must not name run_dir"),
        (["--algorithms", "a2c"], "did you mean --algorithm?"),
        (["--seed", "3"], "seed must be left out of a comparison: use --seeds"),
        (["--run-dir=x"], "run_dir must be left out of a comparison"),
        (["--resume", "x"], "resume must be left out of a comparison"),
        (["--eval-every", "10"], "eval_every must be left out of a comparison: with keep_policy_every"),
        (["--num-evns", "3"], "did you mean --num-envs"),
        (["--gamma", "2"], "gamma must be at least 0.0 and at most 1.0, got 2"),
        (["--seeds", "-1"], "seed must be at least 0"),
        (["--seeds"], "seeds must be one or more different values"),
        (["--seeds", "0", "0"], "seeds must be one or more different values, got '0 0'"),
        (["--seeds", "2,0..3"], "seeds must be one or more different values, got '2,0..3'"),
        (["--seeds", "4..0"], "seeds must be numbers or rising ranges such as 0..4, got '4..0'"),
        (["--seeds", "0..9999999999"], "a range of seeds must have at most 100,000, got '0..9999999999'"),
        (["--seeds", "1.5"], "got '1.5'"),
        (["--jobs", "0"], "jobs must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_run_is_refused(args, said):
    with pytest.raises(ValueError) as refused:
        runs_of(*args)
    assert said in str(refused.value) and "\n" not in str(refused.value)
