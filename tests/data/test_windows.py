import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcalib.data.windows import leading_bos, make_windows, tokenizer_identity, with_repeats
from kvcalib.errors import ConfigError
from kvcalib.models.tiny import byte_tokenizer

TEXT = "".join(f"{i:04d} " for i in range(400))  # 2000 bytes, every position recognisable
WIKITEXT = os.environ.get("WIKITEXT2")  # the folder of wiki.test.raw


def make(text=TEXT, tokenizer=None, **changes):
    arguments = {"count": 4, "length": 100, "order": "start", "seed": 0, "max_length": None}
    return make_windows(text, tokenizer or byte_tokenizer(), **{**arguments, **changes})


def starts(windows, tokenizer=None):
    """Byte offset in TEXT at which each window begins."""
    texts = (tokenizer or byte_tokenizer()).batch_decode(windows.ids, skip_special_tokens=True)
    return [TEXT.index(text) for text in texts]


def test_start_takes_consecutive_windows():
    windows = make()
    assert windows.ids.shape == (4, 100)
    assert windows.ids.dtype == torch.int64
    assert starts(windows) == [0, 100, 200, 300]


def test_spread_covers_the_text_without_overlap():
    assert starts(make(order="spread")) == [0, 500, 1000, 1500]
    assert starts(make(order="spread", count=20)) == [100 * i for i in range(20)]
    assert starts(make(order="spread", count=3, length=301)) == [0, 666, 1333]


def test_random_is_decided_by_the_seed_alone():
    torch.manual_seed(1)
    first = make(order="random", seed=5)
    torch.manual_seed(2)
    again = make(order="random", seed=5)
    other = make(order="random", seed=6)
    assert torch.equal(first.ids, again.ids)
    assert first.hash == again.hash != other.hash
    positions = starts(first)
    assert positions == sorted(set(positions))
    assert all(p % 100 == 0 for p in positions)
    assert len(set(starts(make(order="random", count=20)))) == 20


@pytest.mark.parametrize("order", ["start", "spread", "random"])
def test_bos_of_the_tokenizer_starts_every_window_once(order):
    tokenizer = byte_tokenizer(prepend_bos=True)
    windows = make(tokenizer=tokenizer, order=order)
    assert windows.ids.shape == (4, 100)
    assert (windows.ids == tokenizer.bos_token_id).sum(dim=1).tolist() == [1] * 4
    assert (windows.ids[:, 0] == tokenizer.bos_token_id).all()
    assert windows.source["bos"] == tokenizer.bos_token_id
    if order == "start":
        assert starts(windows) == [0, 99, 198, 297]


def test_no_bos_where_the_tokenizer_adds_none():
    assert leading_bos(byte_tokenizer()) is None
    assert byte_tokenizer().bos_token_id not in make().ids


@pytest.mark.parametrize("length", [9, 10, 2, 1])
def test_a_window_that_repeats_says_everything_twice_but_its_start(length):
    ids = torch.arange(2 * length).view(2, length)
    half = (length - 1) // 2
    repeated, number = with_repeats(ids, 1.0)
    assert number == 2
    for before, after in zip(ids, repeated, strict=True):
        assert torch.equal(after[: length - half], before[: length - half])
        assert torch.equal(after[length - half :], before[length - 2 * half : length - half])
        assert after[0] not in after[1:]
    assert ids.flatten().tolist() == list(range(2 * length))  # the argument stays


@pytest.mark.parametrize(
    ("count", "share", "chosen"),
    [
        (8, 0.25, [2, 6]),
        (8, 0, []),
        (3, 1, [0, 1, 2]),
        (1, 0.25, []),
        (2, 0.25, [1]),
        (6, 0.25, [1, 4]),
        (16, 0.25, [2, 6, 10, 14]),
        (5, 0.4, [1, 3]),
    ],
)
def test_windows_that_repeat_are_a_share_evenly_spread(count, share, chosen):
    ids = torch.arange(count * 20).view(count, 20)
    repeated, number = with_repeats(ids, share)
    assert (repeated != ids).any(-1).nonzero().flatten().tolist() == chosen
    assert number == len(chosen)


def test_too_few_tokens_names_both_counts():
    with pytest.raises(ConfigError, match=r"21 windows of 100 tokens.* only 20 \(2000 tokens\)"):
        make(count=21)
    with pytest.raises(ConfigError, match=r"1 windows of 2001 tokens.* only 0"):
        make(count=1, length=2001)
    assert make(count=20).ids.shape == (20, 100)


def test_a_bos_costs_text():
    assert make(tokenizer=byte_tokenizer(prepend_bos=True), count=20).ids.shape == (20, 100)
    with pytest.raises(ConfigError, match="only 20 "):
        make(tokenizer=byte_tokenizer(prepend_bos=True), count=21)


def test_length_is_bounded_by_the_model():
    with pytest.raises(ConfigError, match="100 tokens are longer than the 64"):
        make(max_length=64)
    assert make(max_length=100).ids.shape[1] == 100


@pytest.mark.parametrize(("count", "length"), [(0, 100), (4, 1), (-1, 100)])
def test_senseless_sizes(count, length):
    with pytest.raises(ConfigError, match=r"data\.windows"):
        make(count=count, length=length)


def test_hash_sees_ids_shape_and_tokenizer():
    base = make().hash
    assert make().hash == base
    assert make(TEXT + "more").hash == base  # the windows are the same
    assert make("x" + TEXT).hash != base
    assert make(count=2, length=200).hash != base
    assert make(tokenizer=byte_tokenizer(prepend_bos=True)).hash != base


def test_no_warning_about_the_length_of_the_text(caplog):
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 64
    make(tokenizer=tokenizer)
    assert not caplog.records


def test_tokenizer_identity_ignores_padding_and_truncation_state():
    tokenizer = byte_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_identity(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_identity(tokenizer) != before


def test_tokenizer_identity_is_stable_across_processes():
    code = (
        "from kvcalib.data.windows import tokenizer_identity as t;"
        "from kvcalib.models.tiny import byte_tokenizer as b; print(t(b()))"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "11"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == tokenizer_identity(byte_tokenizer())


@pytest.mark.slow
def test_perplexity_of_a_known_model_on_wikitext_is_the_known_one(real_smollm2):
    if not WIKITEXT:
        pytest.skip("WIKITEXT2=FOLDER is not set")
    model, tokenizer = real_smollm2
    windows = make((Path(WIKITEXT) / "wiki.test.raw").read_text(), tokenizer, length=1024, max_length=8192)
    total = 0.0
    with torch.no_grad():
        for ids in windows.ids:
            logits = model(ids[None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
    assert math.exp(total / (4 * 1023)) == pytest.approx(23.0917, abs=2e-3)
