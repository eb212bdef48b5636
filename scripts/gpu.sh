#!/usr/bin/env bash
# Builds (what has changed), tests, sanitises and benchmarks the CUDA ops and the engine on a machine
# with a GPU, and prints a short table last. Usage: scripts/gpu.sh [python] [folder for logs]
# STEPS chooses: build test sanitize bench (all by default), and claims, the GPU's part of
# docs/paged-attention.md. Tables are in the logs; with SAVE=1 they also replace those of the same day
# in benchmarks/results.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
logs=${2:-build/gpu}
steps=${STEPS:-build test sanitize bench}
export PYTHONPATH=python PYTHONUNBUFFERED=1
mkdir -p "$logs"
failed=0
summary=()

step() { # name, command...: runs it if chosen, keeps its log, notes how it ended
  local name=$1
  shift
  local begin=$SECONDS
  if "$@" >"$logs/$name.log" 2>&1; then
    summary+=("ok      $name ($((SECONDS - begin)) s): $(grep -v '^$' "$logs/$name.log" | tail -1)")
  else
    summary+=("FAILED  $name ($((SECONDS - begin)) s), see $logs/$name.log")
    failed=1
    tail -15 "$logs/$name.log"
  fi
}

chosen() { [[ " $steps " == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if chosen build; then
  PAGEDKV_BUILD=core,cpu,cuda step build "$python" setup.py build_ext --inplace --build-temp build/temp-gpu
fi
if chosen test; then
  step test "$python" -m pytest -q -x --no-header -p no:cacheprovider tests/cuda
fi
if chosen sanitize; then
  for tool in ${SANITIZERS:-memcheck racecheck initcheck synccheck}; do
    options=()
    # These two look at pagedkv's kernels alone: torch's are many, and what they take of memory for
    # each is too much. The others must see what torch's kernels have written.
    if [[ $tool == racecheck || $tool == synccheck ]]; then
      options+=(--kernel-name kernel_substring=pagedkv)
    fi
    # Barriers of all blocks that run: decode has about 100 on each multiprocessor.
    if [[ $tool == synccheck ]]; then options+=(--num-cuda-barriers 16384); fi
    step "$tool" compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 1 --print-limit 5 \
      "$python" -m pytest -q --no-header -p no:cacheprovider tests/cuda -k sanitize
  done
fi
save=()
if [[ -n ${SAVE:-} ]]; then save=(--save); fi
if chosen bench; then
  for name in gpu_ops streamed_linear sampling cache_layout paged_attention mixed_steps short_steps loading throughput; do
    options=()
    if [[ $name == loading ]]; then options=(--memory /dev/shm --layers 12); fi
    log="$logs/bench_$name.log"
    "$python" "benchmarks/bench_$name.py" "${options[@]}" "${save[@]}" >"$log" 2>&1
    missed=$?
    # A table comes last; without one, the exit status tells of no thresholds.
    if grep -q '^| name ' "$log"; then
      summary+=("missed thresholds of bench_$name: $missed")
      grep '^|.*| NO |$' "$log"
    else
      summary+=("FAILED  bench_$name, see $log")
      failed=1
      tail -15 "$log"
    fi
  done
fi
if chosen claims; then
  export PYTHONPATH=python:benchmarks
  step claims "$python" -m claims gpu kernels swap indirection "${save[@]}"
fi
printf '%s\n' "${summary[@]}"
exit $failed
