#!/usr/bin/env bash
# Lint, types, and all tests that need no GPU: first the fast ones, then the slow ones (real verl runs).
#   scripts/test.sh [--all] [--minutes N] [PYTEST_ARGUMENT ...]
# --all: then also the exhaustive ones (every product of choices, all real runs; an hour and more on two cores).
# --minutes: begin no slow test later than that; what was not run is reported as skipped, by name.
# Exit code 0 only if every part passed.
set -uo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
all='' minutes=''
while true; do
    case ${1:-} in
        --all) all=1 && shift ;;
        --minutes)
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$0: --minutes needs a whole number of minutes, not '${2:-}'"
            minutes=$2 && shift 2
            ;;
        *) break ;;
    esac
done
find_or_make_env dev
cd "$ROOT" || exit 1

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
names=() results=() seconds=() failed=0
none=${1:+5} # pytest's code where no test is selected: arguments may mean fast ones only, or slow ones only

# part NAME COMMAND...: run it, remember how it went and how long it took
part() {
    local name=$1 started=$SECONDS status=0
    shift
    printf '\n== %s\n' "$name"
    "$@" || status=$?
    names+=("$name") seconds+=($((SECONDS - started)))
    if [ "$status" = 0 ]; then
        results+=(passed)
    elif [ "$status" = "$none" ]; then
        results+=("no tests")
    else
        results+=("FAILED ($status)") failed=1
    fi
}

part "ruff" "$PY" -m ruff check .
part "mypy" "$PY" -m mypy
# a process per core, at most eight; each uses one thread, and the tests of a file share what they make
cores=$("$PY" -c 'import os; print(min(8, os.cpu_count() or 1))')
export OMP_NUM_THREADS=1
part "tests, fast" "$PY" -m pytest -q -n "$cores" --dist loadfile --junitxml="$reports/fast.xml" -m "not gpu and not slow and not exhaustive" "$@"
part "tests, slow" "$PY" -m pytest -q --junitxml="$reports/slow.xml" --durations=10 ${minutes:+"--time-limit=$((minutes * 60 - SECONDS))"} -m "slow and not gpu" "$@"
if [ -n "$all" ]; then
    part "tests, exhaustive" "$PY" -m pytest -q --junitxml="$reports/all.xml" --durations=10 ${minutes:+"--time-limit=$((minutes * 60 - SECONDS))"} -m "exhaustive and not gpu" "$@"
fi

if [[ ! ${results[*]:2} =~ passed|FAILED ]]; then
    echo "$0: no test is selected by: $*" >&2
    failed=5
fi

printf '\n== summary\n'
for i in "${!names[@]}"; do printf '%-18s %-12s %4d s\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"; done
"$PY" - "$reports"/*.xml <<'P'
import sys
import xml.etree.ElementTree as tree

totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for path in sys.argv[1:]:
    for suite in tree.parse(path).getroot().iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
failed = totals["failures"] + totals["errors"]
print(f"tests: {totals['tests'] - failed - totals['skipped']} passed, {failed} failed, {totals['skipped']} skipped")
P
exit "$failed"
