"""The unchanged model on the evaluation text, measured once and read by every format that is compared with it.

    hidden.safetensors   window.{i}  [T, D]: what the last layer hands to the head, in the model's type
    reference.json       {ppl_fp, tokens, needle: [{task, length, depth, number, fp}]}

The head turns hidden states into the very logits that the whole model gave, bit for bit, at a fraction of the size
and of the time.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvcalib.eval.fidelity import Fidelity, merged
from kvcalib.eval.needle import Trial, answered, fits, trials_of

HIDDEN, FACTS = "hidden.safetensors", "reference.json"
Progress = Callable[[Iterable, int, str], Iterable]


def reference(
    model,
    tokenizer,
    windows: torch.Tensor,
    *,
    tasks: list[str],
    lengths: list[int],
    depths: list[float],
    trials: int,
    seed: int,
    out: Path,
    progress: Progress,
) -> dict:
    """windows int64 [n, T]. Writes both files into `out`, returns {ppl_fp, tokens, needle_fp}."""
    parts, hidden = [], {}
    jobs = trials_of(tasks, [n for n in lengths if fits(model, n)], depths, trials)
    with torch.no_grad():
        for index, window in enumerate(progress(windows.to(model.device), len(windows), "full precision")):
            with _kept(model.base_model) as kept:
                logits = model(window[None], cache=DynamicCache(config=model.config), use_cache=True).logits[0]
            hidden[f"window.{index}"] = kept[0][0].contiguous().cpu()
            part = Fidelity()
            part.observe(logits[:-1], logits[:-1], window[1:])
            parts.append(part)
        rows = []
        for trial in progress(jobs, len(jobs), "needles, full precision") if jobs else ():
            passed, _, _ = answered(model, tokenizer, DynamicCache(config=model.config), trial, seed)
            rows.append({**trial._asdict(), "fp": passed})
    total = merged(parts)
    save_file(hidden, Path(out) / HIDDEN)
    facts = {"ppl_fp": total.ppl, "tokens": total.tokens, "needle": rows}
    (Path(out) / FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    share = sum(row["fp"] for row in rows) / len(rows) if rows else None
    return {"ppl_fp": total.ppl, "tokens": total.tokens, "needle_fp": share}


def read_trials(folder: Path) -> list[tuple[Trial, bool]]:
    """The trials of a finished reference, and whether the unchanged model passed."""
    facts = json.loads((Path(folder) / FACTS).read_text(encoding="utf-8"))
    return [(Trial(*(row[name] for name in Trial._fields)), row["fp"]) for row in facts["needle"]]


def read_hidden(folder: Path) -> Iterator[torch.Tensor]:
    """Hidden states [T, D], window after window."""
    with safe_open(Path(folder) / HIDDEN, "pt") as file:
        for index in range(len(file.keys())):
            yield file.get_tensor(f"window.{index}")


def head(model, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, D] -> logits [T, V], by all that the model does after its last layer."""
    base, states = model.base_model, hidden[None].to(model.device)
    base.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=states)
    try:
        return model(torch.zeros(1, len(hidden), dtype=torch.int64, device=model.device), use_cache=False).logits[0]
    finally:
        del base.forward


@contextmanager
def _kept(base) -> Iterator[list]:
    """A list that gets the hidden states of every pass through `base`."""
    kept: list[torch.Tensor] = []
    handle = base.register_forward_hook(lambda module, args, output: kept.append(output.last_hidden_state))
    try:
        yield kept
    finally:
        handle.remove()
