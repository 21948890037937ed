"""Device "second_device" in the memory of the CPU, for errors of mixed devices as on CUDA."""

import contextlib
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension


@functools.cache
def register() -> None:
    """Build the device (half a minute, once) and register it with torch."""
    source = Path(__file__).with_suffix(".cpp")
    cpp_extension.load("second_device", [str(source)], extra_cflags=["-O0", "-w"], is_python_module=False)
    torch.utils.rename_privateuse1_backend("second_device")
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "device": lambda index: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "synchronize": lambda device=None: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    torch._register_device_module("second_device", types.SimpleNamespace(**functions))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.nn.Module.to = _keeping_ties(torch.nn.Module.to)


def _keeping_ties(to: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Let `Module.to` keep parameter objects and ties, as for CUDA."""

    @functools.wraps(to)
    def moved(*args: Any, **kwargs: Any) -> torch.nn.Module:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return to(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return moved


if __name__ == "__main__":
    register()
