#!/usr/bin/env bash
# Every CPU benchmark, one after the other, each alone on the machine. Exits non-zero when a threshold is missed.
# Usage: scripts/bench.sh [bin folder of the environment] [arguments for every benchmark, such as --save]
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}
shift || true
missed=0
for name in bench_block_manager bench_scheduler bench_around_steps bench_cpu_ops bench_cpu_attention bench_cpu_linear bench_cpu bench_replay bench_serving bench_inspect; do
  printf '\n== %s\n' "$name"
  "$bin/python" "benchmarks/$name.py" "$@" || missed=1
done
exit "$missed"
