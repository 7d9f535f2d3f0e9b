#!/usr/bin/env bash
# The comparisons in results/; about.json in results/NAME names the commit and the processor.
#
#     taskset -c 0,1 bash results/commands.sh    # in a fresh clone, with a2c on the path: all, one after the other
#
# Where a comment names flags that today's command has, too, add them first.
# Two cores, as in results/: without --threads, the number of cores sets the number of compute threads.
# A line can also be run alone. One that was stopped continues when it is run again; runs that are finished are not
# repeated. Then keep.py copies to results/NAME what results/README.md lists.
# `make tables` writes the documents' tables from there. All runs come first, because files of git that have
# changed would add a plus to the commit in about.json.
set -e
cd "$(dirname "$0")/.."

# pong-fast, with seeds that were not used to choose its settings.
a2c compare runs/results/pong-fast --preset pong-fast --seeds 270..279 --jobs 2 --keep-policy-every 20000

# The same on both cores, for the wall time.
a2c compare runs/results/pong-fast-two-cores --preset pong-fast --seeds 280..284 --keep-policy-every 20000

# The default settings, on both cores.
a2c compare runs/results/default --preset default --seeds 290..294 --keep-policy-every 20000

# Both in float32, without the instructions that only some processors have, on both cores.
export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
a2c compare runs/results/pong-fast-avx2 --preset pong-fast --precision float32 --seeds 370..374 --keep-policy-every 20000
a2c compare runs/results/default-avx2 --preset default --precision float32 --seeds 375..377 --keep-policy-every 20000
unset ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA

# On a GPU, in results/ beside 16 cores; left out where there is none.
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
a2c compare runs/results/default-gpu --preset default --cuda --seeds 2310..2312
a2c compare runs/results/pong-fast-gpu --preset pong-fast --cuda --seeds 2300..2302
fi

# pong-fast without reuse: each rollout is learned from once. At the commit of these runs, pong-fast had 32 environments
# of 64 steps: today's command for them has --num-envs 32 --rollout-steps 64, too.
a2c compare runs/results/strict --preset pong-fast --epochs 1 --num-minibatches 32 --total-env-steps 1500000 --lr-final 0.05 --seeds 640..644 --jobs 2 --keep-policy-every 20000

# Sticky actions: pong-fast with the rate, rollouts, lambda and schedules that atari had then. Today these flags are
# --preset pong-sticky.
a2c compare runs/results/pong-sticky --preset pong-fast --env ALE/Pong-v5 --gae-lambda 0.85 --num-envs 32 --rollout-steps 64 --epochs 2 --lr 0.0005 --lr-final 0 --schedule-end 1 --entropy-coef 0.01 --entropy-final 1 --entropy-hold 0 --total-env-steps 6e6 --seeds 40..44 --jobs 2

# The three algorithms with the settings of pong-fast, and a recurrent policy.
a2c compare runs/results/family --preset pong-fast --vary algorithm=a3c,ga3c,a2c --workers 2 --seeds 245..249 --jobs 2 --keep-policy-every 20000
a2c compare runs/results/lstm --preset lstm --seeds 265..269 --jobs 2 --keep-policy-every 20000

# A2C without reuse: one pass over each rollout. Stopped as seed 363 began; --seeds 360..362 then wrote the tables.
a2c compare runs/results/a2c-strict --preset a2c-strict --seeds 360..363 --jobs 1 --threads 2

# CartPole: the three algorithms, and a recurrent policy.
a2c compare runs/results/cartpole --preset cartpole --vary algorithm=a2c,a3c,ga3c --seeds 250..299 --jobs 2
a2c compare runs/results/cartpole-lstm --preset cartpole-lstm --seeds 250..299 --jobs 2

