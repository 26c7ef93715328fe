"""A model that looks at pictures, of random weights: run by the engine environment's Python.

Usage: ``python tiny_llava.py TINY_CHAT FOLDER``.
"""

from __future__ import annotations

import sys

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

# The default one needs torchvision, which the CPU engine does not have.
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endfor %}"
)


def make(tiny_chat: str, folder: str) -> None:
    """Two layers of sight before the tiny chat model's own layers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = AutoConfig.from_pretrained(tiny_chat)
    text.vocab_size = (len(tokenizer) + 63) // 64 * 64
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    side = {"height": 28, "width": 28}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
