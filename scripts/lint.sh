#!/usr/bin/env bash
# Style and types of everything: ruff, mypy (strict, the package), clang-format. Usage: scripts/lint.sh [bin folder of the environment]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
git ls-files -- '*.cpp' '*.h' '*.cu' '*.cuh' | xargs "$bin/clang-format" --dry-run --Werror
