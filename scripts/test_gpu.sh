#!/usr/bin/env bash
# What needs a GPU: bits first, then the whole model, then speed. Parts in the order in which a failure explains the next.
#   scripts/test_gpu.sh [PART ...]      no part: all of them; a part of a part by its name in the output, such as runs.vllm_moe
# Parts: kernels ops models long (with models) whole split (with models; two GPUs or more) engine rest runs size (with whole) replay correction
# trainer kernels-speed rollout. whole, long and size want the GPU to themselves.
# OUT=FOLDER keeps each part's output (default: runs/gpu). WORK=FOLDER keeps models and runs, so that a later call finds the
# models of an earlier one (default: a folder of its own, removed at the end). A part that fails or runs past its limit hides no other; exit
# code 0 only if every part passed.
set -uo pipefail

ALL="kernels ops models long whole split engine rest runs size replay correction trainer kernels-speed rollout"
PARTS=${*:-$ALL}
for name in $PARTS; do
    [[ " $ALL " == *" ${name%%.*} "* ]] || { echo "$0: $name is no part; parts: $ALL" >&2; exit 2; }
done
# what is relative is so to the folder that this is called from
OUT=$(realpath -m "${OUT:-$(dirname "${BASH_SOURCE[0]}")/../runs/gpu}")
[ -z "${WORK:-}" ] || WORK=$(realpath -m "$WORK")
# needs PART MAKER MODEL...: PART works on models that MAKER makes, in this call or in an earlier one with the same WORK
needs() {
    local part=$1 maker=$2 model
    shift 2
    [[ " $PARTS " != *" $part "* || " $PARTS " == *" $maker "* ]] && return
    for model; do
        [ -f "${WORK:-/nonexistent}/$model/config.json" ] ||
            { echo "$0: $part works on a model that $maker makes; give both: $maker $part, or WORK=FOLDER of a call that made it" >&2; exit 2; }
    done
}
needs split models dense moe
needs long models dense moe
needs size whole whole

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
find_or_make_env test
cd "$ROOT" || exit 1

if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$OUT" "$WORK"
failed=0 ran=0

# wanted NAME: it, or what it is a part of, was asked for
wanted() {
    local part
    for part in $PARTS; do
        [[ $1 == "$part" || $1 == "$part".* ]] && return 0
    done
    return 1
}

# part NAME SECONDS COMMAND...: run it with a limit, keep its output, show its end
part() {
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    wanted "$name" || return 0
    ran=$((ran + 1))
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    printf '\n== %s: %s (%d s)\n' "$name" "$([ "$status" = 0 ] && echo passed || echo "FAILED ($status)")" $((SECONDS - began))
    tail -n 15 "$OUT/$name.log" | cut -c1-200
    [ "$status" = 0 ] || failed=1
}

# model PART NAME SHAPE [OPTION...]: random weights, made unless an earlier call did
model() {
    local name=$1 folder=$WORK/$2 shape=$3
    shift 3
    [ -f "$folder/config.json" ] || part "$name" 120 "$PY" -m verl_tim.cli model --random "$shape" --out "$folder" "$@"
}

part kernels 600 "$PY" -m pytest -q -m gpu tests/numerics
# tests that take what device there is: interpreted without a GPU, here the kernels themselves
part kernels.either 300 "$PY" -m pytest -q tests/numerics/gpu
part ops 120 "$PY" -m verl_tim.cli verify --ops
part ops.fa3 120 "$PY" -m verl_tim.cli verify --ops --attention fa3
# Published shapes with few layers: random weights, peaked logits; every scenario of the exactness gate.
model models.dense.make dense qwen3-1.7b --layers 4
part models.dense 400 "$PY" -m verl_tim.cli verify "$WORK/dense"
model models.moe.make moe qwen3-30b-a3b --layers 2
part models.moe 400 "$PY" -m verl_tim.cli verify "$WORK/moe"
model models.qwen2.make qwen2 qwen2.5-0.5b --layers 4
part models.qwen2 400 "$PY" -m verl_tim.cli verify "$WORK/qwen2"
# FlashAttention 3 as the contract's attention, of both sides.
part models.fa3 400 "$PY" -m verl_tim.cli verify "$WORK/dense" "$WORK/moe" --attention fa3
model models.llama.make llama llama-3.2-1b --layers 4
part models.llama 400 "$PY" -m verl_tim.cli verify "$WORK/llama"
# Answers longer than a few chunks of keys, up to the paper's, and all layers.
part long 400 "$PY" -m verl_tim.cli verify "$WORK/dense" --requests 4 --tokens 8192
part long.moe 500 "$PY" -m verl_tim.cli verify "$WORK/moe" --requests 4 --tokens 8192
part long.most 900 "$PY" -m verl_tim.cli verify "$WORK/dense" --requests 4 --tokens 20480
model whole.make whole qwen3-1.7b
part whole 400 "$PY" -m verl_tim.cli verify "$WORK/whole"
part models.memory 300 "$PY" -m pytest -q -m gpu tests/training/test_memory_savers_gpu.py
# Rollouts on two GPUs, the trainer on one: outputs split, then layers.
gpus=$("$PY" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -ge 2 ]; then
    part split.tensor 400 "$PY" -m verl_tim.cli verify "$WORK/dense" "$WORK/moe" --tensor-parallel 2
    part split.pipeline 400 "$PY" -m verl_tim.cli verify "$WORK/dense" "$WORK/moe" --pipeline-parallel 2
