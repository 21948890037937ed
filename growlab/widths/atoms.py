"""Unification of axes during tracing: find the runs of positions that must carry the same channels.

While a network is traced, every axis is a list of runs over *atoms*, the smallest sets of channels distinguished so
far. Axes that meet are unified: atoms are bound to each other, split where one axis has a finer structure, or frozen
where the structures cannot be reconciled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Run:
    """`outer x size(atom) x inner` positions of one atom, or `outer` fixed positions where atom is None.

    `root` is the origin of fixed positions: the atom whose freezing caused theirs, or a reason.
    """

    atom: int | None
    outer: int = 1
    inner: int = 1
    root: int | str | None = field(default=None, compare=False)

    @property
    def unrooted(self) -> bool:
        """True if the positions are fixed and their origin is unknown."""
        return self.atom is None and self.outer > 1 and self.root is None

    @property
    def bare(self) -> bool:
        """True if the run is exactly its atom's channels, neither repeated nor stretched."""
        return self.atom is not None and self.outer == 1 and self.inner == 1


Runs = tuple[Run, ...]
#: Last words of a reason for freezing an axis because the other one is fixed.
STAYING = "that keep their full width"


def fixed(size: int, root: int | str | None = None) -> Runs:
    """Return an axis of `size` positions that never changes; empty for size 0."""
    return (Run(None, size, root=root),) if size else ()


