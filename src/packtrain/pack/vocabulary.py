"""A vocabulary of subwords: byte-pair encoding over bytes, so that no text has unknown characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from packtrain.errors import Mistake, PacktrainError, printable, quoted

PAD, EOS, BOS, UNKNOWN = range(4)
# Learning subwords takes time in the square of the longest run without spaces: 32 seconds for one of 200 kB.
MAX_TEXT_BYTES = 16_000
_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
_ALPHABET = sorted(ByteLevel.alphabet())  # a character for each byte
_MAX_TOKENS = 1_000_000
_MAX_FILE_BYTES = 100_000_000

# All of a stored vocabulary but its tokens and merges, in the format of the `tokenizers` library.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
_FORM = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": number, "content": token, **_PLAIN} for number, token in enumerate(_SPECIAL)],
    "normalizer": None,
    "pre_tokenizer": _BYTE_LEVEL,
    "post_processor": None,
    "decoder": _BYTE_LEVEL,
    "model": _MODEL,
}


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        # Despite its name: special tokens in a text are plain text. Set once, so that threads may share the vocabulary.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    @classmethod
    def fit(cls, texts: Iterable[str], size: int) -> Vocabulary:
        """Learn `size` subwords from the texts, or fewer if the texts have no more."""
        tokenizer = _tokenizer(BPE())
        trainer = BpeTrainer(
            vocab_size=size,
            special_tokens=_SPECIAL,
            initial_alphabet=ByteLevel.alphabet(),  # all 256 bytes, even those that the texts do not have
            min_frequency=2,
            show_progress=False,
        )
        tokenizer.train_from_iterator(_checked(texts), trainer)
        return cls(tokenizer)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """Read what `to_json` wrote, and nothing else.

        A pack comes from the store, and the library's format can also hold a chain of normalizers that turns one line
        into gigabytes. So the library never sees the file: the tokenizer is made anew of its tokens and merges.
        """
        try:
            tokenizer = _tokenizer(BPE(*_tokens_and_merges(json.loads(text))))
            tokenizer.add_special_tokens(_SPECIAL)
        except RecursionError:
            raise _damaged("nested too deeply") from None
        except Exception as error:  # the library raises bare Exception
            raise _damaged(printable(str(error), 200)) from error
        return cls(tokenizer)

    @classmethod
    def from_file(cls, path: Path) -> Vocabulary:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise _damaged(f"it has {size:,} bytes")
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise _damaged(f"not UTF-8 at byte {error.start:,}") from None
        return cls.from_json(text)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every token."""
        return np.dtype("<u2") if len(self) <= 1 << 16 else np.dtype("<u4")

    def to_json(self) -> str:
        """Return the vocabulary in the format of the library, but with our own fields, which no new version changes."""
        model = json.loads(self._tokenizer.to_str())["model"]
        learned = {"vocab": model["vocab"], "merges": model["merges"]}
        return json.dumps({**_FORM, "model": {**_MODEL, **learned}}, ensure_ascii=False, separators=(",", ":"))

    @property
    def pieces(self) -> tuple[str, ...]:
        """Every token as the library writes it, by its number."""
        return tuple(sorted(numbers := self._tokenizer.get_vocab(), key=numbers.__getitem__))

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without BOS and EOS.

        A special token written out in a text, such as `<eos>`, is encoded like any other text.
        """
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(_checked(texts)))]

    def is_strange(self, text: str) -> bool:
        """True if most characters are encoded as single bytes: the training data hardly had them."""
        if text.isascii():
            return False
        # Bytes of one character have the same offset: two tokens in a row at one place spell a character.
        starts = [start for start, _ in self._tokenizer.encode(text).offsets]
        spelled = {start for start, next_start in pairwise(starts) if start == next_start and not text[start].isspace()}
        return len(spelled) > sum(not character.isspace() for character in text) / 2

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        texts = self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [text.strip() for text in texts]


def _tokenizer(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _tokens_and_merges(document: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the number of each token, and the pairs of tokens that make the others; raise ValueError for any other
    document than a vocabulary of ours."""
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise ValueError("it is not a tokenizer")
    tokens, merges = model.pop("vocab", None), model.pop("merges", None)
    if document != _FORM:
        raise ValueError("it is not of the form that Packtrain writes")
    if not isinstance(tokens, dict) or not all(type(number) is int for number in tokens.values()):
        raise ValueError("its tokens are not numbered")
    first = [*_SPECIAL, *_ALPHABET]
    if not len(first) <= len(tokens) <= _MAX_TOKENS or sorted(tokens.values()) != list(range(len(tokens))):
        raise ValueError(f"its {len(tokens):,} tokens are not numbered from 0")
    if any(tokens.get(token) != number for number, token in enumerate(first)):
        raise ValueError("it does not start with the special tokens and all bytes")
    if not isinstance(merges, list) or not all(_is_merge(merge, tokens) for merge in merges):
        raise ValueError("its merges do not fit its tokens")
    return tokens, [(first_token, second_token) for first_token, second_token in merges]


def _is_merge(merge: object, tokens: dict[str, int]) -> bool:
    if not isinstance(merge, list) or len(merge) != 2 or not all(isinstance(token, str) for token in merge):
        return False
    return all(token in tokens for token in (*merge, "".join(merge)))


def _damaged(why: str) -> PacktrainError:
    return PacktrainError(f"the vocabulary is damaged ({why}); pack the data again, or export the model again")


def is_too_long(text: str) -> bool:
    """True if the text is longer than a vocabulary accepts."""
    # Counting characters is enough for nearly all texts; none has more than 4 bytes.
    return len(text) > MAX_TEXT_BYTES // 4 and len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if is_too_long(text):
            raise Mistake(f"a text has more than {MAX_TEXT_BYTES:,} bytes; shorten it: {quoted(text[:40])}...")
        yield text
