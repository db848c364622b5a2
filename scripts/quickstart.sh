#!/usr/bin/env bash
# One command, no GPU: GRPO with an exact rollout beside the same run with one that mismatches, verified and compared.
#   scripts/quickstart.sh [KEY=VALUE ...]
# Leaves runs/quickstart/{vexact,stock}/ and runs/quickstart/compare.{html,json}; finished runs are not repeated.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck disable=SC2119  # the script's arguments are for the command
find_or_make_env
cd "$ROOT"
exec "$PY" -m verl_tim.cli quickstart "$@"
