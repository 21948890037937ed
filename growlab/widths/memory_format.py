"""Work around a oneDNN kernel that writes outside its buffers in narrow 1x1 convolutions on CPUs.

oneDNN 3.13.3 (torch 2.15) has a 1x1 convolution for CPUs with AVX2 but no AVX-512 whose weight gradient, in float32
and channels_last, overruns its buffer: at a stride above 1 that divides the image and up to 7 input channels (fewer
than fit a vector register). The process then dies of a segmentation fault or `double free`. Found by a scan with a
guard page on each side of every buffer over 1 to 40 input and 1 to 16 output channels, kernels of 1, 3 and 5, strides
of 1 to 4, groups, depthwise, padding, one to three dimensions, transposed convolutions, float32, bfloat16 and float16,
with SSE4.1, AVX2, AVX-VNNI, AVX-512 and AMX: nothing else overruns, and in torch's default layout nothing at all. A
network that starts narrow has such convolutions on its shortcuts.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

# Number of float32 in an AVX2 register.
_VECTOR = 8


def avoid_unsafe_kernels(model: nn.Module) -> None:
    """Make narrow strided 1x1 convolutions on CPUs without AVX-512 use torch's default memory layout.

    Everything else keeps its layout, and results stay the same. `resize` and `growlab.growth.make_seed` call it. It may
    be called repeatedly, and does nothing if the CPU has AVX-512.

    Args:
        model: gets a forward pre-hook on its strided 1x1 convolutions; parameters, buffers and classes do not change.
    """
    if not _affected():
        return
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1) or max(module.stride) == 1:
            continue
        if _in_default_layout not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_in_default_layout, with_kwargs=True)


def _affected() -> bool:
    limited = any(os.environ.get(f"{prefix}_MAX_CPU_ISA") for prefix in ("ONEDNN", "DNNL"))
    return limited or torch.backends.cpu.get_cpu_capability() != "AVX512"


def _in_default_layout(
    module: nn.Conv2d, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if module.in_channels >= _VECTOR:
        return inputs, named
    # torch derives the layout from the strides of either; `network.to(memory_format=torch.channels_last)` changes them.
    if module.weight.device.type == "cpu" and module.weight.stride() != _default(module.weight).stride():
        module.weight.data = _default(module.weight.data)
    return tuple(map(_default, inputs)), {name: _default(value) for name, value in named.items()}


def _default(x: Any) -> Any:
    # `contiguous` alone keeps strides of channels_last where a dimension has size 1.
    return x.contiguous().flatten().view(x.shape) if isinstance(x, Tensor) and x.device.type == "cpu" else x