# One setting for all games: one seed each (Breakout and Qbert: two), 10 million decisions or fewer. At the commit of
# these runs, the entropy bonus of atari was constant: today the two flags of the bonus are part of the preset.
a2c compare runs/results/atari/beamrider --preset atari --env BeamRiderNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 32 --threads 1 --jobs 1
a2c compare runs/results/atari/breakout --preset atari --env BreakoutNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 52 --threads 1 --jobs 1
a2c compare runs/results/atari/enduro --preset atari --env EnduroNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 57 --threads 2 --jobs 1
a2c compare runs/results/atari/mspacman --preset atari --env MsPacmanNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 55 --threads 2 --jobs 1
a2c compare runs/results/atari/pong --preset atari --env PongNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 56 --threads 1 --jobs 1 --target-score 22
a2c compare runs/results/atari/qbert --preset atari --env QbertNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 54 --threads 1 --jobs 1
a2c compare runs/results/atari/seaquest --preset atari --env SeaquestNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 53 --threads 1 --jobs 1
a2c compare runs/results/atari/spaceinvaders --preset atari --env SpaceInvadersNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 38 --threads 1 --jobs 1
a2c compare runs/results/atari/boxing --preset atari --env BoxingNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 58 --threads 1 --jobs 1 --total-env-steps 2000000
a2c compare runs/results/atari/freeway --preset atari --env FreewayNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 59 --threads 1 --jobs 1 --total-env-steps 2000000
a2c compare runs/results/second-seeds/breakout --preset atari --env BreakoutNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 60 --threads 2 --jobs 1
a2c compare runs/results/second-seeds/qbert --preset atari --env QbertNoFrameskip-v4 --entropy-hold 0.4 --entropy-final 0.1 --seeds 62 --threads 2 --jobs 1

# The same with a constant bonus: today's command for them has --entropy-hold 0 --entropy-final 1, too.
a2c compare runs/results/beamrider --preset atari --env BeamRiderNoFrameskip-v4 --gae-lambda 0.85 --seeds 21 --threads 1 --jobs 1
a2c compare runs/results/breakout --preset atari --env BreakoutNoFrameskip-v4 --gae-lambda 0.85 --seeds 22 --threads 1 --jobs 1
a2c compare runs/results/qbert --preset atari --env QbertNoFrameskip-v4 --seeds 24 --threads 1 --jobs 1
a2c compare runs/results/spaceinvaders --preset atari --env SpaceInvadersNoFrameskip-v4 --seeds 25 --threads 1 --jobs 1
a2c compare runs/results/enduro --preset atari --env EnduroNoFrameskip-v4 --seeds 26 --threads 1 --jobs 1
a2c compare runs/results/mspacman --preset atari --env MsPacmanNoFrameskip-v4 --seeds 27 --threads 1 --jobs 1
a2c compare runs/results/pong --preset atari --env PongNoFrameskip-v4 --seeds 29 --threads 1 --jobs 1 --target-score 22
a2c compare runs/results/seaquest --preset atari --env SeaquestNoFrameskip-v4 --seeds 28 --threads 1 --jobs 1
a2c compare runs/results/boxing --preset atari --env BoxingNoFrameskip-v4 --seeds 30 --threads 1 --jobs 1 --total-env-steps 2000000
a2c compare runs/results/freeway --preset atari --env FreewayNoFrameskip-v4 --seeds 31 --threads 1 --jobs 1 --total-env-steps 2000000

# publish NAME RUN CHECKPOINT: the policy as float16, and a hundred episodes of this policy. Of the kept results in
# results/atari, only that of Enduro was published in this way; the others are evaluations of the policies in float32.
publish() {
    local out=runs/results/$1
    rm -f "$out/latest.pt"
    a2c export "$out/$2" "$out/latest.pt" --checkpoint "$3" --half
    a2c evaluate "$out" --episodes 100 --json >"$out/evaluation.tmp"
    mv "$out/evaluation.tmp" "$out/evaluation.json"
}
publish strict pong-fast/seed-640 best.pt
for run in runs/results/{,atari/,second-seeds/}*/atari/seed-*/; do
    name=${run#runs/results/} && name=${name%/atari/seed-*}
    publish "$name" "atari/$(basename "$run")" latest.pt
done
for game in boxing breakout freeway mspacman pong qbert seaquest second-seeds/qbert; do
    a2c record "runs/results/$game" --out "runs/results/$game/film.webp"
done
for game in beamrider enduro spaceinvaders atari/enduro; do  # a whole episode of Enduro would take 4 MB
    a2c record "runs/results/$game" --out "runs/results/$game/film.webp" --max-length 1200
done
a2c record runs/results/second-seeds/breakout --out runs/results/second-seeds/breakout/film.webp --max-length 2000  # of 13,413

for about in runs/results/{,atari/,second-seeds/}*/about.json; do
    name=${about#runs/results/} && name=${name%/about.json}
    python benchmarks/keep.py "runs/results/$name" "results/$name"
done
