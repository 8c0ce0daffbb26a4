"""A random tiny Qwen3ForCausalLM for the real server; run by the Python that SGLang is installed for.

python -m tools.contract.model OUT

Not a Qwen3.5: SGLang's hybrid models need kernels that exist for GPUs and for CPUs with AMX only.
"""

from __future__ import annotations

import sys

from fixtures.embedded.tiny import EOS, byte_tokenizer

PAD = 257


def write_model(out: str) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    write_model(sys.argv[1])
