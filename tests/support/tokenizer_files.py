"""Writes small tokenizers of the two usual kinds as tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "the quick brown fox jumps over the lazy dog; def f(x): return x + 1\n" * 3

# A chat template: the role in brackets before each message.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_byte_level(path: Path, *, vocab_size: int = 300, special: tuple[str, ...] = ()) -> Path:
    """Writes a tokenizer such as Llama 3's: every byte of the text is in exactly one token."""
    special = special or ("<|begin_of_text|>", "<|end_of_text|>")
    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    # Loaders must ignore the special tokens, truncation and padding of the file.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


def write_sentence_piece(path: Path) -> Path:
    """Writes a tokenizer such as Llama 2's: a leading space, U+2581 for spaces, byte fallback."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = sorted({*"abcdefghijklmnopqrstuvwxyz▁.", "é"})
    vocab = {token: index for index, token in enumerate([*words, *characters, "▁t", "he"])}
    model = models.BPE(
        vocab,
        [("▁", "t"), ("h", "e")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer: Any = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path))
    return path


def write_config(folder: Path, **values: Any) -> None:
    """Writes tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
