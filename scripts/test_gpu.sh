#!/usr/bin/env bash
# What needs a GPU: bits first, then the whole model, then speed. Parts in the order in which a failure explains the next.
#   scripts/test_gpu.sh [PART ...]      no part: all of them
# Parts: kernels ops models engine correction trainer kernels-speed rollout. OUT=FOLDER keeps each part's output
# (default: runs/gpu). A part that fails or runs past its limit hides no other; exit code 0 only if every part passed.
set -uo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
find_or_make_env dev
cd "$ROOT" || exit 1

PARTS=${*:-kernels ops models engine correction trainer kernels-speed rollout}
OUT=${OUT:-runs/gpu}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT"
failed=0

# part NAME SECONDS COMMAND...: run it with a limit, keep its output, show its end
part() {
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    [[ " $PARTS " == *" ${name%%.*} "* ]] || return 0
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    printf '\n== %s: %s (%d s)\n' "$name" "$([ "$status" = 0 ] && echo passed || echo "FAILED ($status)")" $((SECONDS - began))
    tail -n 15 "$OUT/$name.log" | cut -c1-200
    [ "$status" = 0 ] || failed=1
}


part kernels 600 "$PY" -m pytest -q -m gpu tests/numerics
part ops 120 "$PY" -m verl_tim.cli verify --ops
# Published shapes with few layers: random weights, peaked logits; every scenario of the exactness gate.
part models.dense.make 120 "$PY" -m verl_tim.cli model --random qwen3-1.7b --layers 4 --out "$WORK/dense"
part models.dense 400 "$PY" -m verl_tim.cli verify "$WORK/dense"
part models.moe.make 120 "$PY" -m verl_tim.cli model --random qwen3-30b-a3b --layers 2 --out "$WORK/moe"
part models.moe 400 "$PY" -m verl_tim.cli verify "$WORK/moe"
part engine 600 "$PY" -m pytest -q -m gpu tests/engine tests/rollout
part correction 200 "$PY" -m verl_tim.cli bench correction --device cuda
part trainer 300 "$PY" -m verl_tim.cli bench kernels --part trainer
part kernels-speed 600 "$PY" -m verl_tim.cli bench kernels --part gemm --part attention --part rows --part moe --part head
part rollout.alone 300 "$PY" -m verl_tim.cli bench rollout --shape qwen3-1.7b --engine vexact --load 16x128x512 --load 256x128x512
part rollout.peer 500 "$PY" -m verl_tim.cli bench rollout --shape qwen3-1.7b --engine vexact --engine vllm --load 16x128x512 --load 256x128x512

exit "$failed"
