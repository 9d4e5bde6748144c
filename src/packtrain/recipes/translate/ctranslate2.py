"""Transformers for CTranslate2, the fastest on CPUs, in fp32 or int8: those that its layers can express."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packtrain.errors import Mistake, printable
from packtrain.identity import install_command
from packtrain.pack.vocabulary import BOS, EOS, PAD, UNKNOWN
from packtrain.recipes.forms import Form, Precision
from packtrain.recipes.pairs import MAX_INPUT_TOKENS, TextNetwork
from packtrain.recipes.recipe import Decoding, Hypothesis, Recipe
from packtrain.recipes.search import LENGTH_PENALTY, length_penalty
from packtrain.recipes.translate import EXTRA_TOKENS
from packtrain.system import usable_cores

if TYPE_CHECKING:
    from torch import nn

    from packtrain.recipes.transformer import Transformer

_VOCABULARY = "shared_vocabulary.json"  # as the library calls it if source and target have the same
_POSITIONS = MAX_INPUT_TOKENS + EXTRA_TOKENS + 1  # of the longest source, and of the longest translation after BOS
_BATCH_TOKENS = 512  # that one of its threads translates together: what it works on then stays in the core's cache
PATIENCE = 1.5
"""Times the beam that must have ended: with 1 the search stops before better ones, which are longer, have ended."""
_NEVER = -1e9  # a bias: PAD and BOS are never written
Array = NDArray[np.float32]


class Ctranslate2Form(Form):
    folder = "ctranslate2"
    can_sample = False

    def write(self, recipe: Recipe, model: nn.Module, folder: Path, precision: Precision) -> None:
        from packtrain.recipes.transformer import Transformer

        if type(model) is not Transformer:
            raise Mistake(f"CTranslate2 has no layers for the model of {recipe.job.recipe}; use --format onnx")
        spec = _spec_of(model)
        if precision == "int8":
            _round_weights(spec)
        spec.validate()
        spec.optimize()
        (folder / self.folder).mkdir()
        spec.save(str(folder / self.folder))

    def load(self, recipe: Recipe, folder: Path, threads: int | None = None) -> Ctranslate2Text:
        return Ctranslate2Text(folder / self.folder, len(recipe.pack.vocabulary), threads or usable_cores())


class Ctranslate2Text(TextNetwork):
    search_tokens = 1 << 24  # all at once: the library sorts and divides them among its threads itself

    def __init__(self, folder: Path, vocabulary: int, threads: int) -> None:
        try:
            import ctranslate2
        except ImportError:
            raise Mistake(f"this model needs CTranslate2; run `{install_command('runtime')}`") from None
        try:
            names = json.loads((folder / _VOCABULARY).read_bytes())
            if names != _names(vocabulary):
                raise ValueError(f"{_VOCABULARY} does not match the model")
            # Several batches at a time, each on one thread, translate more than one batch on several threads.
            self._translator: Any = ctranslate2.Translator(
                str(folder), device="cpu", compute_type="default", inter_threads=threads, intra_threads=1
            )
        except Exception as error:  # the library's have no common base
            reason = printable(str(error).strip().split("\n")[0], 200)
            raise Mistake(f"{printable(str(folder))}: CTranslate2 cannot load it: {reason}") from error

    def search(
        self,
        source_BS: NDArray[np.int64],
        limits_B: NDArray[np.int64],
        decoding: Decoding,
        numbers: Sequence[int],  # noqa: ARG002 - only a sample depends on them
    ) -> list[list[Hypothesis]]:
        if decoding.nucleus is not None:
            raise Mistake("a model in CTranslate2's format does not sample; export it with --format onnx to do so")
        hypotheses_by_row: list[list[Hypothesis]] = [[] for _ in limits_B]
        # The library has one limit for all that it translates together, and a text that never ends is written up to it.
        classes_B = np.ceil(np.log2(limits_B))
        for like in np.unique(classes_B):
            decoding.check_wanted()
            rows = np.flatnonzero(classes_B == like)
            for row, hypotheses in zip(rows, self._together(source_BS[rows], limits_B[rows], decoding), strict=True):
                hypotheses_by_row[row] = hypotheses[: decoding.n_best]
        return hypotheses_by_row

    def _together(
        self, source_BS: NDArray[np.int64], limits_B: NDArray[np.int64], decoding: Decoding
    ) -> list[list[Hypothesis]]:
        # What is longer than its own limit is cut off below, which is rare.
        longest = int(limits_B.max())
        translated = self._translator.translate_batch(
            _rows(source_BS),
            max_batch_size=_BATCH_TOKENS,
            batch_type="tokens",
            beam_size=decoding.beam,
            patience=PATIENCE,
            num_hypotheses=decoding.beam,
            length_penalty=LENGTH_PENALTY,
            repetition_penalty=decoding.repetition,
            no_repeat_ngram_size=decoding.no_repeat,
            max_input_length=0,
            max_decoding_length=longest,
            return_scores=True,
        )
        return [_ranked(result, limit, longest) for result, limit in zip(translated, limits_B.tolist(), strict=True)]

    def losses(self, source_BS: NDArray[np.int64], target_BT: NDArray[np.int64]) -> NDArray[np.float64]:
        # It adds BOS and EOS to targets itself.
        targets = [[token for token in row if token not in _ENDS] for row in _rows(target_BT)]
        scored = self._translator.score_batch(
            _rows(source_BS), targets, max_batch_size=_BATCH_TOKENS, batch_type="tokens", max_input_length=0
        )
        return np.array([-sum(target_scores.log_probs) for target_scores in scored], np.float64)


_ENDS = (str(BOS), str(EOS))


def _names(vocabulary: int) -> list[str]:
    """Return what CTranslate2 calls our tokens: their numbers."""
    return [str(token) for token in range(vocabulary)]


def _rows(tokens_BL: NDArray[np.int64]) -> list[list[str]]:
    """Return rows without padding, by the names of their tokens."""
    return [[str(token) for token in row if token != PAD] for row in tokens_BL.tolist()]


def _ranked(result: Any, limit: int, longest: int) -> list[Hypothesis]:
    """Return the hypotheses with the scores that our own search would give them, the best first.

    The length penalties differ, so the order may, too: the library divides by a power of the length.
    """
    hypotheses = []
    for tokens, score in zip(result.hypotheses, result.scores, strict=True):
        length = len(tokens) + (len(tokens) < longest)  # EOS counts, too
        total = score * length**LENGTH_PENALTY
        hypotheses.append(Hypothesis([int(token) for token in tokens[:limit]], total / length_penalty(length)))
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


# From torch's weights to CTranslate2's specification.


def _spec_of(model: Transformer) -> Any:
    import torch

    from packtrain.recipes.transformer import sinusoids

    try:
        from ctranslate2.specs import TransformerSpec
    except ImportError:
        raise Mistake(f"export needs CTranslate2; run `{install_command('train')}`") from None
    shape = model.shape
    spec = TransformerSpec.from_config((shape.encoder_layers, shape.decoder_layers), shape.heads, pre_norm=True)
    embedding = _array(model.embedding.weight)[: model.vocabulary]
    # CTranslate2's own table would have another order of sines and cosines.
    positions = _array(sinusoids(torch.arange(_POSITIONS), shape.width))
    for stack, name in ((spec.encoder, "encoder"), (spec.decoder, "decoder")):
        embeddings = stack.embeddings[0] if name == "encoder" else stack.embeddings
        embeddings.weight = embedding
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions
        _set_norm(stack.layer_norm, getattr(model, f"{name}_norm"))
        for layer, trained in zip(stack.layer, getattr(model, name), strict=True):
            attention, feedforward = trained.attention, trained.feedforward
            _set_norm(layer.self_attention.layer_norm, trained.attention_norm)
            _set_linears(layer.self_attention.linear, [attention.query, attention.key_value], [attention.output])
            if name == "decoder":
                memory = trained.memory_attention
                _set_norm(layer.attention.layer_norm, trained.memory_norm)
                _set_linears(layer.attention.linear, [memory.query], [memory.key_value], [memory.output])
            _set_norm(layer.ffn.layer_norm, trained.feedforward_norm)
            _set_linears([layer.ffn.linear_0, layer.ffn.linear_1], [feedforward[0]], [feedforward[3]])
    spec.decoder.projection.weight = embedding
    spec.decoder.projection.bias = np.zeros(model.vocabulary, np.float32)
    spec.decoder.projection.bias[[PAD, BOS]] = _NEVER
    names = _names(model.vocabulary)
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = str(BOS), str(EOS), str(UNKNOWN)
    spec.config.decoder_start_token = str(BOS)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    return spec


def _round_weights(spec: Any) -> None:
    """Round all matrices to 8 bits, with scales of rows that give the same sums on every processor.

    Processors without VNNI multiply two neighboring weights by activations of up to 255 and add both products in 16
    bits. CTranslate2's own scales, of the largest weight alone, let such sums overflow, and they are cut off.
    """
    from ctranslate2.specs.model_spec import visit_spec

    def round_one(layer: Any, name: str, value: Any) -> None:
        if name.rpartition("/")[2] != "weight":
            return
        rows, columns = value.shape
        pairs = np.pad(value, ((0, 0), (0, columns % 2))).reshape(rows, -1, 2)
        # A sum overflows if both weights have the same sign. 128 x 255 is less than 2 ** 15; rounding may add 1 to 127.
        largest = np.maximum(pairs.clip(min=0).sum(2), -pairs.clip(max=0).sum(2)).max(1)
        largest[largest == 0] = 127.0
        scales = (127.0 / largest).astype(np.float32)
        layer.weight, layer.weight_scale = np.rint(value * scales[:, None]).astype(np.int8), scales

    visit_spec(spec, round_one)


def _array(tensor: Any) -> Array:
    array: Array = tensor.detach().float().cpu().numpy()
    return array


def _set_norm(spec: Any, norm: nn.Module) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _set_linears(specs: Sequence[Any], *layers: Sequence[nn.Module]) -> None:
    """Set linear layers, each from one of ours or from several as one."""
    for spec, ours in zip(specs, layers, strict=True):
        spec.weight = np.concatenate([_array(layer.weight) for layer in ours])
        spec.bias = np.concatenate([_array(layer.bias) for layer in ours])