elif [[ " $PARTS " == *" split "* ]]; then
    ran=$((ran + 1))
    printf '\n== split: skipped, it needs two GPUs and there is %s\n' "$gpus"
fi
part engine 600 "$PY" -m pytest -q -m gpu tests/engine tests/rollout
# What else has tests for a GPU; one makes a model.
part rest 500 "$PY" -m pytest -q -m gpu tests/bench tests/correction tests/diagnosis tests/tasks
# verl from end to end on this GPU; the gate stops a run at the first differing bit. One at a time: each start takes a minute.
gpu_run() {
    local name=$1
    shift
    part "$name" 400 "$PY" -m verl_tim.cli train "$1" cluster=gpu1 trainer.total_training_steps=6 trainer.val_before_train=false \
        trainer.test_freq=-1 actor_rollout_ref.rollout.gpu_memory_utilization=0.3 "tim.run_dir=$WORK/$name" "${@:2}"
    for file in train.log metrics.jsonl; do
        [ -f "$WORK/$name/$file" ] && cp "$WORK/$name/$file" "$OUT/$name.$file"
    done
    return 0
}
gpu_run models.fa3.run recipe=cpu_grpo rollout=vexact model=hf "actor_rollout_ref.model.path=$WORK/dense" \
    actor_rollout_ref.model.fused_kernel_options.attention=fa3
gpu_run runs.dense recipe=cpu_grpo rollout=vexact
# what a trainer holds of the device is the same after each step
part runs.dense.memory 10 "$PY" -c 'import json, sys
held = [json.loads(line)["data"].get("actor/perf/max_memory_allocated_gb") for line in open(sys.argv[1])]
held = [gib for gib in held if gib]
print("GiB at most, by step:", *held)
sys.exit(len(held) < 4 or held[-1] > 1.05 * held[2])' "$WORK/runs.dense/metrics.jsonl"
gpu_run runs.moe recipe=cpu_moe_grpo rollout=vexact
gpu_run runs.reinforce recipe=cpu_reinforce rollout=vexact
gpu_run runs.moe_reinforce recipe=cpu_reinforce rollout=vexact model=tiny_qwen3_moe
gpu_run runs.tools recipe=cpu_tool_grpo rollout=vexact
gpu_run runs.async recipe=cpu_grpo rollout=vexact trainer.v1.trainer_mode=colocate_async
gpu_run runs.reuse recipe=cpu_grpo rollout=vexact tim.reuse_rollout_log_probs.enabled=true tim.reuse_rollout_log_probs.audit_every=3
gpu_run runs.vllm recipe=cpu_grpo rollout=vllm
gpu_run runs.vllm_reinforce recipe=cpu_reinforce rollout=vllm
gpu_run runs.vllm_invariant recipe=cpu_grpo rollout=vllm_invariant correction=token_tis
# vLLM's choice of experts beside the trainer's
gpu_run runs.vllm_moe recipe=cpu_moe_grpo rollout=vllm
part runs.vllm_moe.routes 10 grep -c tim/router_flip_rate "$WORK/runs.vllm_moe/metrics.jsonl"
# The shape of Qwen3-1.7B, parameters offloaded between turns: 256 answers of up to 1,024 tokens a step; step times side by side, of one trainer.
for rollout in vexact vllm; do
    gpu_run "size.$rollout" recipe=dense_grpo_1gpu "rollout=$rollout" model=hf "actor_rollout_ref.model.path=$WORK/whole" task=chain_sum \
        data.train_batch_size=32 actor_rollout_ref.rollout.n=8 data.max_response_length=1024 trainer.total_training_steps=3
done
# The shape of Qwen3-30B-A3B with four of its layers: a few steps of a mixture's recipe.
model size.moe.make moe4 qwen3-30b-a3b --layers 4
for rollout in vexact vllm; do
    gpu_run "size.moe.$rollout" recipe=moe_grpo_1gpu "rollout=$rollout" model=hf "actor_rollout_ref.model.path=$WORK/moe4" \
        data.train_batch_size=32 actor_rollout_ref.rollout.n=8 data.max_response_length=512 trainer.total_training_steps=3
done
# vLLM's experts against the trainer's own choice, and in its place; `verl-tim compare` of the two folders shows the rest.
part replay.handles 200 "$PY" -m pytest -q -m gpu tests/replay
gpu_run replay.off recipe=cpu_moe_grpo rollout=vllm trainer=stock routing_replay=off
gpu_run replay.r3 recipe=cpu_moe_grpo rollout=vllm trainer=stock routing_replay=r3
gpu_run replay.gate recipe=cpu_moe_grpo rollout=vexact routing_replay=r3
part correction 200 "$PY" -m verl_tim.cli bench correction --device cuda
part trainer 300 "$PY" -m verl_tim.cli bench kernels --part trainer
part kernels-speed 600 "$PY" -m verl_tim.cli bench kernels --part gemm --part attention --part rows --part moe --part head
part rollout.alone 300 "$PY" -m verl_tim.cli bench rollout --shape qwen3-1.7b --engine vexact --load 16x128x512 --load 256x128x512
part rollout.peer 500 "$PY" -m verl_tim.cli bench rollout --shape qwen3-1.7b --engine vexact --engine vllm --load 16x128x512 --load 256x128x512

[ "$ran" != 0 ] || { echo "$0: $PARTS names nothing that there is" >&2; exit 2; }
exit "$failed"
