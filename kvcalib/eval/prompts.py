"""Long prompts with something in them that only an intact cache can give back.

    haystack   sentences about a landscape, order by seed, cut at its start to the wanted length
    needles    sentences, most with a number of five digits, inserted between sentences of the haystack
    question   at the end, plain text that a base model can continue with the answer

    passkey    one needle, at `depth` of the haystack (0 first)
    several    four needles with a number each; the one asked for stands at `depth`, the others spread evenly
    tracking   four people and two houses; who lives with whom, asked of the one named at `depth`: the answer is a name

`several` and `tracking` follow the ideas of RULER's multi-key and variable-tracking tasks (arXiv 2404.06654).
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvcalib.errors import ConfigError

SEVERAL = 4
_FILLER = (
    "The grass on the hill is green and soft.",
    "The sky over the lake is wide and blue.",
    "A slow river runs past the old mill.",
    "White clouds drift above the quiet fields.",
    "The path leads down to the village and back again.",
    "Birds sing in the trees along the road.",
)
_THINGS = (
    "door code",
    "phone number",
    "locker number",
    "pass key",
    "room number",
    "order number",
    "bank code",
    "train number",
)
_NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")


class Puzzle(NamedTuple):
    """intro and question stand at the ends; the first of the needles is the one asked for."""

    intro: str
    needles: list[str]
    question: str
    answer: str


class Prompt(NamedTuple):
    """ids: the tokens; needle_end: index of the first token behind the needle asked for."""

    ids: list[int]
    needle_end: int
    answer: str


def _passkey(key: str, random_: random.Random) -> Puzzle:
    intro = "Somewhere in the long text below there is a pass key. Find it and memorize it."
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    return Puzzle(intro, [needle], "What is the pass key? The pass key is", key)


def _several(key: str, random_: random.Random) -> Puzzle:
    things = random_.sample(_THINGS, SEVERAL)
    numbers = [key, *(str(random_.randint(10000, 99999)) for _ in things[1:])]
    needles = [f"The {t} is {n}. Remember it. {n} is the {t}." for t, n in zip(things, numbers, strict=True)]
    intro = "Somewhere in the long text below there are several numbers. Find them and memorize them."
    return Puzzle(intro, needles, f"What is the {things[0]}? The {things[0]} is", key)


def _tracking(key: str, random_: random.Random) -> Puzzle:
    owner, other, guest, fourth = random_.sample(_NAMES, 4)
    needles = [
        f"{guest} lives in the house of {owner}. {guest} and {owner} live together.",
        f"{owner} lives in house {key}. {key} is the house of {owner}.",
        f"{fourth} lives in the house of {other}. {fourth} and {other} live together.",
        f"{other} lives in house {random_.randint(10000, 99999)}. That is the house of {other}.",
    ]
    intro = "Somewhere in the long text below there are several facts. Find them and memorize them."
    return Puzzle(intro, needles, f"Where does {guest} live? {guest} lives in the house of", owner)


Pose = Callable[[str, random.Random], Puzzle]
TASKS: dict[str, Pose] = {"passkey": _passkey, "several": _several, "tracking": _tracking}


def build_prompt(tokenizer, length_tokens: int, depth: float, key: str, seed: int, task: str = "passkey") -> Prompt:
    """At most `length_tokens` tokens, and less by no more than a word of filler takes.

    Raises ConfigError if needles and question alone are longer.
    """
    words = _haystack(seed, length_tokens)
    check_needles(tokenizer, [length_tokens], [depth], key=key, tasks=[task])
    puzzle = TASKS[task](key, random.Random(seed))

    def size(count: int) -> int:
        return len(_encode(tokenizer, "".join(_assemble(words[len(words) - count :], depth, puzzle))))

    count = bisect_right(range(len(words) + 1), length_tokens, key=size) - 1
    before, after = _assemble(words[len(words) - count :], depth, puzzle)
    return Prompt(_encode(tokenizer, before + after), len(_encode(tokenizer, before)), puzzle.answer)


def check_needles(
    tokenizer, lengths: list[int], depths: list[float], *, key: str = "55555", tasks: list[str] | tuple = ("passkey",)
) -> None:
    """Raises ConfigError if needles and question alone are longer than one of `lengths`."""
    if not lengths:
        return
    puzzles = [TASKS[task](key, random.Random(0)) for task in tasks]
    texts = ["".join(_assemble([], depth, puzzle)) for depth in depths for puzzle in puzzles]
    frame = max((len(_encode(tokenizer, text)) for text in texts), default=0)
    if frame > min(lengths):
        raise ConfigError(
            f"eval.needle_lengths={min(lengths)} is too short: needle and question alone take {frame} tokens,"
            f" so type a length of {frame} or more, or eval.needle_lengths=[]"
        )


def _haystack(seed: int, words: int) -> list[str]:
    """At least `words` words; every word is at least one token."""
    random_ = random.Random(seed)
    result: list[str] = []
    while len(result) < words:
        sentences = list(_FILLER)
        random_.shuffle(sentences)
        result += " ".join(sentences).split()
    return result


def _assemble(words: list[str], depth: float, puzzle: Puzzle) -> tuple[str, str]:
    """The text up to the end of the needle asked for, and the rest."""
    pieces, cut, done = [puzzle.intro], 0, 0
    for place, number in sorted(_places(words, depth, puzzle)):
        pieces += [" ".join(words[done:place]), puzzle.needles[number]]
        done = place
        cut = len(pieces) if number == 0 else cut
    pieces += [" ".join(words[done:]), puzzle.question]
    return " ".join(filter(None, pieces[:cut])), "".join(" " + piece for piece in pieces[cut:] if piece)


def _places(words: list[str], depth: float, puzzle: Puzzle) -> Iterator[tuple[int, int]]:
    """(index of the word before which it stands, number) of every needle: starts of sentences."""
    starts = [i for i in range(len(words) + 1) if i in (0, len(words)) or words[i - 1].endswith(".")]
    for number in range(len(puzzle.needles)):
        wanted = (depth + number / len(puzzle.needles)) % 1 if number else depth
        yield min((abs(i - wanted * len(words)), i) for i in starts)[1], number


def _encode(tokenizer, text: str) -> list[int]:
    """Tokens with the BOS that the tokenizer puts there by itself, but without an EOS."""
    ids = tokenizer(text).input_ids
    ended = len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ended else ids
