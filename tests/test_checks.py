"""Cross-field checks name every problem at once, in sentences with the value and what is allowed."""

import pytest

from kvcalib.checks import check, problems
from kvcalib.errors import ConfigError
from kvcalib.settings import Books, Levels, Range, Rank, Rope, Rounding, Text


def test_default_has_no_problem(settings):
    assert list(problems(settings)) == []


def test_all_problems_are_reported_together(settings):
    settings.quant.key.bits = 9
    settings.quant.value.group = 24
    settings.data.windows = 0
    with pytest.raises(ConfigError) as caught:
        check(settings)
    text = str(caught.value)
    assert "quant.key.bits=9 must be 1 to 8" in text
    assert "quant.value.group=24 must divide 32" in text
    assert "data.windows=0 must be at least 1" in text


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("name", "a/b", "becomes a folder"),
        ("name", "..", "becomes a folder"),
        ("threads", 0, "threads=0 must be at least 1"),
        ("stage.run", ["calibrate"], "must list some of collect"),
        ("stage.run", [], "must list some of collect"),
        ("quant.window", -1, "quant.window=-1"),
        ("quant.repeat", 1.5, "quant.repeat=1.5 must be a share of the windows between 0 and 1"),
        ("quant.repeat", float("nan"), "quant.repeat=nan must be a share"),
        ("quant.key.rope", Rope.none, "quant.key.rope=none must be one of: pre, post"),
        ("quant.value.rope", Rope.pre, "quant.value.rope=pre must be one of: none"),
        ("quant.key.outliers", 0.5, "quant.key.outliers=0.5 must be a share"),
        ("quant.key.outliers", float("nan"), "quant.key.outliers=nan must be a share"),
        ("quant.key.levels", Levels.none, "quant.key.bits=3 must be 16"),
        ("quant.value.levels", Levels.fp8, "quant.value.levels=fp8 needs"),
        ("eval.text_path", "x.txt", "eval.text_path is for eval.text="),
        ("eval.text_eval_path", "x.txt", "eval.text_eval_path is for eval.text="),
        ("eval.text", Text.textfile, "eval.text=textfile needs eval.text_eval_path=<file"),
        ("data.length", 35, "must be at least quant.sink + 32 = 36"),
        ("data.length", 10**6, "longer than model.context=8192"),
        ("eval.needle_lengths", [9000], "eval.needle_lengths=9000 is longer"),
        ("eval.needle_depths", [1.5], "must lie between 0 and 1"),
        ("seed", -1, "seed=-1 must be 0 to 4294967295"),
        ("seed", 2**32, "seed=4294967296 must be 0 to 4294967295"),
        ("eval.prompt", " ", "eval.prompt=' ' is blank"),
        ("eval.needle_lengths", [-5], "eval.needle_lengths=-5 must be at least 16"),
        (
            "eval.length",
            195,
            "of eval.length=195 to quantise: use quant.window=127 or less, or eval.length=196 or more",
        ),
        ("quant.window", 1000, "quant.window=1000 leaves next to nothing of eval.length=1024 to quantise"),
        ("data.name", "textfile", "needs data.path="),
        ("bench.shapes", ["8/3/64"], "bench.shapes='8/3/64' must be model, or query heads"),
        ("bench.shapes", ["32/8"], "bench.shapes='32/8' must be model"),
        ("bench.shapes", ["8/8/33"], "the last is even"),
        ("bench.lengths", [4096, 100], "bench.lengths=100 must be at least 164"),
        ("bench.batches", [0], "bench.batches=0 must be at least 1"),
        ("bench.batches", [], "bench.batches=[] leaves nothing to time"),
        ("bench.contexts", [-1], "bench.contexts=-1 must be at least 1"),
        ("bench.steps", 0, "bench.steps=0 must be at least 1"),
        ("bench.calibration", -1, "bench.calibration=-1 must be at least 0"),
    ],
)
def test_each_mistake_gives_a_sentence(settings, path, value, sentence):
    *parents, last = path.split(".")
    node = settings
    for parent in parents:
        node = getattr(node, parent)
    setattr(node, last, value)
    assert any(sentence in problem for problem in problems(settings))


@pytest.mark.parametrize(
    "change",
    [{"levels": Levels.nf}, {"rounding": Rounding.feedback}, {"books": Books.channel}],
)
def test_q_norm_is_for_fitted_levels_and_the_nearest_of_them(settings, change):
    settings.quant.value.q_norm = True
    assert list(problems(settings)) == []
    for name, value in change.items():
        setattr(settings.quant.value, name, value)
    (sentence,) = problems(settings)
    assert sentence == (
        "quant.value.q_norm=true needs quant.value.levels=nuq, quant.value.rounding=nearest and "
        "quant.value.books=layer or head"
    )


@pytest.mark.parametrize(
    "change",
    [{"levels": Levels.nf}, {"range": Range.token}, {"rank": Rank.threshold}, {"q_norm": True}],
)
def test_unbiased_is_for_fitted_levels_in_a_calibrated_range_or_a_norm(settings, change):
    settings.quant.key.unbiased = True
    assert list(problems(settings)) == []
    for name, value in change.items():
        setattr(settings.quant.key, name, value)
    (sentence,) = problems(settings)
    assert sentence == (
        "quant.key.unbiased=true needs quant.key.levels=nuq or mixed, quant.key.range=static or norm, "
        "quant.key.rank=error or range and quant.key.q_norm=false"
    )


def test_fp8_has_nothing_beyond_its_range(settings):
    key = settings.quant.key
    key.levels, key.bits, key.rank = Levels.fp8, 8, Rank.threshold
    (sentence,) = problems(settings)
    assert sentence.startswith("quant.key.rank=threshold needs other levels than quant.key.levels=fp8")


def test_a_window_that_is_too_long_is_one_sentence_about_the_window(settings):
    settings.quant.window = 100000
    (sentence,) = problems(settings)
    assert sentence.startswith("quant.window=100000 ")
    settings.stage.run = ["bench"]
    (sentence,) = problems(settings)
    assert sentence.startswith("quant.window=100000 leaves nothing of bench.lengths=")


def test_short_windows_are_fine_where_nothing_is_quantised_or_measured(settings):
    settings.eval.length = 64
    assert list(problems(settings))
    settings.stage.run = ["codebooks"]
    assert list(problems(settings)) == []
    settings.stage.run = ["evaluate"]
    for tensor in (settings.quant.key, settings.quant.value):
        tensor.levels, tensor.bits, tensor.outliers = Levels.none, 16, 0.0
    assert list(problems(settings)) == []
