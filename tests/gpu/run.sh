#!/bin/sh
# Everything that needs a CUDA device, in at most eight minutes, from a bare checkout: tests, ratios, training, FSDP2.
#
#     tests/gpu/run.sh                       # results into notebooks/results/gpu/NAME-OF-THE-CARD/
#     tests/gpu/run.sh --out FOLDER          # or elsewhere
#     tests/gpu/run.sh --steps rows          # in its place: runs whose rows are not kept yet, for 9 minutes
#     tests/gpu/run.sh --device cpu --small  # the script itself, tried on a CPU
#
# The machine's Python ($PYTHON) has torch, Lightning and transformers. What else it lacks comes as wheels in
# build/wheels ($WHEELS), which are unpacked and not installed. CIFAR-10 is read from $GROWLAB_DATA or shared/data;
# without it, random images are trained on. Each step has its own time limit and writes its results when it ends.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
wheels=${WHEELS:-build/wheels}
unpacked=build/gpu/packages
export PYTHONPATH="$PWD:$PWD/$unpacked"
if ! "$python" -c 'import hydra, omegaconf, pydantic, pytest' 2>/dev/null; then
    if ! ls "$wheels"/*.whl >/dev/null 2>&1; then
        cat >&2 <<END
tests/gpu/run.sh: $python lacks hydra-core, omegaconf, pydantic or pytest, and there are no wheels in $wheels. Make them where pip
has a package index, and bring the folder along:
    python -m pip wheel --no-deps -w $wheels \$(grep -E \\
        '^(annotated-types|antlr4-python3-runtime|filelock|hydra-core|hypothesis|iniconfig|omegaconf|pluggy|pydantic|pydantic-core|pytest|pytest-timeout|sortedcontainers|typing-inspection)==' \\
        requirements.lock)
END
        exit 2
    fi
    mkdir -p "$unpacked"
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$unpacked"
    done
fi
exec "$python" -m tests.gpu "$@"
