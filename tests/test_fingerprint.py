"""Same seed, same parameters: three rollouts of each preset but pong-sticky, and of a3c, give the bits written down.

The presets for Atari have 16 or 20 environments here, since most of the time goes into starting them: with two
threads, still two groups.

A change that moves them on purpose says so in its commit and writes the new ones:
`python tests/test_fingerprint.py > tests/fingerprints.json`.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

FEW = ["--num-envs", "16"]
RUNS = {  # flags, decisions; `book` plays one decision per rollout and learns as soon as 32 windows are complete
    "default": (["--preset", "default", *FEW], 3 * 32 * 16),
    "pong-fast": (["--preset", "pong-fast", "--backend", "async"], 3 * 128 * 16),
    # With the lambda and the entropy bonus that the preset had when both kinds of processors wrote down their bits.
    "atari": (
        [
            *("--preset", "atari", "--gae-lambda", "0.95", "--entropy-final", "1", "--entropy-hold", "0"),
            *("--backend", "async", "--env", "BreakoutNoFrameskip-v4", *FEW),
        ],
        3 * 64 * 16,
    ),
    "a2c-strict": (["--preset", "a2c-strict", *FEW], 3 * 20 * 16),
    "cartpole": (["--preset", "cartpole"], 3 * 32 * 16),
    "cartpole-lstm": (["--preset", "cartpole-lstm"], 3 * 32 * 16),
    "lstm": (["--preset", "lstm", "--num-envs", "20"], 3 * 40 * 20),
    "book": (["--preset", "book", *FEW], 10 * 16),
    "a3c": (["--preset", "cartpole", "--algorithm", "a3c", "--workers", "1"], 3 * 32 * 16),
}
FILE = Path(__file__).with_name("fingerprints.json")
CPUINFO = Path("/proc/cpuinfo")
VENDOR = (
    next((line.split()[-1] for line in CPUINFO.open() if line.startswith("vendor_id")), "") if CPUINFO.exists() else ""
)
MACHINE = f"{platform.machine()} {VENDOR} torch {torch.__version__.split('+')[0]}"
# Instructions that every processor of the last ten years has: the bits are the same with and without AVX-512.
COMMON = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}


def fingerprint(preset, folder):
    """Hash of the parameters after three rollouts."""
    from a2c.cli.commands import train

    flags, env_steps = RUNS[preset]
    common = ["--threads", "2", "--precision", "float32", "--no-progress", "--total-env-steps", str(env_steps)]
    run_dir = Path(folder) / preset
    assert train([*flags, *common, "--run-dir", str(run_dir)]) == 0
    state = torch.load(run_dir / "latest.pt", weights_only=True)
    assert state["env_steps"] == env_steps
    digest = hashlib.sha256()
    for name, value in sorted(state["network"].items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    with TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        out, sys.stdout = sys.stdout, nothing
        found = {preset: fingerprint(preset, folder) for preset in RUNS}
        sys.stdout = out
    known = json.loads(FILE.read_text()) if FILE.exists() and FILE.stat().st_size else {}
    print(json.dumps({**known, MACHINE: found}, indent=2))


def test_fingerprints_of_three_rollouts_are_those_that_were_written_down():
    known = json.loads(FILE.read_text()).get(MACHINE)
    if known is None:
        pytest.skip(f"no fingerprints are written down for {MACHINE}")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[MACHINE] == known


if __name__ == "__main__":
    if not COMMON.items() <= os.environ.items():  # read when torch is loaded
        os.execve(sys.executable, [sys.executable, __file__], {**os.environ, **COMMON})
    main()
