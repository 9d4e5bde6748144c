"""ONNX graphs of trained models, as torch modules with example inputs: what those of all recipes share.

A search calls a graph for every token, and a graph has no state. So what a step needs goes in and comes out: keys and
values of the tokens written so far, or the state of a recurrent network. Hypotheses of one source share its memory.

Dimensions: N predicted positions, V vocabulary padded to 8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

Model = TypeVar("Model", bound=nn.Module)

CANDIDATES = 16
"""Tokens that a step returns for each hypothesis, the most likely first: a beam of 8 looks at as many."""

OUTCOME = ("logits", "candidates", "candidate_scores", "label_scores")


@dataclass(frozen=True)
class Input:
    """An example of an input, and its dimensions whose size is free; a Dim of two inputs is the same size in both."""

    example: Tensor
    free: Mapping[int, Dim]


@dataclass(frozen=True)
class Graph:
    """A module with its inputs and outputs by name. The examples have no size of 1, which torch would take as fixed."""

    module: nn.Module
    inputs: Mapping[str, Input]
    outputs: Sequence[str]


class ModelPart(nn.Module, Generic[Model]):
    """A part of a model as the module of a graph, with inputs and outputs of its own."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model: Model = model


class PlainArguments(ModelPart[nn.Module]):
    """A module whose arguments are one list, so that torch describes the sizes of all modules alike."""

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)


def outcome(logits_NV: Tensor, offsets_V: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
    """Return the logits, the best candidates with their log-probabilities, and those of the labels.

    `offsets_V` are added to the logits: a search forbids tokens with them, a loss does not.
    """
    logits_NV = logits_NV + offsets_V
    scores_NV = logits_NV.log_softmax(1)
    best = scores_NV.topk(min(CANDIDATES, scores_NV.shape[1]))
    return logits_NV, best.indices, best.values, scores_NV.gather(1, labels_N[:, None]).squeeze(1)


class ByteEmbedding(nn.Module):
    """An embedding whose rows are bytes, each row with a scale: quantization by ONNX Runtime leaves them as floats.

    `weight` has the floats: a softmax with the same weights is quantized there.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        scales = embedding.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("codes", (embedding.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, tokens: Tensor) -> Tensor:
        codes, scales = cast(Tensor, self.codes), cast(Tensor, self.scales)
        return codes[tokens].float() * scales[tokens]


def with_byte_embedding(model: nn.Module) -> nn.Module:
    """Return a copy of a model that writes texts with a smaller embedding; any other model as it is."""
    if not isinstance(embedding := getattr(model, "embedding", None), nn.Embedding):
        return model
    small = copy.deepcopy(model)
    small.add_module("embedding", ByteEmbedding(embedding))
    return small
