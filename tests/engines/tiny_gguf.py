"""Write a tiny chat model, a folder of `.models`, as the one file that llama.cpp reads.

Run with a Python that has `gguf`: ``python tiny_gguf.py FOLDER FILE``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy

_NORMAL, _CONTROL = 1, 3
"""What llama.cpp calls a token of text and one that only marks something."""
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, folder, config)
    for name, weights in read(folder / "model.safetensors"):
        writer.add_tensor(named(name), turned(name, weights, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    places = dict(tokenizer["model"]["vocab"])
    special = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    places |= special
    tokens = sorted(places, key=lambda text: places[text])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if text in special else _NORMAL for text in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def read(path: Path) -> list[tuple[str, Any]]:
    """The tensors of a safetensors file in bfloat16, as float32."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    found = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        halves = numpy.frombuffer(data[start:end], dtype=numpy.uint16)
        whole = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
        found.append((name, whole.reshape(entry["shape"])))
    return found


def named(name: str) -> str:
    """As llama.cpp calls it."""
    bare = name.removeprefix("model.").removesuffix(".weight")
    if bare.startswith("layers."):
        _, number, part = bare.split(".", 2)
        return f"blk.{number}.{_OF_LAYER[part]}.weight"
    ends = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    return f"{ends[bare]}.weight"


def turned(name: str, weights: Any, config: dict[str, Any]) -> Any:
    """llama.cpp pairs neighbouring values where transformers pairs the two halves of a head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weights
    heads, width = config["num_attention_heads"], weights.shape[1]
    return weights.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(weights.shape)


main()
