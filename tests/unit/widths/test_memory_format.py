"""Nothing that growlab runs in channels_last reaches a kernel of torch that writes outside its buffers."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from growlab.growth import PairGrowth, make_seed
from growlab.lab.networks import CifarResNet
from growlab.widths import avoid_unsafe_kernels, resize, trace
from tests.command_line import ROOT

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}

STRIDED = (1, 1), (2, 2)


@pytest.mark.slow
def test_convolutions_of_all_kinds_survive_a_backward_pass_on_a_cpu_without_avx_512():
    """In a separate process, because torch would crash it (2 to 7 channels, 1x1, strided, channels_last)."""
    command = [sys.executable, "-m", "tests.unit.widths.unsafe_kernels"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **AVX2}, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit code {done.returncode} at: {lines[-1:]} {done.stderr[-300:]}"
    assert lines[-1] == "0 wrong"


@pytest.mark.parametrize("change", ["resize", "make_seed"])
def test_a_narrowed_network_is_kept_from_them(change, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    network = CifarResNet(1, 5, channels=(4, 8, 8), shortcut="B")
    graph = trace(network, torch.randn(2, 3, 8, 8))
    half = {name: width // 2 for name, width in graph.full_widths.items()}
    if change == "resize":
        resize(network, graph, graph.full_widths, half)
    else:
        make_seed(network, graph, PairGrowth(), half, seed=0)
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    strided = [module for module in convolutions if (module.kernel_size, module.stride) == STRIDED]
    assert strided and all(module._forward_pre_hooks for module in strided)


def test_only_narrow_strided_1x1_convolutions_leave_channels_last(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 9, 1, 2), nn.Conv2d(9, 4, 1, 3), nn.Conv2d(4, 3, 1))
    names = list(network.state_dict())
    for _ in range(2):
        avoid_unsafe_kernels(network)
    assert [len(module._forward_pre_hooks) for module in network] == [0, 1, 1, 0]
    assert list(network.state_dict()) == names
    x = torch.randn(2, 3, 20, 20).contiguous(memory_format=torch.channels_last)
    seen = []
    for module in copy.deepcopy(network):
        module.register_forward_hook(
            lambda module, inputs, named, output: seen.append(named["input"].is_contiguous()), with_kwargs=True
        )
        x = module(input=x.contiguous(memory_format=torch.channels_last))
    assert seen == [False, True, False, False]
