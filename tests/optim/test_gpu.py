"""The steps for a GPU: interpreted on the CPU, compiled for GPUs that are not there, and run where one is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from growlab.optim import NormRatio, gpu
from tests.optim.test_native import SETTINGS, assert_same, start

triton = pytest.importorskip("triton")

FLAGS = {
    "sgd": {"SUMMED": True, "NEGATED": True, "DECAYED": True, "MOVING": True, "NESTEROV": True},
    "adam": {"SUMMED": True, "NEGATED": True, "DECAYED": False, "DECOUPLED": True, "LARGEST": True},
}


def test_interpreted_kernels_take_the_steps_of_torchs_operations():
    tests = Path(__file__).with_name("gpu_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if "TypeError('only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip(
            "the interpreter of this triton (3.6, of torch 2.11) does not work with numpy 2.4 and newer"
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("real", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ["sgd", "adam", "squares", "add_blocks"])
def test_kernels_compile_for_gpus(name, real, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from growlab.optim import triton_kernels

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    types = {"weights": "*i64", "blocks": "*i32", "settings": "*fp64", "values": f"*{real}", "starts": "*i32"}
    types |= {"sums": "*fp64", "totals": "*fp64", "num_regions": "i32"}
    constants = {
        "REAL": getattr(triton.language, {"fp32": "float32", "fp64": "float64"}[real]),
        "BLOCK": 1024,
    }
    constants |= {"REGIONS": 8, "TILE": 64, **FLAGS.get(name, {})}
    kernel = getattr(triton_kernels, name)
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    used = {arg: value for arg, value in constants.items() if arg in signature}
    compiled = triton.compile(
        ASTSource(kernel, signature, used),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": True},
    )
    assert f"sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_gpu_takes_the_kernels_and_does_not_wait(setting):
    cls, options = SETTINGS[setting]
    ways = []
    for kernels in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not kernels:
                patch.setattr(gpu, "available", lambda device, dtype: False)
            params, regions = start(torch.float64)
            moved = [torch.nn.Parameter(param.detach().cuda()) for param in params]
            optimizer = cls(moved, lr=0.03, rule=NormRatio(), **options)
            optimizer.set_regions({new: regions[old] for old, new in zip(params, moved, strict=True)})
            for number in range(4):
                for param in moved:
                    param.grad = torch.full_like(param, 0.1 * number - 0.1)
                torch.cuda.set_sync_debug_mode("error" if kernels and number > 1 else "default")
                optimizer.step()
                torch.cuda.set_sync_debug_mode("default")
            assert all((optimizer._table(param) is not None) == kernels for param in moved)
            ways.append((moved, optimizer))
    assert_same(*ways, rtol=1e-9, atol=1e-9)


def test_without_triton_a_step_takes_torchs_operations(monkeypatch):
    monkeypatch.setenv("GROWLAB_NATIVE", "0")
    assert not gpu.available.__wrapped__(torch.device("cuda"), torch.float32)
    monkeypatch.delenv("GROWLAB_NATIVE")
    assert not gpu.available.__wrapped__(torch.device("cpu"), torch.float32)
    assert not gpu.available.__wrapped__(torch.device("cuda"), torch.bfloat16)
