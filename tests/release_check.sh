#!/usr/bin/env bash
# Build the wheel and the sdist, check them, and grow a network with each in an empty environment: `make release-check`.
# The wheel is tried with the newest torch, the sdist with the oldest, on every Python that is here. Needs 6 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist build/release
python3 -m venv build/release/tools
build/release/tools/bin/pip install --quiet --disable-pip-version-check build twine
build/release/tools/bin/python -m build --outdir dist .
build/release/tools/bin/twine check --strict dist/*
oldest=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)

try() { # PYTHON PACKAGE TORCH
    local environment=build/release/environment
    rm -rf $environment
    "$1" -m venv $environment
    $environment/bin/pip install --quiet --disable-pip-version-check "$3" "$2"
    # Outside of the checkout, so that the installed package is the one imported.
    (cd / && "$OLDPWD/$environment/bin/python" - <<'PROGRAM')
import sys, torch, growlab
network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
grower = growlab.Grower(network, torch.randn(2, 4), trigger={0: 0.5, 1: 1.0})
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
grower.follow(optimizer)
for epoch in range(2):
    grower.step(epoch=epoch)
    network(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
grower.finish()
assert network[0].weight.shape == (8, 4) and not {"lightning", "hydra"} & set(sys.modules)
print("growlab", growlab.__version__, "on torch", torch.__version__, "and Python", sys.version.split()[0])
PROGRAM
}

for python in python3.11 python3.12 python3.13; do
    if "$python" -c '' 2>/dev/null; then
        try $python dist/*.whl torch
        try $python dist/*.tar.gz "torch==$oldest.*"
    else
        echo "there is no $python here"
    fi
done
rm -rf build/release
