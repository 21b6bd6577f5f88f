"""Bits where they matter: one width per unit for the least total distortion within a budget of bits.

A unit (a rotary pair of keys, a tile of value channels, of any layer) has a distortion D[w] at each width w and a
price per bit of width. For a multiplier m every unit takes the width that minimises D[w] + m * price * w on its own;
raising m lowers the bits. Bisection on m finds the cheapest allocation within the budget (Shoham and Gersho, 1988),
and what is left of the budget goes to the units that gain most per bit.
"""

import numpy as np

_STEPS = 100


def allocate(distortion: np.ndarray, price: np.ndarray, budget: float) -> np.ndarray:
    """distortion float [units, W] at widths 1..W, price [units] in bits per bit of width -> int widths [units].

    Raises ValueError if the budget does not reach for width 1 everywhere.
    """
    distortion, price = np.asarray(distortion, np.float64), np.asarray(price, np.float64)
    if not np.isfinite(distortion).all():
        raise ValueError("distortions must be finite")
    if price.sum() > budget * (1 + 1e-12):
        raise ValueError(f"a budget of {budget:g} bits is less than one bit per element ({price.sum():g})")
    widths = np.arange(1, distortion.shape[1] + 1)
    bits = price[:, None] * widths

    def at(multiplier: float) -> np.ndarray:
        return (distortion + multiplier * bits).argmin(1)

    low, high = 0.0, max(float(distortion.max()) / float(bits.min()), 1e-300)
    if (price * widths[at(low)]).sum() <= budget:
        return widths[at(low)]
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5 if low > 0 else high * 1e-6
        low, high = (middle, high) if (price * widths[at(middle)]).sum() > budget else (low, middle)
        if low == 0 and middle < 1e-290:
            break
    return widths[_fill(distortion, price, at(high), budget)]


def _fill(distortion: np.ndarray, price: np.ndarray, chosen: np.ndarray, budget: float) -> np.ndarray:
    """Spends the rest: one more bit for the unit with the largest gain per bit that still fits, until none does."""
    chosen = chosen.copy()
    rest = budget - (price * (chosen + 1)).sum()
    while True:
        upgradable = (chosen + 1 < distortion.shape[1]) & (price <= rest)
        after = np.minimum(chosen + 1, distortion.shape[1] - 1)
        rows = np.arange(len(chosen))
        gain = np.where(upgradable, (distortion[rows, chosen] - distortion[rows, after]) / price, -np.inf)
        best = int(gain.argmax())
        if gain[best] <= 0:
            return chosen
        chosen[best] += 1
        rest -= price[best]
