"""A vocabulary of subwords: byte-pair encoding over bytes, so that no text has unknown characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from packtrain.errors import PacktrainError

PAD, EOS, BOS, UNKNOWN = range(4)
_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def fit(cls, texts: Iterable[str], size: int) -> Vocabulary:
        """Learn `size` subwords from the texts, or fewer if the texts have no more."""
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
        tokenizer.decoder = ByteLevelDecoder()
        trainer = BpeTrainer(
            vocab_size=size,
            special_tokens=_SPECIAL,
            initial_alphabet=ByteLevel.alphabet(),  # all 256 bytes, even those that the texts do not have
            min_frequency=2,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise PacktrainError(f"the pack's vocabulary is damaged ({error}); pack the data again") from error

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every token."""
        return np.dtype("<u2") if len(self) <= 1 << 16 else np.dtype("<u4")

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without BOS and EOS.

        A special token written out in a text, such as `<eos>`, is encoded like any other text.
        """
        self._tokenizer.encode_special_tokens = True  # despite its name: special tokens in a text are plain text
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def is_strange(self, text: str) -> bool:
        """True if most characters are encoded as single bytes: the training data hardly had them."""
        if text.isascii():
            return False
        # Bytes of one character have the same offset: two tokens in a row at one place spell a character.
        starts = [start for start, _ in self._tokenizer.encode(text).offsets]
        spelled = {one for one, next_one in pairwise(starts) if one == next_one and not text[one].isspace()}
        return len(spelled) > sum(not character.isspace() for character in text) / 2

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        texts = self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [text.strip() for text in texts]
