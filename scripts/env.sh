# Sourced by quickstart.sh and test.sh: `find_or_make_env [EXTRA]` sets PY to a Python that has everything, installing it if need be.
# Order: the Python in use, if it has the dependencies; .venv in the checkout, made and filled if need be.
# shellcheck shell=bash
# shellcheck disable=SC2034  # PY is for the script that sources this

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=2.13.0

say() { printf '%s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

# A Python that verl runs on: $PYTHON if set, else the newest of 3.12 to 3.10 on the PATH.
find_python() {
    local name
    for name in ${PYTHON:-python3.12 python3.11 python3.10 python3 python}; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    die "No Python 3.10, 3.11 or 3.12 found (verl runs on these; this machine's python3 is $(python3 --version 2>&1))." \
        "Install one, for example 'apt-get install python3.11 python3.11-venv' or 'uv python install 3.11', or name it: PYTHON=/path/to/python $0"
}

# pycosat, which reasoning-gym needs, has no wheels.
check_compiler() {
    local python=$1 header
    if ! command -v "${CC:-cc}" >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
        die "No C compiler found; the package pycosat has to be compiled." \
            "Install one: 'apt-get install build-essential' (Debian, Ubuntu), 'dnf install gcc' (Fedora), 'xcode-select --install' (macOS)."
    fi
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
    if [ ! -f "$header" ]; then
        die "The headers of $python are missing ($header); the package pycosat has to be compiled." \
            "Install them: 'apt-get install python3-dev' (Debian, Ubuntu) or 'dnf install python3-devel' (Fedora)."
    fi
}

# The CPU build where there is no NVIDIA GPU: the usual Linux build brings gigabytes of CUDA libraries that could not be used.
install_torch() {
    local python=$1
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        return # the project's own requirements choose the build
    fi
    say "installing torch $TORCH for CPUs"
    # on macOS, and on ARM, the usual build is one for CPUs
    if [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
        "$python" -m pip install -qq "torch==$TORCH+cpu" 2>/dev/null && return
        # uv knows where PyTorch keeps its builds
        "$python" -m pip install -qq uv && "$python" -m uv pip install -q --python "$python" --torch-backend=cpu "torch==$TORCH" 2>/dev/null && return
        say "no CPU build of torch was found in your package indexes; installing the usual one (several GB)"
    fi
    "$python" -m pip install -qq "torch==$TORCH"
}

find_or_make_env() {
    local extras=("$@") current venv=$ROOT/.venv status=0 target=$ROOT base
    cd "$ROOT" || exit 1
    current=$(command -v python || command -v python3 || true)
    if [ -n "$current" ]; then
        "$current" scripts/check_env.py ${extras[@]+"${extras[@]}"} >/dev/null 2>&1 || status=$?
        if [ "$status" = 3 ]; then
            say "$current has the dependencies; adding this checkout to it"
            "$current" -m pip install -qq --no-deps -e "$ROOT" && status=0
        fi
        if [ "$status" = 0 ]; then
            PY=$current
            return
        fi
    fi
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" scripts/check_env.py ${extras[@]+"${extras[@]}"} >/dev/null 2>&1; then
        PY=$venv/bin/python
        return
    fi
    if [ ! -x "$venv/bin/python" ]; then
        base=$(find_python) || exit 1
        check_compiler "$base"
        say "making the virtual environment .venv with $("$base" --version)"
        "$base" -m venv "$venv" || die "$base cannot make virtual environments: 'apt-get install python3-venv' (Debian, Ubuntu)."
    else
        check_compiler "$venv/bin/python"
    fi
    [ ${#extras[@]} = 0 ] || target="${ROOT}[$(IFS=, && echo "${extras[*]}")]"
    say "installing into .venv (minutes, once)"
    "$venv/bin/python" -m pip install -qq --upgrade pip || die "pip cannot reach a package index; see its message above."
    install_torch "$venv/bin/python" || die "torch could not be installed; see pip's message above."
    "$venv/bin/python" -m pip install -qq -e "$target" || die "The dependencies could not be installed; see pip's message above."
    "$venv/bin/python" scripts/check_env.py ${extras[@]+"${extras[@]}"} || die "The environment .venv lacks what is listed above; remove .venv and run this again."
    PY=$venv/bin/python
}
