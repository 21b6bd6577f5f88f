import gzip
import json
import sysconfig
import time
from pathlib import Path

import pytest

from kvcalib.data import corpora
from kvcalib.data.corpora import Corpus, check_held_out, files_of
from kvcalib.errors import ConfigError, MissingInput


def load_text(name, path, split, eval_path=None):
    return corpora.load_text(Corpus(name, path, eval_path), split)


@pytest.fixture
def lines(tmp_path):
    """A text file of 200 numbered lines."""
    file = tmp_path / "notes.txt"
    file.write_text("".join(f"line {i} of the notes\n" for i in range(200)))
    return file


def write_json(file, texts):
    body = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts)
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "wt", encoding="utf-8") as out:
        out.write(body)
    return str(file)


def test_pydoc_halves_share_no_paragraph_and_lose_none():
    from pydoc_data.topics import topics

    def paragraphs(text):
        words = (" ".join(p.split()) for p in text.split("\n\n"))
        return [w for w in words if len(w) >= 60]

    calibration, evaluation = (paragraphs(load_text("pydoc", None, s)) for s in corpora.SPLITS)
    assert not set(calibration) & set(evaluation)
    everything = {p for text in topics.values() for p in paragraphs(text)}
    assert set(calibration) | set(evaluation) == everything
    assert len(calibration) + len(evaluation) == len(everything)
    assert min(len(calibration), len(evaluation)) > 0.3 * len(everything)


def test_pycode_halves_are_source_code_and_share_no_file():
    calibration, evaluation = (load_text("pycode", None, s) for s in corpora.SPLITS)
    assert "\ndef " in calibration
    assert "\ndef " in evaluation
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for number, file in enumerate(files[:6]):
        here, there = (calibration, evaluation)[:: 1 if number % 2 == 0 else -1]
        assert file.read_text(encoding="utf-8") in here
        assert file.read_text(encoding="utf-8") not in there
    assert 0.3 < len(calibration) / len(calibration + evaluation) < 0.7


@pytest.mark.parametrize("name", ["pycode", "pydoc"])
def test_built_in_texts_read_no_file(lines, name):
    with pytest.raises(ConfigError, match="data=textfile"):
        load_text(name, str(lines), "calibration")


def test_eval_path_replaces_the_held_out_text_of_any_name(lines):
    text = load_text("pydoc", None, "evaluation", eval_path=str(lines))
    assert text == lines.read_text()
    assert "line 3 of" not in load_text("pydoc", None, "calibration", eval_path=str(lines))


def test_textfile_holds_out_its_end_at_a_line_start(lines):
    calibration, evaluation = (load_text("textfile", str(lines), s) for s in corpora.SPLITS)
    assert calibration + evaluation == lines.read_text()
    assert calibration.endswith("\n")
    assert 0.05 < len(evaluation) / len(calibration + evaluation) <= 0.1


