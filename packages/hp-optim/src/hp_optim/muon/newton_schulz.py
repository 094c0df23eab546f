"""The settings of an orthogonalization: coefficients of the Newton-Schulz iteration, by name or written out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NS_DTYPES = ("float64", "float32", "bfloat16")
"""Dtypes of the products."""

Triple = tuple[float, float, float]

_SAFETY = 1.01
"""Polar Express assumes singular values of at most one, which rounding exceeds."""

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

NS_VARIANTS: dict[str, tuple[Triple, ...]] = {
    "asym5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "legacy": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}
"""Coefficients of the steps; the last ones repeat where there are more steps.

"asym5" is tuned for five steps, "legacy" is Keller Jordan's quintic, "polar_express" is from Amsel et al. (2025),
https://arxiv.org/abs/2505.16932, for singular values of at least 0.001 of the norm.
"""


@dataclass(frozen=True)
class Orthogonalization:
    """What is done to a matrix; matrices of equal shape with equal settings are computed together.

    Attributes:
        coefficients: a, b and c of each step: X becomes a X + (b A + c A A) X, where A = X X^T.
        epsilon: added to the norm by which the matrix is divided before.
        rms: the result is multiplied by this and by sqrt(max(rows, columns)).
        dtype: of the products, one of `NS_DTYPES`; None leaves it to the parameter's dtype and the kind of device.
    """

    coefficients: tuple[Triple, ...]
    epsilon: float
    rms: float
    dtype: str | None = None

    @staticmethod
    def of(
        variant: str,
        coefficients: Sequence[float] | Sequence[Sequence[float]] | None,
        steps: int,
        epsilon: float,
        rms: float,
        dtype: str | None = None,
    ) -> Orthogonalization:
        """Check Muon's options.

        Args:
            variant: a name in `NS_VARIANTS`.
            coefficients: a triple, or one for each step, in place of the variant's.
            steps: number of iterations.
            epsilon: see above.
            rms: see above.
            dtype: see above.

        Raises:
            ValueError: an unknown variant or dtype, a number out of its range, or something else than triples.
        """
        if variant not in NS_VARIANTS:
            near = difflib.get_close_matches(str(variant), NS_VARIANTS, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Muon: ns_variant must be one of {', '.join(NS_VARIANTS)}, got {variant!r}{hint}")
        if dtype is not None and dtype not in NS_DTYPES:
            raise ValueError(f"Muon: ns_dtype must be None or one of {', '.join(NS_DTYPES)}, got {dtype!r}")
        if type(steps) is not int or not 1 <= steps < 100:
            raise ValueError(f"Muon: ns_steps must be a whole number from 1 to 99, got {steps!r}")
        if not epsilon > 0:
            raise ValueError(f"Muon: ns_epsilon must be positive, for a gradient may be zero; got {epsilon!r}")
        if not rms > 0:
            raise ValueError(f"Muon: matched_adamw_rms must be positive, got {rms!r}")
        listed = NS_VARIANTS[variant] if coefficients is None else _triples(coefficients)
        if coefficients is not None and len(listed) not in (1, steps):
            raise ValueError(f"Muon: ns_coefficients has {len(listed)} triples for {steps} steps; pass one, or {steps}")
        chosen = [*listed, *[listed[-1]] * steps][:steps]
        return Orthogonalization(tuple(chosen), float(epsilon), float(rms), dtype)

    @staticmethod
    def of_group(group: Mapping[str, Any]) -> Orthogonalization:
        """Check and return what a parameter group of Muon's sets; see `of`."""
        return Orthogonalization.of(
            group["ns_variant"],
            group["ns_coefficients"],
            group["ns_steps"],
            group["ns_epsilon"],
            group["matched_adamw_rms"],
            group.get("ns_dtype"),
        )

    def scale(self, rows: int, columns: int) -> float:
        """Return what the orthogonal matrix is multiplied by."""
        return self.rms * max(rows, columns) ** 0.5


def _triples(coefficients: Sequence[float] | Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    listed = [coefficients] if coefficients and isinstance(coefficients[0], (int, float)) else list(coefficients)
    if not listed or any(len(each) != 3 for each in listed):  # type: ignore[arg-type]
        raise ValueError(f"Muon: ns_coefficients must be three numbers, or three for each step; got {coefficients!r}")
    return tuple(tuple(float(number) for number in each) for each in listed)  # type: ignore[misc,union-attr]
