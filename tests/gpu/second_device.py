"""A second device in the memory of the CPU, "second_device", on which mixed devices raise as they do on CUDA."""

import contextlib
import functools
import types
from pathlib import Path

import torch
from torch.utils import cpp_extension


@functools.cache
def register() -> None:
    """Build it (half a minute, once) and make it known to torch for the rest of the process."""
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


if __name__ == "__main__":
    register()