@dataclass
class Atoms:
    """Atoms of one trace, and the runs that they are bound to."""

    sizes: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    _bound: dict[int, Runs] = field(default_factory=dict)
    frozen_because: dict[int, str] = field(default_factory=dict)
    # Origin of each frozen atom; see `Run`.
    _roots: dict[int, int | str] = field(default_factory=dict)
    _origin: dict[int, Runs] = field(default_factory=dict)
    # Atoms that have been unified only with constants so far.
    _constant: set[int] = field(default_factory=set)

    def new(self, size: int, below: int = 0) -> Runs:
        """Return a new axis of `size` channels: a single atom without constraints."""
        self.sizes.append(size)
        self.below.append(below)
        return (Run(len(self.sizes) - 1),)

    def of_constants(self, size: int) -> Runs:
        """Return an axis of equal entries (zeros, a repeated value), which adopts the layout of axes that it meets."""
        if size <= 1:
            return fixed(size)
        axis = self.new(size)
        self._constant.add(len(self.sizes) - 1)
        return axis

    def settle(self, runs: Runs | None = None) -> None:
        """Freeze atoms that have been unified only with constants: those of one axis, or all."""
        atoms = set(self._constant) if runs is None else {run.atom for run in self.resolve(runs)} & self._constant
        for atom in atoms - {None}:
            if atom not in self._bound:
                self.freeze((Run(atom),), "constants of the forward")

    def length(self, runs: Runs) -> int:
        """Number of positions at full width."""
        return sum(self._run_length(run) for run in runs)

    def resolve(self, runs: Runs) -> Runs:
        """Rewrite an axis in terms of atoms that are not bound to anything."""
        result: list[Run] = []
        for run in runs:
            if run.atom is None or run.atom not in self._bound:
                pieces: tuple[Run, ...] = (run,)
            else:
                inside = self.resolve(self._bound[run.atom])
                self._bound[run.atom] = inside
                pieces = self._nest(inside, run.outer, run.inner)
            for piece in pieces:
                last = result[-1] if result else None
                if piece.atom is None and last is not None and last.atom is None:
                    root = piece.root if last.root is None else last.root
                    result[-1] = Run(None, last.outer + piece.outer, root=root)
                else:
                    result.append(piece)
        return tuple(result)

    def freeze(self, runs: Runs, reason: str, root: int | str | None = None) -> None:
        """Make every atom of an axis fixed, for a reason: its channels keep their full width.

        `root` is the origin of the constraint, see `Run`; None: each atom itself.
        """
        for run in self.resolve(runs):
            if run.atom is not None:
                self.frozen_because[run.atom] = reason
                self._roots[run.atom] = run.atom if root is None else root
                self._bound[run.atom] = fixed(self.sizes[run.atom], self._roots[run.atom])

    def freeze_single(self) -> None:
        """Freeze atoms of a single channel, which cannot be narrower."""
        for atom, size in enumerate(self.sizes):
            if size == 1 and atom not in self._bound:
                self.freeze((Run(atom),), "a single channel")

    def frozen_whole(self, runs: Runs) -> bool:
        """Return True if an axis was frozen itself, as the axis that it stretches, or in all parts it was cut into.

        Repetitions of a frozen atom do not count, nor do axes with only some frozen parts.
        """
        while len(runs) == 1 and runs[0].outer == 1 and runs[0].atom is not None:
            atom = runs[0].atom
            if atom in self.frozen_because:
                return True
            runs = self._origin.get(atom, ())
        return len(runs) > 1 and all(self.frozen_whole((run,)) for run in runs)

    def why_fixed(self, runs: Runs) -> str:
        """Return the reason why an axis was frozen, or an empty string."""
        atom = next(self._frozen(runs), None)
        return "" if atom is None else self.frozen_because[atom]

    def root(self, runs: Runs) -> int | str | None:
        """Return the origin of a frozen axis, see `Run`; None if the axis is the origin itself or is not frozen."""
        atom = next(self._frozen(runs), None)
        return None if atom is None or self._roots[atom] == atom else self._roots[atom]

    def _frozen(self, runs: Runs) -> Iterator[int]:
        for run in runs:
            if run.atom in self.frozen_because:
                yield run.atom
            elif run.atom is not None:
                yield from self._frozen(self._origin.get(run.atom, ()))

    def parts(self, runs: Runs) -> Iterator[int]:
        """Yield every atom of an axis, and recursively the atoms that each was bound to."""
        for run in runs:
            if run.atom is not None:
                yield run.atom
                yield from self.parts(self._origin.get(run.atom, ()))

    def unify(self, left: Runs, right: Runs, reason: str) -> None:
        """Unify two axes of equal length, which then carry the same channels; irreconcilable atoms are frozen."""
        if self.length(left) != self.length(right):
            raise ValueError(f"axes of {self.length(left)} and {self.length(right)} positions cannot be unified")
        # Every step binds or splits an atom, which changes what the axes resolve to: start over each time.
        while self._unify_first_difference(self.resolve(left), self.resolve(right), reason):
            pass

    def cut(self, runs: Runs, sizes: Sequence[int]) -> list[Runs]:
        """Cut an axis into consecutive pieces of the given sizes, splitting atoms at the cuts."""
        # A size may be 0: an expert of a mixture may get no rows.
        pieces = [self.new(size) if size else fixed(0) for size in sizes]
        self.unify(runs, tuple(run for piece in pieces for run in piece), "cut into parts")
        return [self.resolve(piece) for piece in pieces]

    def _unify_first_difference(self, left: Runs, right: Runs, reason: str) -> bool:
        while left and right:
            a, b = left[0], right[0]
            if a == b:
                left, right = left[1:], right[1:]
                continue
            length_a, length_b = self._run_length(a), self._run_length(b)
            if length_a > length_b:
                left, right, a, b, length_a, length_b = right, left, b, a, length_b, length_a
            if length_a == length_b:
                self._join(a, b, reason)
                return True
            if b.atom is None:
                left, right = (left, (*fixed(length_a, b.root), *fixed(length_b - length_a, b.root), *right[1:]))
                continue
            if b.bare:
                below = self.below[b.atom]
                first = self.new(length_a, below)
                rest = self.new(length_b - length_a, below + length_a if below else 0)
                self._bind(b.atom, first + rest, split=True)
            elif b.outer > 1:
                # Cut off whole repetitions; the next round handles a cut inside a single repetition.
                whole = max(1, length_a // (length_b // b.outer))
                left, right = (left, (Run(b.atom, whole, b.inner), Run(b.atom, b.outer - whole, b.inner), *right[1:]))
                continue
            elif length_a % b.inner == 0:
                first = self.new(length_a // b.inner)
                self._bind(b.atom, first + self.new(self.sizes[b.atom] - length_a // b.inner), split=True)
            else:
                self.freeze((b,), reason)
            return True
        return False

    def _join(self, a: Run, b: Run, reason: str) -> None:
        if a.atom is not None and b.atom is not None and a.atom != b.atom:
            for fine, coarse, atom in ((b, a, a.atom), (a, b, b.atom)):
                # The coarse run's atom is the fine run's atom, repeated and stretched.
                if fine.outer % coarse.outer == 0 and fine.inner % coarse.inner == 0:
                    repeated = Run(fine.atom, fine.outer // coarse.outer, fine.inner // coarse.inner)
                    self._bind(atom, (repeated,))
                    return
        if a.atom is not None and b.atom is not None:
            reason = reason.replace(STAYING, "that are laid out otherwise")
        self.freeze((a, b), reason, b.root if a.root is None else a.root)

    def _bind(self, atom: int, runs: Runs, split: bool = False) -> None:
        atoms = {run.atom for run in runs if run.atom is not None}
        if atom not in self._constant:
            self._constant -= atoms
        elif split:
            self._constant |= atoms
        if len(runs) == 1 and runs[0].atom is not None:
            target = runs[0].atom
            self.below[target] = max(self.below[target], self.below[atom])
        self._bound[atom] = runs
        self._origin[atom] = runs

    def nest(self, runs: Runs, outer: int, inner: int) -> Runs:
        """Repeat an axis `outer` times, with every position stretched to `inner`."""
        return self._nest(self.resolve(runs), outer, inner)

    def _nest(self, inside: Runs, outer: int, inner: int) -> Runs:
        if outer == inner == 1:
            return inside
        stretched = tuple(
            replace(run, outer=run.outer * inner) if run.atom is None else replace(run, inner=run.inner * inner)
            for run in inside
        )
        if len(stretched) == 1:
            return (replace(stretched[0], outer=stretched[0].outer * outer),)
        return stretched * outer

    def _run_length(self, run: Run) -> int:
        return run.outer * run.inner * (1 if run.atom is None else self.sizes[run.atom])


@dataclass
class ScaleClasses:
    """Union-find over activations that share a scale."""

    _parent: list[int] = field(default_factory=list)
    _unit: set[int] = field(default_factory=set)

    def new(self, unit: bool = False) -> int:
        """Create a scale class; `unit` if its scale must not change."""
        self._parent.append(len(self._parent))
        if unit:
            self._unit.add(len(self._parent) - 1)
        return len(self._parent) - 1

    def find(self, scale: int) -> int:
        """Return the representative of a class."""
        while self._parent[scale] != scale:
            self._parent[scale] = self._parent[self._parent[scale]]
            scale = self._parent[scale]
        return scale

    def union(self, left: int, right: int) -> int:
        """Merge two classes and return the representative."""
        left, right = self.find(left), self.find(right)
        if left != right:
            self._parent[right] = left
            if right in self._unit:
                self._unit.add(left)
        return left

    def pin(self, scale: int) -> None:
        """Mark a class as one whose scale must not change."""
        self._unit.add(self.find(scale))

    def units(self) -> frozenset[int]:
        """Return the representatives of all classes whose scale must not change."""
        return frozenset(self.find(scale) for scale in self._unit)
