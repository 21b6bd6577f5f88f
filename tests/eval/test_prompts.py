import re

import pytest

from kvcalib.errors import ConfigError
from kvcalib.eval.needle import Trial, _posed, found
from kvcalib.eval.prompts import TASKS, build_prompt, check_needles
from tests.models.zoo import tiny

KEY = "48213"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.9])
def test_the_needle_asked_for_stands_at_its_depth(tokenizer, task, depth):
    prompt = build_prompt(tokenizer, 4000, depth, KEY, 1, task)
    assert 4000 - len("village ") <= len(prompt.ids) <= 4000
    assert prompt.needle_end / len(prompt.ids) == pytest.approx(depth, abs=0.08)
    before = tokenizer.decode(prompt.ids[: prompt.needle_end])
    assert prompt.answer in before
    assert before.endswith(".")


def test_several_asks_for_one_number_of_four(tokenizer):
    prompt = build_prompt(tokenizer, 3000, 0.5, KEY, 1, "several")
    text = tokenizer.decode(prompt.ids)
    assert len(set(re.findall(r"\d{5}", text))) == 4
    thing = re.search(r"What is the (.*)\? The \1 is$", text)[1]
    assert f"The {thing} is {KEY}." in text
    assert prompt.answer == KEY


def test_tracking_asks_for_a_name_that_only_one_sentence_tells(tokenizer):
    prompt = build_prompt(tokenizer, 3000, 0.5, KEY, 1, "tracking")
    text = tokenizer.decode(prompt.ids)
    guest = re.search(r"Where does (\w+) live\? \1 lives in the house of$", text)[1]
    assert re.findall(rf"{guest} lives in the house of (\w+)\.", text) == [prompt.answer]
    others = set(re.findall(r"(\w+) lives in house", text))
    assert prompt.answer in others
    assert len(others) == 2


def test_a_name_is_the_first_word_of_the_answer():
    assert found(" Greta. The path", "Greta")
    assert not found(" the house of Greta", "Greta")
    assert not found(" Anna and Greta", "Greta")


def test_tasks_of_one_place_in_the_grid_differ(tokenizer):
    model = tiny("llama", vocab_size=259)
    ids = [_posed(model, tokenizer, Trial(task, 600, 0.5, 0), 0)[1].tolist() for task in TASKS]
    assert ids[0] != ids[1] != ids[2]


def test_too_short_for_many_needles(tokenizer):
    check_needles(tokenizer, [300], [0.5])
    with pytest.raises(ConfigError, match=r"needle_lengths=300 is too short"):
        check_needles(tokenizer, [300], [0.5], tasks=["passkey", "several"])
