"""Damages the checkpoint of a run in many ways and runs a command on each; a process of its own, because it may die.

`python atari_fuzz.py COMMAND RUN_DIR FIRST LAST` prints a line of JSON per case: what was damaged, exit code, stderr.
"""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from a2c.cli import commands as cli
from a2c.envs.atari import STATE_LIMIT
from a2c.envs.packing import pack, unpack
from a2c.run.values import to_arrays, to_tensors

WRONG = (
    None,
    -1,
    2**70,
    1.5,
    float("nan"),
    "text",
    [],
    [[1]],
    {},
    True,
    np.ones(2, np.float32),
    np.zeros((3, 2), bool),
)


def places(value, path=()):
    """Paths to everything inside nested dictionaries, lists and tuples."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


POLICY = ("format", "config", "input_shape", "n_actions", "network")  # what evaluate and record read


def damage(state, random, policy):
    """Change a checkpoint's state in place, where `policy` what it is made of; says what was done."""
    game = state["algorithm"]["envs"][0]["snapshots"][random.integers(2)][0]
    kind = 5 if policy else random.integers(5)
    if kind == 0:  # bytes of the emulator's state, which its checksum does not show
        content = np.frombuffer(unpack(game["emulator"], STATE_LIMIT), np.uint8).copy()
        at = random.integers(len(content), size=random.integers(1, 200))
        content[at] = random.integers(256, size=len(at))
        short = random.random() < 0.2
        game["emulator"] = pack(content[: len(content) // 2].tobytes() if short else content.tobytes())
        return "emulator"
    if kind == 1:  # the same, as an accident would do it
        packed = game["emulator"]["zlib"] = game["emulator"]["zlib"].copy()
        packed[random.integers(len(packed))] ^= 1 + random.integers(255)
        return "bytes"
    parts = {2: game, 3: state["algorithm"], 4: state, 5: {name: state[name] for name in POLICY}}
    everything = list(places(parts[kind]))
    *above, last = everything[random.integers(len(everything))]
    inside = state if kind == 5 else parts[kind]
    for key in above:
        inside = inside[key]
    inside[last] = WRONG[random.integers(len(WRONG))]
    return f"{above} {last}: {inside[last]!r}"


def main(command, run_dir, first, last):
    content = torch.load(run_dir / "latest.pt", weights_only=True)
    for seed in range(first, last):
        state = to_arrays(content)
        what = damage(state, np.random.default_rng(seed), command != "train" and seed % 4 > 0)
        copy = run_dir.with_name(f"damaged-{command}-{seed}")
        shutil.copytree(run_dir, copy)
        torch.save(to_tensors(state), copy / "latest.pt")
        before = (copy / "latest.pt").read_bytes()
        arguments = {
            "train": ["train", "--resume", str(copy), "--stop-after", "80", "--no-progress"],
            "evaluate": ["evaluate", str(copy), "--episodes", "1"],
            "record": ["record", str(copy), "--out", str(copy / "episode.gif")],
        }[command]
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(arguments)
        kept = code == 0 or (copy / "latest.pt").read_bytes() == before
        print(json.dumps({"seed": seed, "what": what, "code": code, "err": err.getvalue(), "kept": kept}), flush=True)
        shutil.rmtree(copy)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
