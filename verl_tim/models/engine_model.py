"""The engine's model: strict weight loading, one forward for prefill and decode over a paged KV cache, head,
sampling."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_tim.models.config import ModelConfig
from verl_tim.models.contract_layer import ContractLayer, Step
from verl_tim.models.place import WHOLE, Place
from verl_tim.models.stock_layer import StockLayer, rms_norm
from verl_tim.models.taps import tap
from verl_tim.models.weights import (
    WeightError,
    WeightSlot,
    checkpoint_weights,
    checksum_of,
    load_into,
    weight_digests,
)
from verl_tim.numerics.attention import resolve_attention
from verl_tim.numerics.contract import ROW_FLOOR, ContractError, check_process, contract_id, exact_region, on_gpu
from verl_tim.numerics.embedding import embedding_inference
from verl_tim.numerics.head import head_logits, log_probs_of, mask_padding, token_log_probs
from verl_tim.numerics.linear import PreparedLinear, matmul_rows
from verl_tim.numerics.norm import add_rms_norm_inference
from verl_tim.numerics.paging import DecodeBatch, PagedBatch
from verl_tim.numerics.probe import ProbeReport, ProbeShapes, probe
from verl_tim.numerics.rope import RopeTable
from verl_tim.numerics.sampling import Sampled, SamplingTensors, draw, sample
from verl_tim.numerics.shards import VocabularyPart
from verl_tim.numerics.split_head import split_draw, split_log_probs, split_logits, vocabulary_part

Numerics = Literal["contract", "stock"]
_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class EngineModel:
    """A decoder-only language model for inference, built empty; see `build_model`.

    Attributes: config, dtype (operand dtype and that of the KV cache), device, numerics, attention (the attention
    contract in use; "stock" for stock numerics).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        numerics: Numerics,
        attention: str,
        place: Place = WHOLE,
    ) -> None:
        self.config, self.dtype, self.device, self.numerics, self.place = config, dtype, device, numerics, place
        self.attention = "stock"
        if numerics == "contract":
            self.attention = resolve_attention(attention, device, config.head_dim)
            contract_id(device, dtype, self.attention)  # refuses what has no contract
        elif numerics != "stock":
            raise ContractError(f"numerics={numerics!r} is unknown; use 'contract' or 'stock'")
        if numerics == "stock" and place != WHOLE:
            raise ContractError("numerics='stock' runs on one rank; use numerics='contract' for a split model")
        self._layer_indices = place.layers(config.num_layers)
        self._part: VocabularyPart | None = None
        if place.shards.size > 1:
            self._part = vocabulary_part(place.shards, config.vocab_size, device)
        self._rope = RopeTable(
            config.rope.inverse_frequencies, config.rope.scaling, config.max_position_embeddings, device
        )
        self._loaded = False
        self._slots: dict[str, WeightSlot] = {}

    @property
    def row_floor(self) -> int:
        """`forward` takes rows in multiples of this. The GPU schedules serve any number of rows with the same bits."""
        return ROW_FLOOR if self.numerics == "contract" and not on_gpu(self.device) else 1

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(layers, kv heads, head_dim) of the keys that this rank keeps."""
        return len(self._layer_indices), self.config.num_kv_heads // self.place.shards.size, self.config.head_dim

    # -- weights ---------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        c, place = self.config, self.place
        self._slots = {}
        self._layers = []
        for index in range(c.num_layers):
            here = index in self._layer_indices
            device = self.device if here else torch.device("meta")
            layer: ContractLayer | StockLayer
            if self.numerics == "contract":
                layer = ContractLayer(c, index, dtype=self.dtype, device=device, shards=place.shards)
            else:
                layer = StockLayer(c, index, dtype=self.dtype, device=device)
            self._slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer.slots.items()}
            if here:
                self._layers.append(layer)
        self._norm = torch.zeros(c.hidden_size, dtype=self.dtype, device=self._where(place.is_last))
        self._slots[_NORM] = WeightSlot(self._norm, self.dtype)
        if c.tie_word_embeddings:
            self._allocate_tied()
            return
        embed_device = self._where(place.is_first)
        self._embed = torch.zeros(c.vocab_size, c.hidden_size, dtype=self.dtype, device=embed_device)
        self._slots[_EMBED] = WeightSlot(self._embed, self.dtype)
        self._head, self._slots[_HEAD] = self._head_weight(self._where(place.is_last))

    def _where(self, here: bool) -> torch.device:
        return self.device if here else torch.device("meta")

    def _head_weight(self, device: torch.device, *, whole: bool = False) -> tuple[Tensor, WeightSlot]:
        """The head's buffer, as its schedule wants it, and its slot; of the whole vocabulary or of this rank's part."""
        c, part = self.config, None if whole else self._part
        rows = c.vocab_size if part is None else part.width
        if self.numerics == "contract":
            prepared = PreparedLinear((rows,), c.hidden_size, dtype=self.dtype, device=device)
            buffer, target = prepared.weight_PK, prepared.weight_view(0)
        else:
            buffer = target = torch.zeros(rows, c.hidden_size, dtype=self.dtype, device=device)
        if part is None:
            return buffer, WeightSlot(target, self.dtype)
        return buffer, WeightSlot(target, self.dtype, part=part.rows, total=c.vocab_size)

    def _allocate_tied(self) -> None:
        """One buffer for embedding and head: on a CPU the head's float32 one, whose rows hold model-dtype values
        exactly. A rank with a part of the head reads it from the rows of the whole embedding, where it embeds."""
        place, part = self.place, self._part
        embeds = place.is_first
        self._head, self._slots[_EMBED] = self._head_weight(self._where(embeds or place.is_last), whole=embeds)
        self._embed = self._head
        if embeds and part is not None:
            last = part.first + part.width
            stop = last if last < part.vocab_size else self._head.shape[0]  # with the padding behind the last column
            self._head = self._head[part.first : stop]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load every weight from a stream of (HF name, full tensor); packed and per-expert MoE names both fit.

        Values are rounded to the model dtype and go straight into the prepared buffers, the only copy there is. The
        head of a model with tied embeddings may be absent or present.

        Raises:
            WeightError: naming an unknown, missing, misshapen or duplicate weight. The model then refuses to run until
                a load succeeds.
            ContractError: when a global setting of this process changes float32 arithmetic.
        """
        self._loaded = False
        if self.numerics == "contract":
            check_process(self.device)
        if not self._slots:
            self._allocate()
        with torch.no_grad():
            load_into(self._slots, weights, tied_head=(_HEAD, _EMBED) if self.config.tie_word_embeddings else None)
        self._loaded = True

    @contextlib.contextmanager
    def any_weights(self) -> Iterator[None]:
        """Within, the model runs on whatever its buffers hold (zeros before the first load): for measuring memory and
        recording graphs, where values do not matter."""
        if not self._slots:
            self._allocate()
        loaded, self._loaded = self._loaded, True
        try:
            yield
        finally:
            self._loaded = loaded

    def load_checkpoint(self, path: str | Path) -> None:
        """Load the safetensors of a local HF folder. Errors as `load_weights`."""
        self.load_weights(checkpoint_weights(path))

    def release_weights(self) -> None:
        """Free the weights; the model refuses to run until the next load."""
        self._loaded = False
        self._slots = {}
        for name in ("_layers", "_norm", "_head", "_embed"):
            if hasattr(self, name):
                delattr(self, name)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        if not self._slots:
            return 0
        held = [t for layer in self._layers for t in layer.buffers] + [self._norm, self._head, self._embed]
        storages = [t.untyped_storage() for t in held if not t.is_meta]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, copy in the model dtype) of every weight of this rank's layers; a tied head is not repeated.

        Where outputs are split the full weights are put together: a collective of the stage's ranks.
        """
        self._require_weights()
        for name, slot in self._slots.items():
            if slot.is_held:
                yield name, slot.read_full(self.place.shards)

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Shape of every weight that a load must bring, by HF name."""
        if not self._slots:
            self._allocate()
        return {name: slot.shape for name, slot in self._slots.items()}

    def weight_digests(self) -> dict[str, str]:
        """See `verl_tim.models.weights.weight_digests`; of `named_weights`, and as collective."""
        return weight_digests(self.named_weights(), self.dtype)

    def weight_checksum(self) -> str:
        """See `verl_tim.models.weights.weight_checksum`; of a model in one piece."""
        return checksum_of(self.weight_digests())

    def probe(self, page_size: int = ProbeShapes.page_size) -> ProbeReport:
        """Check the contract at this model's shapes on this device (`verl_tim.numerics.probe`); for start-up.

        `page_size`: tokens per KV page of the engine around the model.
        """
        shapes = dataclasses.replace(self.config.probe_shapes, ranks=self.place.shards.size, page_size=page_size)
        return probe(self.device, self.dtype, shapes, attention=self.attention)

    def _require_weights(self) -> None:
        if not self._loaded:
            raise WeightError("the model holds no complete set of weights: none were loaded, or the last load failed")

    # -- compute ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        token_ids_T: Tensor,
        paged: PagedBatch | DecodeBatch,
        k_pages_LPSHD: Tensor,
        v_pages_LPSHD: Tensor,
        chosen: list[Tensor] | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Run this step's rows, write their keys and values, and return their hidden states.

        Args:
            token_ids_T: int64 [T]; for the contract T is a multiple of `row_floor` (the runner pads).
            paged: the step's layout; slot_T and position_T have T entries.
            k_pages_LPSHD, v_pages_LPSHD: [layers, pages, page_size, kv heads, head_dim] in the model dtype; page 0 is
                the null page.
            chosen: gets the chosen experts [T, K] of each sparse layer appended, in layer order.
            received: what the stage before returned; None at the first stage.

        Returns:
            [T, hidden] in the model dtype, final norm applied. Of a stage that is not the last: [2, T, hidden], the
            last branch's result and the residual stream before it, for the next stage.
        """
        self._require_weights()
        rows = token_ids_T.shape[0]
        if rows % self.row_floor:
            raise ContractError(f"forward: {rows} rows; pad them to a multiple of {self.row_floor} (token 0, slot 0)")
        if paged.slot_T.shape[0] != rows:
            raise ContractError(f"forward: {rows} token ids but {paged.slot_T.shape[0]} slots")
        with exact_region(self.device.type):
            cos_TF, sin_TF = self._rope.at(paged.position_T, paged.max_context)
            step = Step(paged, cos_TF, sin_TF, self.attention, chosen)
            residual: Tensor | None = None
            if received is None:
                x = embedding_inference(token_ids_T, self._embed).to(self.dtype)
                tap("model.embed_tokens", x)
            else:
                x, residual = received.unbind()
            for index, layer in enumerate(self._layers):
                x, residual = layer(x, residual, step, k_pages_LPSHD[index], v_pages_LPSHD[index])
            assert residual is not None, "a model has layers"
            if not self.place.is_last:
                return torch.stack([x, residual])
            if self.numerics == "contract":
                h, _ = add_rms_norm_inference(x, residual, self._norm, self.config.rms_norm_eps)
            else:
                h = rms_norm(residual + x, self._norm, self.config.rms_norm_eps)
            tap("model.norm", h)
            return h

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor) -> Tensor:
        """float32 logits [B, P] of chosen rows of `forward`'s result; columns beyond the vocabulary are -inf."""
        self._require_weights()
        with exact_region(self.device.type):
            if self.numerics == "stock":
                return F.linear(hidden_BD, self._head).to(torch.float32)
            if self._part is not None:
                return split_logits(hidden_BD, self._head, self._part)
            if on_gpu(hidden_BD):
                return head_logits(hidden_BD, self._head)
            return mask_padding(matmul_rows(hidden_BD.to(torch.float32), self._head), self.config.vocab_size)

    @torch.inference_mode()
    def log_probs(self, hidden_TD: Tensor, token_T: Tensor, temperature_T: Tensor) -> Tensor:
        """float32 [T]: log-probs of given tokens for chosen rows of `forward`'s result, with the bits that `draw`
        records. token_T int64, temperature_T float32 (0: scored at 1), on the model's device."""
        self._require_weights()
        if self.numerics == "stock":
            divisor_T1 = torch.where(temperature_T == 0.0, 1.0, temperature_T)[:, None]
            return torch.log_softmax(self.logits(hidden_TD) / divisor_T1, dim=-1).gather(1, token_T[:, None])[:, 0]
        if self._part is not None:
            with exact_region(self.device.type):
                return split_log_probs(hidden_TD, self._head, self._part, token_T, temperature_T)[0]
        if on_gpu(hidden_TD):
            with exact_region(self.device.type):
                return token_log_probs(hidden_TD, self._head, token_T, temperature_T)[0]
        return log_probs_of(self.logits(hidden_TD), token_T, temperature_T)[0]

    @torch.inference_mode()
    def draw(self, hidden_BD: Tensor, params: SamplingTensors, cut_R: Tensor | None = None) -> Sampled:
        """Draw a token per row of `forward`'s result. A row without usable logits does not stop the others: its
        log-prob is NaN. `cut_R`: the rows that cut, where known (`numerics.sampling.draw`). Errors as `sample`."""
        self._require_weights()
        if self.numerics == "contract":
            with exact_region(self.device.type):
                if self._part is not None:
                    return split_draw(hidden_BD, self._head, self._part, params, cut_R)
                return draw(hidden_BD, self._head, self.config.vocab_size, params, cut_R)
        logits_BV = self.logits(hidden_BD)
        broken_B = ~torch.isfinite(logits_BV.amax(dim=-1))
        sampled = self.sample(logits_BV.masked_fill(broken_B[:, None], 0.0), params)
        sampled.log_prob_B = sampled.log_prob_B.masked_fill(broken_B, torch.nan)
        return sampled

    @torch.inference_mode()
    def sample(self, logits_BV: Tensor, params: SamplingTensors) -> Sampled:
        """Draw a token per row. Contract: log-probs by the trainer's own function. Stock: by `log_softmax`."""
        if self.numerics == "contract":
            return sample(logits_BV, params)
        sampled = sample(logits_BV, params)
        divisor = torch.where(params.temperature_B == 0.0, 1.0, params.temperature_B)
        scores = torch.log_softmax(logits_BV / divisor[:, None], dim=-1)
        sampled.log_prob_B = scores.gather(1, sampled.token_B[:, None])[:, 0]
        return sampled


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    numerics: Numerics = "contract",
    attention: str = "auto",
    place: Place = WHOLE,
) -> EngineModel:
    """An `EngineModel` without weights; they are allocated by the first load.

    `attention`: the attention contract, see `verl_tim.numerics.attention.resolve_attention`. `place`: the part of the
    model that this process holds; `forward`, `logits`, `log_probs` and `draw` are then collectives of its stage.
    Raises `ContractError` for numerics='contract' on a device or in a dtype that has no contract.
    """
    return EngineModel(
        config, dtype=dtype, device=torch.device(device), numerics=numerics, attention=attention, place=place
    )
