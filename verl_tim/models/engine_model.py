"""The engine's model: strict weight loading, one forward for prefill and decode over a paged KV cache, head,
sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_tim.models.config import ModelConfig
from verl_tim.models.contract_layer import ContractLayer, Step
from verl_tim.models.stock_layer import StockLayer, rms_norm
from verl_tim.models.taps import tap
from verl_tim.models.weights import WeightError, WeightSlot, checkpoint_weights, load_into, weight_checksum
from verl_tim.numerics.attention import resolve_attention
from verl_tim.numerics.contract import ROW_FLOOR, ContractError, check_process, contract_id, exact_region, on_gpu
from verl_tim.numerics.head import head_logits, log_probs_of, mask_padding, token_log_probs
from verl_tim.numerics.linear import PreparedLinear, matmul_rows
from verl_tim.numerics.norm import add_rms_norm_inference
from verl_tim.numerics.paging import DecodeBatch, PagedBatch
from verl_tim.numerics.probe import ProbeReport, probe
from verl_tim.numerics.rope import RopeTable
from verl_tim.numerics.sampling import Sampled, SamplingTensors, draw, sample

Numerics = Literal["contract", "stock"]
_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class EngineModel:
    """A decoder-only language model for inference, built empty; see `build_model`.

    Attributes: config, dtype (operand dtype and that of the KV cache), device, numerics, attention (the attention
    contract in use; "stock" for stock numerics).
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, numerics: Numerics, attention: str
    ) -> None:
        self.config, self.dtype, self.device, self.numerics = config, dtype, device, numerics
        self.attention = "stock"
        if numerics == "contract":
            self.attention = resolve_attention(attention, device, config.head_dim)
            contract_id(device, dtype, self.attention)  # refuses what has no contract
        elif numerics != "stock":
            raise ContractError(f"numerics={numerics!r} is unknown; use 'contract' or 'stock'")
        self._rope = RopeTable(
            config.rope.inverse_frequencies, config.rope.scaling, config.max_position_embeddings, device
        )
        self._loaded = False
        self._slots: dict[str, WeightSlot] = {}

    @property
    def row_floor(self) -> int:
        """`forward` takes rows in multiples of this. The GPU schedules serve any number of rows with the same bits."""
        return ROW_FLOOR if self.numerics == "contract" and not on_gpu(self.device) else 1

    # -- weights ---------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        c, exact = self.config, self.numerics == "contract"
        layer_type = ContractLayer if exact else StockLayer
        self._layers = [layer_type(c, i, dtype=self.dtype, device=self.device) for i in range(c.num_layers)]
        self._norm = torch.zeros(c.hidden_size, dtype=self.dtype, device=self.device)
        self._slots = {_NORM: WeightSlot(self._norm, self.dtype)}
        for index, layer in enumerate(self._layers):
            self._slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer.slots.items()}
        # The head's float32 buffer is the only copy of a tied embedding: its rows hold model-dtype values exactly.
        if exact:
            head = PreparedLinear((c.vocab_size,), c.hidden_size, dtype=self.dtype, device=self.device)
            self._head, head_slot = head.weight_PK, WeightSlot(head.weight_view(0), self.dtype)
        else:
            self._head = torch.zeros(c.vocab_size, c.hidden_size, dtype=self.dtype, device=self.device)
            head_slot = WeightSlot(self._head, self.dtype)
        if c.tie_word_embeddings:
            self._embed = self._head
            self._slots[_EMBED] = head_slot
        else:
            self._embed = torch.zeros(c.vocab_size, c.hidden_size, dtype=self.dtype, device=self.device)
            self._slots[_EMBED] = WeightSlot(self._embed, self.dtype)
            self._slots[_HEAD] = head_slot

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
        tensors = {t.data_ptr(): t.nbytes for layer in self._layers for t in layer.buffers}
        tensors |= {t.data_ptr(): t.nbytes for t in (self._norm, self._head, self._embed)}
        return sum(tensors.values())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, copy in the model dtype) of every weight; a tied head is not repeated."""
        self._require_weights()
        for name, slot in self._slots.items():
            yield name, slot.read()

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Shape of every weight that a load must bring, by HF name."""
        if not self._slots:
            self._allocate()
        return {name: slot.shape for name, slot in self._slots.items()}

    def weight_checksum(self) -> str:
        """See `verl_tim.models.weights.weight_checksum`."""
        return weight_checksum(self.named_weights(), self.dtype)

    def probe(self) -> ProbeReport:
        """Check the contract at this model's shapes on this device (`verl_tim.numerics.probe`); for start-up."""
        return probe(self.device, self.dtype, self.config.probe_shapes, attention=self.attention)

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
    ) -> Tensor:
        """Run this step's rows, write their keys and values, and return their hidden states.

        Args:
            token_ids_T: int64 [T]; for the contract T is a multiple of `row_floor` (the runner pads).
            paged: the step's layout; slot_T and position_T have T entries.
            k_pages_LPSHD, v_pages_LPSHD: [layers, pages, page_size, kv heads, head_dim] in the model dtype; page 0 is
                the null page.
            chosen: gets the chosen experts [T, K] of each sparse layer appended, in layer order.

        Returns:
            [T, hidden] in the model dtype, final norm applied.
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
            x = F.embedding(token_ids_T, self._embed).to(self.dtype)
            tap("model.embed_tokens", x)
            residual: Tensor | None = None
            for index, layer in enumerate(self._layers):
                x, residual = layer(x, residual, step, k_pages_LPSHD[index], v_pages_LPSHD[index])
            assert residual is not None, "a model has layers"
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
) -> EngineModel:
    """An `EngineModel` without weights; they are allocated by the first load.

    `attention`: the attention contract, see `verl_tim.numerics.attention.resolve_attention`.
    Raises `ContractError` for numerics='contract' on a device or in a dtype that has no contract.
    """
    return EngineModel(config, dtype=dtype, device=torch.device(device), numerics=numerics, attention=attention)
