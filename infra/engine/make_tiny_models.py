"""Make the tiny models that tests and benchmarks run on: seeded, in seconds, nothing downloaded.

Run with the engine environment's Python (it has torch, transformers and tokenizers)::

    .venv-engine/bin/python infra/engine/make_tiny_models.py .models

``OUT_DIR/tiny-chat`` is a two-layer Llama with a chat template (chat, completions, responses);
``OUT_DIR/small-chat`` the same with four wider layers, so that a prompt costs more to read than to
parse, as it does on real models (benchmarks); ``OUT_DIR/tiny-embed`` is a two-layer BERT with mean
pooling (embeddings, score); ``OUT_DIR/tiny-adapter`` is a LoRA adapter for tiny-chat, of rank 4,
with which it answers differently. Their weights are random, so their answers mean nothing; they are
there to be fast. A model that is complete is not changed, an interrupted run leaves nothing
half-written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 2026
HIDDEN = 64
CHAT_LAYERS = 2
CONTEXT_TOKENS = 8192
ADAPTER_RANK = 4
PAD, BEGIN, END, UNKNOWN = "<|pad|>", "<|begin|>", "<|end|>", "[UNK]"
COMPLETE = "complete"
"""The last file written; a folder that has it is not changed."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

CORPUS = """
A batch is a file of requests, one on each line. The engine reads the lines, answers each of them
and writes the answers to another file. The order of the answers is not the order of the requests,
so every request carries a name of its own. When a request fails, its line goes to the error file,
and the others go on. What is the capital of France? The capital of France is Paris. Summarise the
following document in three short sentences. Translate this text into German, Spanish, Italian and
Japanese. Classify the sentiment of the review as positive, negative or neutral. Write a haiku about
the sea in the morning. Explain how a transformer computes attention over a long context. You are a
helpful assistant who answers briefly and correctly. The quick brown fox jumps over the lazy dog.
She had been reading for an hour when the rain began to fall on the roof of the old house. Numbers
such as 1, 2, 3, 10, 42, 100, 1024 and 2026 occur often. {"name": "value", "list": [1, 2, 3], "ok":
true, "none": null} is a small object. def main(): return 0  # a short program, which does nothing.
Question: which of these cities is the largest? Answer: it depends on how the border is drawn. The
price of the product is $19.99 (or €17.50), not included: shipping. Please respond in one word.
"""


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)  # noqa: T201 - a command-line script
        return 2
    out = Path(sys.argv[1])
    make(out / "tiny-chat", partial(write_chat_model, hidden=HIDDEN, layers=CHAT_LAYERS))
    make(out / "small-chat", partial(write_chat_model, hidden=4 * HIDDEN, layers=4))
    make(out / "tiny-embed", write_embedding_model)
    make(out / "tiny-adapter", write_adapter)
    return 0


def make(target: Path, write: Callable[[Path], None]) -> None:
    """Write one model into a folder next to ``target`` and rename it into place."""
    if (target / COMPLETE).exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        torch.manual_seed(SEED)
        write(unfinished)
        (unfinished / COMPLETE).touch()
        unfinished.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.rename(unfinished, target)  # noqa: PTH104 - fails, as it should, if another process was faster
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_chat_model(folder: Path, *, hidden: int, layers: int) -> None:
    tokenizer = train_byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    never = [token for token in range(len(tokenizer)) if not speakable(tokenizer, token)]
    suppress(model, never)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder, safe_serialization=True)


def train_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 800 tokens: any text goes in and comes out unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    tokenizer.train_from_iterator(
        CORPUS.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=800,
            special_tokens=[PAD, BEGIN, END, *roles],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def speakable(tokenizer: PreTrainedTokenizerFast, token: int) -> bool:
    """Whether the token is printable ASCII text by itself: no half of a character, no marker."""
    if token in tokenizer.all_special_ids:
        return False
    text = tokenizer.decode([token])
    return bool(text) and text.isascii() and (text.isprintable() or text == "\n")


def suppress(model: LlamaForCausalLM, tokens: list[int]) -> None:
    """Make the model never say ``tokens``, so that answers are text and run to ``max_tokens``.

    Llama's output layer has no bias, so one hidden dimension is made constant (the embedding
    sets it, no layer writes to it) and the unwanted rows read it with a large negative weight.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0, :] = 0
            layer.mlp.down_proj.weight[0, :] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[tokens] = 0
        model.lm_head.weight[tokens, 0] = -100.0


def write_adapter(folder: Path) -> None:
    """As PEFT saves one: two small matrices for each module that it changes.

    It does not change what writes to the dimension that :func:`suppress` needs.
    """
    modules = ["q_proj", "v_proj"]
    weights = {}
    for layer in range(CHAT_LAYERS):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(ADAPTER_RANK, HIDDEN)
            weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, ADAPTER_RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny-chat",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": modules,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_embedding_model(folder: Path) -> None:
    tokenizer = make_wordpiece_tokenizer()
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder, safe_serialization=True)
    write_pooling(folder)


def make_wordpiece_tokenizer() -> BertTokenizerFast:
    """Every word of the corpus, and every printable character for the other words.

    Not trained: the trainer's vocabulary differs from run to run.
    """
    pieces = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = sorted(set(re.findall(r"[a-z]{2,}", CORPUS.lower())))
    tokens = ["[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]", *pieces]
    tokens += [f"##{piece}" for piece in pieces] + words
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=512)


def write_pooling(folder: Path) -> None:
    """Sentence-transformers' own files: mean pooling over the tokens, then unit length."""
    stages = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize").mkdir()


if __name__ == "__main__":
    raise SystemExit(main())
