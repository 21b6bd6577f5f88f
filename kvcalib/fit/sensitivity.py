"""How much an error of an element costs: the weight of its point in the fit.

To second order the loss rises by 1/2 * F * (error of x)^2, with F the Fisher information of the
element, estimated by the squared gradient that `calib.fisher` took. The fit works on normalised points
y = (x - offset) / range, where the error of x is range times that of y, so

    weight = gradient^2 * range^2          (KVQuant, appendix E, equation 7)

with the range that run time uses for that very element. The released KVQuant code leaves range^2
out. The square is taken in float64: a gradient of 1e-25 is fine in bfloat16 and its square is not
in float32.
"""

import warnings

import torch


def weights(grad: torch.Tensor, scale: torch.Tensor, *, use_fisher: bool, use_range: bool) -> torch.Tensor:
    """Weights [N, H, D], float64, from the signed gradient [N, H, D] and a range that broadcasts.

    Either factor can be left out. All zero: ones, and a warning.
    """
    weight = torch.ones(grad.shape, dtype=torch.float64)
    if use_fisher:
        weight = weight * grad.double().square()
    if use_range:
        weight = weight * scale.double().square()
    if not torch.isfinite(weight).all():
        raise ValueError("gradients or ranges contain NaN or infinity")
    if not (weight > 0).any():
        warnings.warn("every sensitivity is zero: fitting without weights", stacklevel=2)
        return torch.ones_like(weight)
    return weight
