"""A random Llama of half a megabyte as a GGUF file, made on the spot.

Its answers are noise: it proves the protocol of a real llama.cpp server, not the advice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

WIDTH, HEADS, FEED_FORWARD, LAYERS, CONTEXT = 64, 4, 128, 2, 4096

# Plain text, so that prompts are tokenised as by a model without special turn tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}assistant:"
)
_CORPUS = ["turn left or right, go forward, open the door, pick up the key: A B C D E F G"] * 20


def _tokens() -> tuple[list[str], list[str]]:
    """Return vocabulary and merges of a byte-level tokenizer trained on a sentence."""
    import json

    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _CORPUS, vocab_size=320, min_frequency=1, special_tokens=["<s>", "</s>"]
    )
    model = json.loads(tokenizer._tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return vocabulary, merges


def write_tiny_gguf(path: Path, *, seed: int = 0) -> Path:
    """Write the model and return its path."""
    import gguf

    vocabulary, merges = _tokens()
    size = len(vocabulary)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if i < 2 else normal for i in range(size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)

    rng = np.random.default_rng(seed)

    def tensor(name: str, *shape: int) -> None:
        weights = rng.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(name, weights.astype(np.float32))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))

    tensor("token_embd.weight", size, WIDTH)
    tensor("output.weight", size, WIDTH)
    ones("output_norm.weight")
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight")
        ones(f"blk.{layer}.ffn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        tensor(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        tensor(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, WIDTH)
        tensor(f"blk.{layer}.ffn_down.weight", WIDTH, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
