"""The Polar Express coefficients against their definition, computed by Remez' exchange of points.

The steps' polynomials are chosen one after the other: of all a x + b x^3 + c x^5 each has the smallest largest distance
from one on the interval in which the singular values then lie, which begins as [0.001, 1]. That choice is optimal for
the composition, too (Amsel et al., 2025, theorem 3.1). Where the interval's lower end is below 0.0241 of the upper one,
which makes large coefficients and rounding, the authors approximate from there on and center the result again.
"""

from __future__ import annotations

import numpy as np
import pytest

from hp_optim.muon.rules import _POLAR_EXPRESS, _SAFETY, NS_VARIANTS

CUSHION = 0.02407327424182761
Triple = tuple[float, float, float]


def value(step: Triple, x: float) -> float:
    a, b, c = step
    return a * x + b * x**3 + c * x**5


def best_quintic(low: float, high: float) -> tuple[Triple, float]:
    """Return the odd quintic nearest to one on an interval, and its distance, by four extrema of alternating sign."""
    inner = [low + (high - low) * part for part in (0.3, 0.75)]
    step, distance = (0.0, 0.0, 0.0), 0.0
    for _ in range(60):
        points = [low, *inner, high]
        system = np.array([[x, x**3, x**5, sign] for x, sign in zip(points, (1, -1, 1, -1))])
        a, b, c, distance = np.linalg.solve(system, np.ones(4)).tolist()
        step = (a, b, c)
        inner = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real)).tolist()
    return step, distance


def composition(low: float, steps: int) -> list[Triple]:
    high, steps_done = 1.0, []
    for _ in range(steps):
        step, _ = best_quintic(max(low, CUSHION * high), high)
        center = (value(step, low) + value(step, high)) / 2
        step = (step[0] / center, step[1] / center, step[2] / center)
        steps_done.append(step)
        low = value(step, low)
        high = 2 - low
    return steps_done


@pytest.mark.parametrize(("low", "high"), [(0.05, 1.0), (0.3, 1.7), (0.9, 1.1)])
def test_no_other_quintic_is_nearer(low: float, high: float):
    """The polynomial reaches its distance, and small changes of its coefficients make it larger."""
    step, distance = best_quintic(low, high)
    grid = np.linspace(low, high, 4001)

    def farthest(a: float, b: float, c: float) -> float:
        return float(np.abs(1 - a * grid - b * grid**3 - c * grid**5).max())

    assert farthest(*step) == pytest.approx(abs(distance), rel=1e-5)
    generator = np.random.default_rng(0)
    for _ in range(200):
        change = generator.normal(size=3) * 1e-3
        assert farthest(*(np.array(step) + change)) > abs(distance)


def test_the_published_coefficients_are_those_of_the_definition():
    steps = composition(1e-3, 7)
    for step, published in zip(steps, _POLAR_EXPRESS):
        np.testing.assert_allclose(step, published, rtol=1e-6)


def test_the_last_steps_converge_to_the_limit():
    """On a point interval around one the best quintic is that with two vanishing derivatives."""
    np.testing.assert_allclose(_POLAR_EXPRESS[-1], (1.875, -1.25, 0.375), rtol=2e-6)
    assert NS_VARIANTS["polar_express"][-1] == (1.875, -1.25, 0.375)
    step, _ = best_quintic(0.98, 1.02)
    np.testing.assert_allclose(step, (1.875, -1.25, 0.375), rtol=2e-3)


def test_the_safety_factor_keeps_the_interval():
    """Singular values may exceed one by the factor: p(x / 1.01)."""
    for (a, b, c), (x, y, z) in zip(NS_VARIANTS["polar_express"], _POLAR_EXPRESS):
        np.testing.assert_allclose([a * _SAFETY, b * _SAFETY**3, c * _SAFETY**5], [x, y, z], rtol=1e-14)
