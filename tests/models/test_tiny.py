import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.models.tiny import byte_tokenizer, random_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("text", ["plain", "zwölf 漢字 🙂\n\ttab", "\x00\x7f ÿ", "  spaces  "])
def test_every_text_has_a_tokenization_that_decodes_to_it(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 259
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        256,
        257,
        258,
    )
    assert byte_tokenizer(prepend_bos=True)("ab").input_ids == [256, 97, 98]


def test_weights_depend_on_config_and_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = random_model(CONFIG, seed=3)[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = random_model(CONFIG, seed=3)[0], random_model(CONFIG, seed=4)[0]
    weights = [m.model.layers[1].self_attn.k_proj.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_vocabulary_covers_the_tokenizer():
    model, tokenizer = random_model(CONFIG, seed=0)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    wide, _ = random_model({**CONFIG, "vocab_size": 512}, seed=0)
    assert wide.get_input_embeddings().weight.shape[0] == 512


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "zzz"}, "'zzz' is not a model type"),
        ({"model_type": None}, "None is not a model type"),
        ({"vocab_size": 100}, "smaller than the byte tokenizer's 259"),
        ({"num_attention_heads": 7}, "not a multiple"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_configs_that_make_no_model(changes, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        random_model({**CONFIG, **changes}, seed=0)
    assert "\n" not in str(caught.value)
