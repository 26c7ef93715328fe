"""Runs in the engine environment: a chat model of real size with random weights.

How fast an engine is does not depend on what the weights say, so benchmarks can run with it where
no model can be had. It has the shape of Llama 3.2 3B, but a vocabulary of 32,000 tokens; its
tokenizer learns from Python's standard library. Its answers mean nothing. Argument: the folder::

    .venv-engine/bin/python benchmarks/random_model.py /models/random-3b
"""

from __future__ import annotations

import itertools
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
VOCABULARY = 32_000
_TEXTS = 600
_BEGIN, _END = "<|begin|>", "<|end|>"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write(folder: Path, **shape: int) -> None:
    """The model and its tokenizer, into ``folder``. ``shape``: what differs from :data:`SHAPE`."""
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=max(VOCABULARY, len(tokenizer)),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE | shape,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_BEGIN, _END, *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        eos_token=_END,
        additional_special_tokens=roles,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _texts() -> Iterator[str]:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    for module in itertools.islice(modules, _TEXTS):
        yield module.read_text(errors="replace")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
