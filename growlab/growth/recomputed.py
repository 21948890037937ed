"""What hooks change in a module's forward, and code in it whose backward pass runs without those hooks."""

import inspect
import sys
from types import FrameType

import torch
from torch import nn
from torch.utils import checkpoint

from growlab.errors import UserError

_CALL = nn.Module._call_impl.__code__
# It calls its function again in the backward pass.
_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__


def check_whole(module: nn.Module) -> None:
    """Refuse a copy of a module that `nn.DataParallel` makes for a device, from a hook of the module's.

    Its weights are other tensors, which the hook would not know; and several devices would share what hooks keep.

    Raises:
        UserError: it is one.
    """
    # No public name says so; a test makes such a copy.
    if getattr(module, "_is_replica", False):
        raise UserError(
            f"torch.nn.DataParallel copies {type(module).__name__} to several devices in each step, which growth "
            "cannot follow: use DistributedDataParallel with a process for each device."
        )


def check_reached(module: nn.Module, what: str) -> None:
    """Refuse an operation whose gradient would be another, called from a hook of the module around its forward.

    Args:
        module: whose forward runs.
        what: the operation takes, for the message.

    Raises:
        UserError: it is called inside a checkpoint, or a function with a backward pass of its own, in that forward.
    """
    if torch.compiler.is_compiling():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code is _CALL and frame.f_locals.get("self") is module):
        apart = "torch.utils.checkpoint" if frame.f_code is _CHECKPOINT else _function(frame)
        if apart:
            raise UserError(
                f"{type(module).__name__} takes {what} inside {apart}, whose backward pass does not see what growth "
                "does to it: let it call a submodule there that has it, such as nn.Linear or nn.LayerNorm."
            )
        frame = frame.f_back


def _function(frame: FrameType) -> str:
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
