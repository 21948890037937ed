"""Rules for Fourier transforms and complex numbers."""

from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import fixed
from growlab.widths.rules.registry import Arguments, Value, first_tensor, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

# Number of dimensions, from the last one, that are transformed unless others are named.
_DIMENSIONS = {"": 1, "2": 2}


@rule(
    *(f"fft_{kind}fft{dims}" for kind in ("", "i", "r", "ir", "h", "ih") for dims in ("", "2", "n")),
    *("_fft_c2c", "_fft_r2c", "_fft_c2r", "fft_fftshift", "fft_ifftshift"),
)
def transformed(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Each channel is transformed by itself, over other dimensions; those keep their width."""
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
    """Of every entry its real or its imaginary part, or its conjugate."""
    x = first_tensor(args)
    return Value(x.shape, x.axes, x.scale)


@rule("view_as_real")
def as_real(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Real and imaginary parts side by side, in one more dimension."""
    x = first_tensor(args)
    return Value((*x.shape, 2), (*x.axes, fixed(2)), x.scale)


@rule("view_as_complex")
def as_complex(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """The last dimension holds real and imaginary parts."""
    x = first_tensor(args)
    tracer.atoms.freeze(x.axes[-1], "real and imaginary parts")
    return Value(x.shape[:-1], x.axes[:-1], x.scale)
