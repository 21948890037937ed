"""Detect code with a custom backward pass in a module's forward: autograd.Functions and activation checkpointing."""

import inspect
import sys
from types import FrameType

import torch
from torch import nn
from torch.utils import checkpoint

_CALL = nn.Module._call_impl.__code__
# It runs its function a second time in the backward pass.
_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__


def called_apart(module: nn.Module | None = None) -> tuple[nn.Module | None, str]:
    """Name the custom-backward code on the call stack between the caller and the forward of a module.

    Args:
        module: module at whose forward the search ends; None: the innermost one on the stack.

    Returns:
        That module, None if the stack has no such call; and a description of the code, "" if none was found.
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
    """Return a description of the autograd.Function whose forward runs in this frame, or ""."""
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
