#!/usr/bin/env bash
# The core's unit checks and its fuzzer under sanitizers: address and undefined behaviour, then threads (the snapshot
# reader beside the owner). Usage: scripts/sanitize_core.sh [address,undefined|thread ...]   A finding is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH  # where cmake and ninja may be
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 TSAN_OPTIONS=halt_on_error=1
[ $# -gt 0 ] || set -- address,undefined thread
for kind in "$@"; do
  build=build/core-sanitize-${kind//,/-}
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 \
    -DPAGEDKV_SANITIZE="$kind" >/dev/null
  cmake --build "$build" --target core_checks core_fuzz
  "$build/core_checks"
  [ "$kind" = thread ] || "$build/core_fuzz" --runs 300 --seed 1000000
done
