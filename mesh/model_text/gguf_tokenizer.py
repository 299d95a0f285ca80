"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF header.

Two families cover the Llama-like models: byte-level BPE (``tokenizer.ggml.model = gpt2``), whose
word splitting is named by ``tokenizer.ggml.pre``, and SentencePiece (``llama``), which is BPE by
piece score with byte fallback. The splitting expressions are those of each model's original
tokenizer.json, as listed in llama.cpp `src/llama-vocab.cpp` (llm_tokenizer_bpe).
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mesh.errors import ConfigError

_TOKEN_CONTROL = 3
_TOKEN_USER_DEFINED = 4
_TOKEN_BYTE = 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
}
_SPLITS |= dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), (_GPT2,))
_SPLITS |= dict.fromkeys(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)
)
_SPLITS |= dict.fromkeys(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    (_LLAMA3,),
)
_SPLITS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,))
_SPLITS |= {"qwen35": (_QWEN35,), "tekken": (_TEKKEN,), "gpt-4o": (_GPT4O,)}

_WHOLE_WORDS_FIRST = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "glm4", "tekken", "gpt-4o"}
)
"""Splits whose model takes a word that is a token as it is, before any merge."""


def build_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer; it adds no BOS by itself (see ``mesh.model_text.tokenizer``).

    Raises:
        ConfigError: the vocabulary is missing or of a family pdmesh does not know.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ConfigError("model: the GGUF file has no tokenizer.ggml.tokens")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise ConfigError(f"model: tokenizer.ggml.model {model!r} is not one of gpt2, llama")
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    control: list[AddedToken | str] = []
    visible: list[AddedToken | str] = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _TOKEN_CONTROL:
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _TOKEN_USER_DEFINED:
            visible.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(visible)
    return tokenizer


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    splits = _SPLITS.get(pre)
    if splits is None:
        raise ConfigError(f"model: tokenizer.ggml.pre {pre!r} is not one of {sorted(_SPLITS)}")
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    stages = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*stages, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ConfigError(f"model: {merge!r} in tokenizer.ggml.merges is not a pair")
    return left, right


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError("model: tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, tokens, scores, kinds),
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges_by_score(
    vocab: dict[str, int], tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored result first.

    SentencePiece joins the adjacent pair whose result has the highest score; BPE joins the pair of
    the lowest rank. They agree when ranks follow the scores (ties: the leftmost pair in both).
    """
    ranked: list[tuple[float, int, str, str]] = []
    for index, token in enumerate(tokens):
        if len(token) < 2 or kinds[index] in (_TOKEN_CONTROL, _TOKEN_USER_DEFINED, _TOKEN_BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, left, right))
    ranked.sort(key=lambda item: item[:2])
    return [(left, right) for _, _, left, right in ranked]
