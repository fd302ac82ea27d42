#!/usr/bin/env bash
# All figures of a GPU machine in one go: the gpu tests, throughput tables, start-up times cold and warm, a default training.
# Usage: bench/gpu.sh OUT_FOLDER   (with redline and its needs on PYTHONPATH; nothing is installed)
set -uo pipefail
out=${1:?usage: bench/gpu.sh OUT_FOLDER}
mkdir -p "$out"
redline() { python3 -m redline "$@"; }

if [ -z "${SKIP_TESTS:-}" ]; then
    make gpu-test 2>&1 | tail -n 25
fi

redline bench env --games 1,16,64,256,4096,65536,1048576 --seconds 0.5 --out "$out/gpu-env.json"
redline bench train --games 256,4096,65536 --out "$out/gpu-train.json"

# Seconds from the start of the process to the first learning step: nothing compiled yet, then with the compiler's cache.
export TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) TRITON_CACHE_DIR=$(mktemp -d)
for state in cold warm; do
    redline train snake --steps 300k --eval-episodes 0 --run-dir "$(mktemp -d)/run" --json >"$out/gpu-start-$state.json" 2>/dev/null
    python3 -c "import json, sys; r = json.load(open(sys.argv[1])); print(sys.argv[2], 'start to first update:', round(r['seconds_to_first_update'], 1), 's')" "$out/gpu-start-$state.json" "$state"
done

redline train snake --minutes "${MINUTES:-1}" --eval-episodes 1024 --run-dir "$(mktemp -d)/run" --json 2>"$out/gpu-default.log" >"$out/gpu-default.json"
python3 - "$out/gpu-default.json" <<'P'
import json, sys
r = json.load(open(sys.argv[1]))
print("default training:", {k: r.get(k) for k in ("env_steps", "env_steps_per_second", "samples_per_second", "score_mean", "win_rate")})
P
