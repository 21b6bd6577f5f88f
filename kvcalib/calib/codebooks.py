"""Stage codebooks: the levels of every layer's keys and values.

Fitted levels ("nuq") see the sampled pages exactly as run time will: `quant.codec.normalise` frames
them, takes out the outliers of each page by rank and measures the ranges. What remains are points
v, weighted by

    gradient^2 * (step * scale)^2

where step * scale is the factor from v back to x for that very element (`fit.sensitivity`). Points
beyond -1 and 1 that are no outliers keep their true value: run time gives them an end level, which
should feel that. The points are compressed to a histogram, clustered in one dimension, rounded to
bfloat16 and adjusted once more. With q_norm they are moved at last, and the edges between them stay where they were
(KVQuant's Q-Norm, arXiv 2401.18079v3). With `unbiased` the frame that codes come back in is fitted last of all, to
what the finished tables do with the sample. Other kinds of levels need no data.

levels.safetensors:  layers.{i}.{key|value}.{field}  every field of `Tables` that the format has,
                     header of `outliers` and {sample_tokens}
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kvcalib.calib import files, mixed, outliers, taps
from kvcalib.calib.sample import Sample
from kvcalib.fit import grids, kmeans, sensitivity
from kvcalib.fit.channels import refine
from kvcalib.fit.feedback import energy, fit_feedback
from kvcalib.fit.histogram import compress
from kvcalib.fit.levels import moved_levels, reassign, to_bf16_distinct
from kvcalib.fit.unbiased import SHARE, with_read_frame
from kvcalib.quant import codec, ranges
from kvcalib.quant.codebook import middles
from kvcalib.quant.rotation import rotate
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec

FILE = "levels.safetensors"
_ROUNDS = 1
_FEEDBACK_ROUNDS = 3


@dataclass(frozen=True)
class Fit:
    """How levels are fitted. solver "kmeans" or "exact"; fisher, range_weight: factors used."""

    solver: str = "kmeans"
    fisher: bool = True
    range_weight: bool = True


DEFAULT_FIT = Fit()


def codebooks(
    frames: Path,
    sample: Path,
    spec: CacheSpec,
    *,
    out: Path,
    key: Fit = DEFAULT_FIT,
    value: Fit = DEFAULT_FIT,
    budget: float | None = None,
    bins: int = 1024,
    seed: int = 0,
    progress: taps.Progress = taps.progress_bar,
) -> dict:
    """Folders written by `outliers` and `fisher`. Writes levels.safetensors into `out`.

    budget: true bits per element for levels="mixed" (see `calib.mixed`).

    The summary gives, for fitted levels, the weighted distortion of the stored levels beside those
    of k-means, of the optimum and of the grids on the same points. `sample` is not read when
    nothing is fitted. Raises MissingInput without it, ConfigError if it comes from other text.
    """
    reader = files.Reader(Path(frames) / outliers.FILE, "outliers")
    layers = files.layers(reader)
    specs, fits = {"key": _separate(spec.key), "value": _separate(spec.value)}, {"key": key, "value": value}
    sampled = [name for name, tensor_spec in specs.items() if _needs_sample(tensor_spec)]
    read = Sample(Path(sample), reader.header) if sampled else None
    fitted, summary = {}, {}
    for layer in progress(layers, len(layers), "codebooks"):
        summary[layer] = {}
        fitted[layer] = {name: _frame(reader, layer, name, specs[name]) for name in specs}
        for name in sampled:
            x, grad = read(layer, name, specs[name])
            arguments = (specs[name], fits[name], bins, seed)
            fitted[layer][name], summary[layer][name] = fit_tables(x, grad, fitted[layer][name], *arguments)
    if budget is not None:

        def points(layer: int, name: str, tables: Tables, every: int) -> mixed.Points:
            x, grad = (t.unflatten(0, (-1, PAGE))[::every].flatten(0, 1) for t in read(layer, name, specs[name]))
            return sample_points(x, grad, tables, specs[name], fits[name])

        fitted, summary = mixed.fit_mixed(points, fitted, spec, budget, progress)
    stretched = [(layer, name) for layer in layers for name in sampled if getattr(spec, name).unbiased]
    for layer, name in progress(stretched, len(stretched), "read frames") if stretched else ():
        x, _ = read(layer, name, specs[name])
        fitted[layer][name] = _read_frame(x, fitted[layer][name], getattr(spec, name), SHARE[name])
    header = {**reader.header, "spec": spec.to_dict(), "sample_tokens": read.tokens if read else 0}
    files.save(Path(out) / FILE, _tensors(fitted), header)
    return {"fitted": sampled, "layers": summary}


def _separate(spec: TensorSpec) -> TensorSpec:
    """The format without its trellis, whose tables are made last, out of what the separate levels were fitted to."""
    return replace(spec, rounding="feedback") if spec.rounding == "trellis" else spec


def _frame(reader: files.Reader, layer: int, name: str, spec: TensorSpec) -> Tables:
    zero, scale = (reader[f"layers.{layer}.{name}.{field}"] for field in ("zero", "scale"))
    return Tables(zero, scale, _per_book(grid(spec), spec, *zero.shape))


def _read_frame(x: torch.Tensor, tables: Tables, spec: TensorSpec, share: float) -> Tables:
    """x [n, H, D] of whole pages, of which every fourth one is enough."""
    seen = codec.round_trip(x.unflatten(0, (-1, PAGE))[::4], spec, tables)
    return with_read_frame(*seen, tables, static=spec.range == "static", share=share)


def _tensors(fitted: dict[int, dict[str, Tables]]) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.{name}.{field}": tensor
        for layer, both in fitted.items()
        for name, tables in both.items()
        for field, tensor in tables._asdict().items()
        if tensor is not None
    }


def _needs_sample(spec: TensorSpec) -> bool:
    return spec.levels in ("nuq", "mixed") or spec.ranks_by_error or spec.feeds_back


def fit_tables(
    x: torch.Tensor, grad: torch.Tensor, tables: Tables, spec: TensorSpec, fit: Fit, bins: int, seed: int
) -> tuple[Tables, dict]:
    """Tables with fitted levels and channel weights for a sample x, grad [n, H, D] of whole pages.

    Which elements are outliers by error depends on the levels, and the levels on which elements are left: the first
    fit takes the outliers by range, then both are repeated. So it is with what error feedback wants. Q-Norm takes the
    outliers of the last fit.
    """
    if spec.q_norm:
        tables, report = fit_tables(x, grad, tables, replace(spec, q_norm=False), fit, bins, seed)
        moved, stored = _with_q_norm(weighted_points(x, grad, tables, spec, fit), tables)
        return moved, report | {"stored": stored}
    if spec.rounding == "feedback":
        return _fit_with_feedback(x, grad, tables, spec, fit, bins, seed)
    if spec.levels == "nuq" and spec.books == "channel":
        return _fit_channels(x, grad, tables, spec, fit, bins, seed)
    if not spec.ranks_by_error:
        return _fit_levels_of(x, grad, tables, spec, fit, bins, seed)
    first, report = _fit_levels_of(x, grad, tables, replace(spec, rank="range"), fit, bins, seed)
    tables = with_sensitivity(grad, first, spec, fit)
    for _ in range(_ROUNDS if spec.levels == "nuq" else 0):
        tables, report = _fit_levels_of(x, grad, tables, spec, fit, bins, seed)
    return tables, report


def _with_q_norm(sets: list[tuple[np.ndarray, np.ndarray]], tables: Tables) -> tuple[Tables, float]:
    """Tables whose levels are moved, and their weighted distortion, the mean of all books."""
    books = zip(sets, tables.levels.double().numpy(), strict=True)
    rows, distortions = zip(*(moved_levels(x, _normal(w), levels) for (x, w), levels in books), strict=True)
    moved = torch.from_numpy(np.stack(rows)).float()
    return tables._replace(levels=moved, edges=middles(tables.levels)), float(np.mean(distortions))


def _fit_with_feedback(
    x: torch.Tensor, grad: torch.Tensor, tables: Tables, spec: TensorSpec, fit: Fit, bins: int, seed: int
) -> tuple[Tables, dict]:
    tables, report = with_sensitivity(grad, tables, spec, fit), {}
    for _ in range(_FEEDBACK_ROUNDS if spec.levels == "nuq" else 0):
        tables, report = _fit_levels_of(x, grad, tables, spec, fit, bins, seed)
    if spec.levels == "nuq" and spec.books == "channel":
        tables = tables._replace(levels=refine(*sample_points(x, grad, tables, spec, fit), tables))
    return tables, report


def _fit_levels_of(x, grad, tables: Tables, spec: TensorSpec, fit: Fit, bins: int, seed: int) -> tuple[Tables, dict]:
    if spec.levels != "nuq":
        return tables, {}
    levels, report = _fit_books(weighted_points(x, grad, tables, spec, fit), spec.bits, fit, bins, seed)
    return tables._replace(levels=levels), report


def _fit_channels(
    x: torch.Tensor, grad: torch.Tensor, tables: Tables, spec: TensorSpec, fit: Fit, bins: int, seed: int
) -> tuple[Tables, dict]:
    """One table for the layer first, then one for every channel out of it."""
    shared = tables._replace(levels=tables.levels[:1])
    shared, report = fit_tables(x, grad, shared, replace(spec, books="layer"), fit, bins, seed)
    return shared._replace(levels=refine(*sample_points(x, grad, shared, spec, fit), shared)), report


def with_sensitivity(grad: torch.Tensor, tables: Tables, spec: TensorSpec, fit: Fit) -> Tables:
    """Tables with the sensitivities that go with their frame: weight, and feedback where the format has it."""
    grad = rotate(grad, spec.rotation)
    if spec.rounding == "feedback":
        matrix, order, weight = fit_feedback(grad * tables.scale)
        return tables._replace(feedback=matrix, order=order, weight=weight)
    return tables._replace(weight=_channel_weight(grad, tables.scale, fit)) if spec.ranks_by_error else tables


def _channel_weight(grad: torch.Tensor, scale: torch.Tensor, fit: Fit) -> torch.Tensor:
    """What a squared error of u costs in each channel, fp32 [H, D] of mean 1: mean squared gradient times scale^2."""
    cost = sensitivity.weights(grad, scale, use_fisher=fit.fisher, use_range=True).double().mean(0)
    return (cost / cost.mean()).float()


def _per_book(levels: torch.Tensor, spec: TensorSpec, heads: int, dim: int) -> torch.Tensor:
    return levels.expand(spec.book_count(heads, dim), -1)


def grid(spec: TensorSpec) -> torch.Tensor:
    """Levels fp32 [1, L] that need no data; for "nuq" the uniform ones, as a place holder."""
    make: dict[str, Callable[[], np.ndarray]] = {
        "uniform": lambda: grids.uniform(spec.bits, static=spec.range == "static"),
        "nuq": lambda: grids.uniform(spec.bits, static=True),
        "mixed": lambda: grids.uniform(spec.bits, static=True),
        "nf": lambda: grids.normal_float(spec.bits),
        "fp8": grids.fp8_e4m3,
        "none": lambda: np.empty(0),
    }
    return torch.from_numpy(make[spec.levels]()).float()[None]


def weighted_points(
    x: torch.Tensor, grad: torch.Tensor, tables: Tables, spec: TensorSpec, fit: Fit
) -> list[tuple[np.ndarray, np.ndarray]]:
    """x and gradient [n, H, D] of whole pages -> (points, weights) of the inliers, one per book."""
    v, weight, kept = sample_points(x, grad, tables, spec, fit)
    heads = range(x.shape[1]) if spec.books == "head" else [slice(None)]
    return [(v[:, h][kept[:, h]].numpy(), weight[:, h][kept[:, h]].numpy()) for h in heads]


def sample_points(x: torch.Tensor, grad: torch.Tensor, tables: Tables, spec: TensorSpec, fit: Fit) -> mixed.Points:
    """x and gradient [n, H, D] of whole pages."""
    pages, grads = (t.unflatten(0, (-1, PAGE)) for t in (x, rotate(grad, spec.rotation)))
    v, inlier, coded = codec.normalise(pages, spec, tables)
    step = ranges.factor(coded.step, spec, x.shape[-1])
    if spec.rounding == "feedback":
        v = codec.to_range(codec.wanted(coded, spec, tables)[1], coded, spec)
        weight = energy(rotate(grad, spec.rotation) * tables.scale).view(v.shape[:-1]).unsqueeze(-1) * tables.weight
        weight = weight * torch.as_tensor(step).double().square() if fit.range_weight else weight
    else:
        weight = sensitivity.weights(
            grads, (tables.scale * step).expand_as(v), use_fisher=fit.fisher, use_range=fit.range_weight
        )
    kept = torch.ones_like(v, dtype=torch.bool) if inlier is None else inlier
    return mixed.Points(v.flatten(0, 1), weight.flatten(0, 1), kept.flatten(0, 1))


def _fit_books(sets, bits: int, fit: Fit, bins: int, seed: int) -> tuple[torch.Tensor, dict]:
    """Levels fp32 [books, L] and the summary, averaged over books."""
    books, reports = [], []
    for points, weights in sets:
        levels, report = fit_levels(points, weights, bits, solver=fit.solver, bins=bins, seed=seed)
        books.append(torch.from_numpy(levels).float())
        reports.append(report)
    return torch.stack(books), {k: float(np.mean([r[k] for r in reports])) for k in reports[0]}


def fit_levels(
    points: np.ndarray, weights: np.ndarray, bits: int, *, solver: str, bins: int, seed: int
) -> tuple[np.ndarray, dict]:
    """2^bits bfloat16 levels of least weighted distortion, and distortions of the alternatives."""
    mean_weight = float(weights.mean())
    points, weights = compress(points, _normal(weights), bins=bins)
    k = 2**bits
    candidates = {
        "kmeans": kmeans.weighted_kmeans(points, weights, k, seed=seed),
        "exact": kmeans.exact_kmeans(points, weights, k),
        "uniform": grids.uniform(bits, static=True),
        "nf": grids.normal_float(bits),
    }
    levels = reassign(points, weights, to_bf16_distinct(candidates[solver]))
    report = {n: kmeans.distortion(points, weights, c) for n, c in candidates.items()}
    report |= {"stored": kmeans.distortion(points, weights, levels), "mean_weight": mean_weight}
    return levels, report


def _normal(weights: np.ndarray) -> np.ndarray:
    """Weights of mean 1, so that no bin's sum underflows; all zero stays equal weights."""
    top = weights.max()
    if top == 0:
        return np.ones_like(weights)
    weights = weights / top
    return weights / weights.mean()
