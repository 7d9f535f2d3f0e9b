#!/usr/bin/env bash
# The comparisons in results/, one line each; about.json in results/NAME names the commit and the processor.
#
#     bash results/commands.sh    # in a fresh clone, with a2c on the path: all of them, one after the other
#
# A line can also be run alone. One that was stopped continues when it is run again; runs that are finished are not
# repeated. Then keep.py copies tables, picture, settings, episodes and metrics to results/NAME, and nothing else.
# `make tables` writes the documents' tables from there. All runs come first, because files of git that have
# changed would add a plus to the commit in about.json.
set -e
cd "$(dirname "$0")/.."

# The presets on Pong. Their seeds were not used to choose the settings.
a2c compare runs/results/pong-fast --preset pong-fast --seeds 100..109 --jobs 2 --keep-policy-every 20000
a2c compare runs/results/default --preset default --seeds 100..104 --keep-policy-every 20000
# Every rollout is learned from once, as in the papers on A2C.
a2c compare runs/results/strict --preset pong-fast --epochs 1 --seeds 100..104 --jobs 2 --keep-policy-every 20000
# The same game with sticky actions.
a2c compare runs/results/pong-v5 --preset pong-fast --env ALE/Pong-v5 --seeds 100..104 --jobs 2 --keep-policy-every 20000

# The three algorithms, with the same options, budget and seeds.
a2c compare runs/results/family --preset pong-fast --vary algorithm=a2c,a3c,ga3c --seeds 100..104 --keep-policy-every 20000

# Settings that were tried, with few seeds each, for docs/learning.md: search-NAME.

for out in runs/results/*; do
    python benchmarks/keep.py "$out" "results/$(basename "$out")"
done
