import pytest
import torch
from transformers import DynamicCache

from kvcalib.errors import UnsupportedModel
from kvcalib.models.families import attends_by_torch, attention_modules, context_length, layer_shapes
from tests.models.zoo import FAMILIES, REFUSED, tiny

SENTENCES = {
    "falcon-alibi": "ALiBi",
    "bloom": "ALiBi",
    "deepseek_v3": "latent",
    "gemma4_text-sharing": "read the keys and values of another layer",
    "gpt_oss": "learned sink",
    "diffllama": "takes the values apart",
    "mamba": "none of its layers",
    "falcon_h1": "layer 0",
    "gptj": "inv_freq",
    "t5": "encoder-decoder",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_that_reach_the_cache(family):
    model = tiny(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(5, 12)[None], cache=cache)
    shapes = layer_shapes(model)
    filled = {i for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
    assert set(shapes) == filled
    for index, shape in shapes.items():
        assert cache.layers[index].keys.shape[1::2] == (shape.heads, shape.key_dim)
        assert cache.layers[index].values.shape[1::2] == (shape.heads, shape.value_dim)


def test_query_heads_count_the_group():
    shape = layer_shapes(tiny("qwen3_next"))[3]
    assert (shape.heads, shape.query_heads) == (2, 4)
    assert layer_shapes(tiny("gpt_neox"))[0].query_heads == 4


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_setting_that_the_family_does_not_read_changes_nothing(family):
    assert layer_shapes(tiny(family, num_key_value_heads=2)) == layer_shapes(tiny(family))


def test_linear_attention_layers_are_left_alone():
    assert list(attention_modules(tiny("qwen3_next"))) == [3]


@pytest.mark.parametrize("family", REFUSED)
def test_refused_with_one_sentence_that_says_why(family):
    from kvcalib.models.rotary import rotary

    model = tiny(family)
    with pytest.raises(UnsupportedModel, match=SENTENCES[family]) as caught:
        rotary(model)
    assert repr(family.split("-")[0]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bidirectional_and_cross_attention_are_refused():
    with pytest.raises(UnsupportedModel, match="not causal"):
        attention_modules(tiny("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(UnsupportedModel, match="cross-attention"):
        attention_modules(tiny("gpt2", add_cross_attention=True))


def test_every_accepted_model_calls_a_registered_attention_function():
    from transformers import AttentionInterface

    seen = set()

    def spy(module, query, *args, **kwargs):
        seen.add(module.layer_idx)
        return query.transpose(1, 2), None

    AttentionInterface.register("spy", spy)
    for family in FAMILIES:
        seen.clear()
        model = tiny(family)
        if attends_by_torch(model):
            continue
        model.set_attn_implementation("spy")
        with torch.no_grad():
            model(torch.arange(5, 12)[None])
        assert seen == set(attention_modules(model)), family


def test_context_length():
    assert context_length(tiny("llama")) == 256
    assert context_length(tiny("gpt2", max_position_embeddings=128)) == 128
