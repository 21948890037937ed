"""Code in a module's forward whose backward pass is its own: functions with one, and activation checkpoints."""

import inspect
import sys
from types import FrameType

import torch
from torch import nn
from torch.utils import checkpoint

_CALL = nn.Module._call_impl.__code__
# It calls its function again in the backward pass.
_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__


def called_apart(module: nn.Module | None = None) -> tuple[nn.Module | None, str]:
    """Name the code with a backward pass of its own that the caller runs in, inside of a module's forward.

    Args:
        module: whose forward runs; None: the innermost one's.

    Returns:
        The module, and the code; "": there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    apart = ""
    while frame is not None:
        own = frame.f_locals.get("self") if frame.f_code is _CALL else None
        if own is not None and module in (None, own):
            return own, apart
        apart = apart or ("torch.utils.checkpoint" if frame.f_code is _CHECKPOINT else _function_of(frame))
        frame = frame.f_back
    return None, apart


def _function_of(frame: FrameType) -> str:
    """Names the function with a backward pass of its own whose forward this is; "": none."""
    if frame.f_code.co_name != "forward" or "self" in frame.f_locals:
        return ""
    kinds = [torch.autograd.Function]
    while kinds:
        kind = kinds.pop()
        forward = inspect.unwrap(vars(kind)["forward"]) if "forward" in vars(kind) else None
        forward = getattr(forward, "__func__", forward)
        if kind is not checkpoint.CheckpointFunction and getattr(forward, "__code__", None) is frame.f_code:
            return f"the torch.autograd.Function {kind.__name__}"
        kinds += kind.__subclasses__()
    return ""
