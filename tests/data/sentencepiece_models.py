"""A SentencePiece model of a few tokens."""

from pathlib import Path

from sentencepiece import SentencePieceTrainer


def train_sentencepiece(path: Path, texts: list[str]) -> Path:
    """Write a ``.model`` that decodes what it encodes; return its path."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(path.with_suffix("")), vocab_size=320, hard_vocab_limit=False,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        minloglevel=2,
    )  # fmt: skip
    return path
