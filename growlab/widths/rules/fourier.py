"""Rules for Fourier transforms and complex numbers."""

from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import fixed
from growlab.widths.rules.registry import Arguments, Value, first_tensor, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

# Number of trailing dimensions that are transformed by default.
_DIMENSIONS = {"": 1, "2": 2}


@rule(
    *(f"fft_{kind}fft{dims}" for kind in ("", "i", "r", "ir", "h", "ih") for dims in ("", "2", "n")),
    *("_fft_c2c", "_fft_r2c", "_fft_c2r", "fft_fftshift", "fft_ifftshift"),
)
def transformed(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Fourier transform: dimensions that are transformed keep their width, channels pass."""
    x, shape = first_tensor(args), tracer.shape(node)
    dims = args.get("dim")
    if dims is None:
        number = _DIMENSIONS.get(tracer.operation(node).rpartition("fft")[2], len(shape))
        dims = range(-number, 0)
    places = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    for place in places:
        tracer.atoms.freeze(x.axes[place], "Fourier transform over these channels")
    axes = tuple(fixed(size) if i in places else x.axes[i] for i, size in enumerate(shape))
    return Value(shape, axes, x.scale)


@rule("real", "imag", "_conj", "conj", "conj_physical", "resolve_conj", "resolve_neg")
def part_of_complex(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Real part, imaginary part or conjugate of every entry."""
    x = first_tensor(args)
    return Value(x.shape, x.axes, x.scale)


@rule("view_as_real")
def as_real(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """View of complex numbers as real ones: real and imaginary parts are one more dimension, the last one."""
    x = first_tensor(args)
    return Value((*x.shape, 2), (*x.axes, fixed(2)), x.scale)


@rule("view_as_complex")
def as_complex(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """View of real numbers as complex ones: the last dimension, of real and imaginary parts, is removed."""
    x = first_tensor(args)
    tracer.atoms.freeze(x.axes[-1], "real and imaginary parts")
    return Value(x.shape[:-1], x.axes[:-1], x.scale)