def test_textfile_of_one_line_is_still_split(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("word " * 100)
    parts = [load_text("textfile", str(file), s) for s in corpora.SPLITS]
    assert "".join(parts) == file.read_text()
    assert all(parts)


def test_textfile_with_eval_path_keeps_the_whole_text(lines, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("held out")
    kwargs = {"eval_path": str(other)}
    assert load_text("textfile", str(lines), "calibration", **kwargs) == lines.read_text()
    assert load_text("textfile", str(lines), "evaluation", **kwargs) == "held out"


def test_globs_and_folders_are_sorted_and_joined_by_a_blank_line(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    other = tmp_path.parent / f"{tmp_path.name}.eval"
    other.write_text("held out")
    read = lambda path: load_text("textfile", path, "calibration", eval_path=str(other))  # noqa: E731
    assert read(f"{tmp_path}/*.txt") == "a.txt\n\nb.txt"
    assert read(str(tmp_path)) == "a.txt\n\nb.txt\n\nc.md"


def test_the_same_file_for_both_splits_is_refused(lines):
    with pytest.raises(ConfigError, match="calibration text too"):
        load_text("textfile", str(lines), "evaluation", eval_path=str(lines.parent / "*.txt"))


def test_files_beside_those_that_calibrate_may_judge(tmp_path):
    for part in ("train", "valid"):
        (tmp_path / f"wiki.{part}.raw").write_text(f" = {part} = \n")
    other = str(tmp_path / "wiki.valid.raw")
    assert load_text("wikitext2", str(tmp_path), "evaluation", eval_path=other) == " = valid = \n"
    with pytest.raises(ConfigError, match=r"^data\.eval_path: .*wiki\.train\.raw is calibration text too"):
        load_text("wikitext2", str(tmp_path), "evaluation", eval_path=str(tmp_path))


def test_another_text_that_judges_must_not_calibrate(lines, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("held out")
    path, held_out = str(lines), str(other)
    judges = {
        kind: Corpus("textfile", *paths, "eval.text_")
        for kind, paths in {
            "same": (path, None),
            "whole": (None, path),
            "other": (held_out, None),
            "all": (None, held_out),
        }.items()
    }
    for kind in ("same", "other", "all"):
        check_held_out(Corpus("textfile", path), judges[kind])
    with pytest.raises(ConfigError, match=r"^eval\.text_eval_path: .*notes\.txt is calibration text too"):
        check_held_out(Corpus("textfile", path), judges["whole"])
    with pytest.raises(ConfigError, match=r"^eval\.text_path: .*notes\.txt is calibration text too"):
        check_held_out(Corpus("textfile", path, held_out), judges["same"])
    assert corpora.load_text(judges["all"], "evaluation") == "held out"
    check_held_out(Corpus("textfile", str(tmp_path / "gone.txt")), judges["same"])


def test_messages_name_the_settings_of_the_text(tmp_path, lines):
    with pytest.raises(MissingInput, match=r"lost: no such file \(eval\.text_path\)$"):
        corpora.load_text(Corpus("textfile", str(tmp_path / "lost"), prefix="eval.text_"), "evaluation")
    with pytest.raises(ConfigError, match=r"^eval\.text=pydoc reads no file: use eval\.text=textfile eval\.text_path="):
        corpora.load_text(Corpus("pydoc", str(lines), prefix="eval.text_"), "evaluation")
    with pytest.raises(ConfigError, match=r"^eval\.text_path=.* evaluation needs eval\.text_eval_path=FILE"):
        corpora.load_text(Corpus("wikitext2", str(lines), prefix="eval.text_"), "evaluation")
    with pytest.raises(ConfigError, match=r"^eval\.text=textfile needs eval\.text_path="):
        corpora.load_text(Corpus("textfile", prefix="eval.text_"), "evaluation")


@pytest.mark.parametrize("name", ["textfile", "wikitext2", "c4"])
def test_missing_files_are_named(name, tmp_path):
    with pytest.raises(MissingInput, match="nothing.txt"):
        load_text(name, str(tmp_path / "nothing.txt"), "calibration")
    with pytest.raises(MissingInput, match="nothing"):
        load_text(name, str(tmp_path / "nothing*"), "calibration")


def test_blank_text_is_refused(tmp_path):
    file = tmp_path / "blank.txt"
    file.write_text(" \n\n\t\n" * 50)
    with pytest.raises(MissingInput, match=r"calibration text of data\.path=.*blank\.txt is blank"):
        load_text("textfile", str(file), "calibration")


def test_other_encodings_are_refused_with_the_offending_byte(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\xe9 ".encode("latin1") * 20)
    with pytest.raises(MissingInput, match=r"latin\.txt is not UTF-8 text \(byte 0xe9 at 3\)"):
        load_text("textfile", str(file), "calibration")


def test_a_byte_order_mark_is_no_text(tmp_path, lines):
    file = tmp_path / "bom.dat"
    file.write_bytes(b"\xef\xbb\xbfhello")
    text = load_text("textfile", str(file), "calibration", eval_path=str(lines))
    assert text == "hello"


def test_unreadable_file(tmp_path, monkeypatch, lines):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(MissingInput, match="Permission denied"):
        load_text("textfile", str(lines), "calibration")


def test_wikitext_folder_has_both_splits(tmp_path):
    (tmp_path / "wiki.train.head.raw").write_text(" = A = \n")
    (tmp_path / "wiki.test.raw").write_text(" = B = \n")
    assert load_text("wikitext2", str(tmp_path), "calibration") == " = A = \n"
    assert load_text("wikitext2", str(tmp_path), "evaluation") == " = B = \n"
    one = str(tmp_path / "wiki.train.head.raw")
    with pytest.raises(ConfigError, match=r"data\.eval_path"):
        load_text("wikitext2", one, "evaluation")
    other = str(tmp_path / "wiki.test.raw")
    assert load_text("wikitext2", one, "evaluation", eval_path=other) == " = B = \n"


def test_wikitext_of_the_hub_is_the_original_file(monkeypatch):
    rows = {"train": ["", " = A = \n", "", " text \n"], "test": ["", " = B = \n"]}
    asked = []

    def column(name, config, *, split):
        asked.append((name, config, split))
        return rows[split]

    monkeypatch.setattr(corpora, "hub_column", column)
    assert load_text("wikitext2", None, "calibration") == " \n = A = \n \n text \n"
    assert load_text("wikitext2", None, "evaluation") == " \n = B = \n"
    repository = ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert asked == [(*repository, "train"), (*repository, "test")]


def test_c4_of_the_hub_reads_one_shard_of_each_split(monkeypatch):
    asked = []

    def column(name, *, split, data_files):
        asked.append((name, data_files[split]))
        return ["one", "two"]

    monkeypatch.setattr(corpora, "hub_column", column)
    assert [load_text("c4", None, s) for s in corpora.SPLITS] == ["one\n\ntwo"] * 2
    assert asked == [("allenai/c4", corpora.C4_FILES[s]) for s in corpora.SPLITS]


@pytest.mark.parametrize("name", ["c4.json.gz", "c4.jsonl", "c4.json"])
def test_c4_local_files(tmp_path, name):
    path = write_json(tmp_path / name, ["first", "zw\u00f6lf"])
    assert load_text("c4", path, "calibration") == "first\n\nzw\u00f6lf"
    with pytest.raises(ConfigError, match=r"data\.eval_path"):
        load_text("c4", path, "evaluation")


def test_c4_folder_has_both_splits(tmp_path):
    write_json(tmp_path / "c4-train.00000-of-01024.json.gz", ["train"])
    write_json(tmp_path / "c4-validation.00000-of-00008.json.gz", ["validation"])
    assert load_text("c4", str(tmp_path), "calibration") == "train"
    assert load_text("c4", str(tmp_path), "evaluation") == "validation"


def test_c4_stops_after_enough_text(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "CHARACTERS", 10)
    path = write_json(tmp_path / "c4.json.gz", ["123456", "789012", "never"])
    assert load_text("c4", path, "calibration") == "123456\n\n789012"


def test_c4_evaluation_may_be_plain_text(tmp_path, lines):
    path = write_json(tmp_path / "c4.json.gz", ["train"])
    assert load_text("c4", path, "evaluation", eval_path=str(lines)) == lines.read_text()


def test_c4_damaged_files(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": 3}\n')
    with pytest.raises(MissingInput, match=r'line 2: no field "text"'):
        load_text("c4", str(bad), "calibration")
    bad.write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(MissingInput, match="line 2: not JSON"):
        load_text("c4", str(bad), "calibration")
    cut = tmp_path / "cut.json.gz"
    write_json(cut, ["some text that is long enough to be cut"] * 99)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(MissingInput, match=r"cut\.json\.gz cannot be read"):
        load_text("c4", str(cut), "calibration")
    plain = tmp_path / "plain.json.gz"
    plain.write_text("not compressed")
    with pytest.raises(MissingInput, match=r"plain\.json\.gz cannot be read"):
        load_text("c4", str(plain), "calibration")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="pydoc, pycode, wikitext2, c4, textfile"):
        load_text("imagenet", None, "calibration")


@pytest.mark.parametrize("name", ["wikitext2", "c4"])
def test_offline_is_a_sentence_at_once(name, monkeypatch, tmp_path):
    from datasets import config
    from huggingface_hub import constants

    for module in (config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    begun = time.monotonic()
    with pytest.raises(MissingInput, match=r"data\.path=FOLDER") as caught:
        load_text(name, None, "calibration")
    assert time.monotonic() - begun < 5
    assert "refused" in str(caught.value)
    assert config.HF_HUB_OFFLINE is False


def test_a_folder_without_files(tmp_path):
    with pytest.raises(MissingInput, match=r"a folder without files \(data\.path\)$"):
        files_of(str(tmp_path))


def test_files_of_expands_folders_deeply(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert [p.name for p in files_of(str(tmp_path))] == ["a.txt", "b.txt"]
