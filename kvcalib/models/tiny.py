"""A random model and a byte-level tokenizer: the whole pipeline without any download.

Token ids of the tokenizer:

    0..255   the byte of that value        256 <bos>   257 <eos>   258 <pad>

so any text has a tokenization and decoding gives the text back. It adds no <bos> by itself unless
asked to.
"""

from __future__ import annotations

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from kvcalib.errors import ConfigError

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"


def random_model(config: dict, *, seed: int):
    """(model fp32, tokenizer); `config`: model_type and the fields of its transformers config.

    The weights depend on config and seed alone; the global random state is left as it was.
    Raises ConfigError for a config that makes no model.
    """
    tokenizer = byte_tokenizer()
    settings = _config(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ConfigError(f"model.config={config} makes no model: {error}") from error
    return model, tokenizer


def byte_tokenizer(*, prepend_bos: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens. `prepend_bos`: start every text with <bos>, as Llama and Gemma do."""
    vocabulary = {_symbol(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    if prepend_bos:
        bos = (BOS, tokenizer.token_to_id(BOS))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _symbol(byte: int) -> str:
    """The printable character that stands for a byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def _config(config: dict, tokenizer: PreTrainedTokenizerFast):
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model.config.model_type={model_type!r} is not a model type that transformers knows")
    ours = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if config.get("vocab_size", len(tokenizer)) < len(tokenizer):
        raise ConfigError(
            f"model.config.vocab_size={config['vocab_size']} is smaller than the byte tokenizer's"
            f" {len(tokenizer)} tokens: leave it out or raise it"
        )
    try:
        settings = AutoConfig.for_model(**{**ours, **config})
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.config={config}: {reason}") from error
    if type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model.config.model_type={model_type!r} is no causal language model")
    return settings
