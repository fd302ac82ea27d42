#!/usr/bin/env bash
# Tetris on a GPU machine: throughput, yardstick controllers, learned agents.
# Usage: bench/gpu-tetris.sh OUT_FOLDER [speed] [controllers] [train]   (with redline and its needs on PYTHONPATH)
set -uo pipefail
out=${1:?usage: bench/gpu-tetris.sh OUT_FOLDER [speed] [controllers] [train]}
shift
mkdir -p "$out"
redline() { python3 -m redline "$@"; }

for part in "${@:-speed}"; do
    case $part in
    speed)
        redline bench env --env tetris --env.pieces uniform --games 4096,65536,262144 --seconds 0.5 --out "$out/tetris-env.json"
        python3 bench/tetris.py speed --controller DT-10 --height 20 --boards 4096 65536 --out "$out/tetris-greedy.json"
        redline bench train --env tetris --algo ppo --env.actions keys --ppo.net mlp --ppo.hidden 640,640 --games 16384 \
            --out "$out/tetris-keys-train.json"
        ;;
    controllers)
        python3 bench/tetris.py play --games 10000 --out "$out/tetris-10x10.json"
        for pieces in uniform bag7; do
            python3 bench/tetris.py play --width 7 --height 14 --pieces $pieces --games 4096 --steps 200M --out "$out/tetris-7x14-$pieces.json"
        done
        ;;
    train)
        uniform="--env.pieces uniform --env.previews 0 --eval-episodes 0 --json"
        redline train tetris --env.height 10 $uniform --no-curriculum --minutes 2.76 --run-dir "$out/10x10" >"$out/train-10x10.json"
        redline eval "$out/10x10" --episodes 1000 --json >"$out/eval-10x10.json"
        redline train tetris $uniform --minutes 3 --run-dir "$out/10x20" >"$out/train-10x20.json"
        redline eval "$out/10x20" --episodes 4096 --max-steps 2G --json >"$out/eval-10x20.json"
        ;;
    *) echo "There is no part '$part'; parts: speed, controllers, train." >&2; exit 2 ;;
    esac
done
