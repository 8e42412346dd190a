"""The frozen backbone: any Hugging Face causal LM, driven from outside.

The only place that knows how to get a causal LM's hidden states, final norm, embedding and output projection, and how
to hand it a tree. The model itself is never changed: token ids, position ids, an additive 4-D mask (a dict of masks
where layers differ) and a cache go in; hidden states come out, and the projection is applied to the rows that are
needed.

Hidden states are numbered as in transformers: 0 is the embedding output, k the output of layer k - 1, before the final
norm. `Features.last` is after the final norm.

Letters: B rows, T positions, H hidden width, V vocabulary, N layers.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from . import chat
from .anatomy import (
    find_decoder,
    find_layers,
    find_norm,
    find_reaches,
    find_turn,
    refuse_both_ways,
    refuse_slots,
    run_by_texts,
)
from .attention import attending, substitute
from .cache import Cache, cache_argument
from .forms import adapters, fingerprint, matrix_of, named_weights, place_of, rows_of, unwrapped
from .mask import EVERYTHING, attention_mask, behind, causal, positions, widened
from .packed import Packing
from .tapping import Tapping

_FINISH: dict[str, Callable[[Tensor, float], Tensor]] = {  # in this order
    "logit_scale": lambda logits, scale: logits * scale,
    "logits_scaling": lambda logits, divisor: logits / divisor,
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
}
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor


@dataclass
class Features:
    """What one forward of the backbone leaves behind."""

    last: Tensor
    """(B, T, H) after the final norm: what the output projection reads."""
    taps: Tensor | None
    """(B, T, len(taps) * H) the hidden states asked for, low to high, before any norm; None if none were."""

    def __getitem__(self, index: Any) -> Features:
        """Rows and positions, as on the tensors themselves."""
        return Features(self.last[index], None if self.taps is None else self.taps[index])

    def to(self, device: torch.device) -> Features:
        return Features(self.last.to(device), None if self.taps is None else self.taps.to(device))


class Backbone:
    """A causal LM and its tokenizer.

    Args:
        model: a transformers causal LM; put into eval mode, otherwise left as it is.
        tokenizer: needed for texts and chats; token ids work without.
        name: how files and reports call it; by default the folder or Hub id it was loaded from.

    Raises:
        UserError: a part cannot be found, a layer type cannot be rolled back, positions are no input, or the logits
            are not what norm and projection give.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self.model = model.eval()
        self.inner = unwrapped(model)
        """The causal LM itself, where `model` is peft's wrapper around it."""
        self.tokenizer = tokenizer
        self.untold = ""
        """Why there is no tokenizer, if one was looked for."""
        self.config = self.inner.config.get_text_config(decoder=True)
        self.name = name or str(getattr(self.inner.config, "_name_or_path", "") or type(self.inner).__name__)
        self.revision = ""
        """Its commit, where it came from the Hub."""
        if changed := adapters(self.inner):
            self.name += f" + adapter {', '.join(changed)}"
        self.hash: str | None = None
        """Its fingerprint, once that cannot be taken any more because the layers are spread over processes."""
        self.stored: torch.dtype | None = None
        """The dtype of its files, if it was loaded as they are."""
        self.adapter = ""
        """Hash of the one that was taken into the weights, if any: see adapter.py."""
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self._decoder: nn.Module = find_decoder(self.inner)
        self._reaches = find_reaches(self.config, self._decoder, self.name)
        refuse_slots(self.config, self._decoder, self.name)
        refuse_both_ways(self.config, self.name)
        self._turn, self._recomputes = find_turn(self.config)
        self._layers = find_layers(self._decoder, self.num_layers)
        self._norm = find_norm(self._decoder)
        self._projection: nn.Module = self.inner.get_output_embeddings()
        self._embedding: nn.Module = self.inner.get_input_embeddings()
        self.substitute = substitute(self.inner, self._decoder, self.name)
        if self.substitute is not None:
            note = f"{self.config._attn_implementation} takes no mask of a tree: what is drafted is verified with "
            warnings.warn(f"{self.name}: {note}{self.substitute}, whole texts keep it", stacklevel=2)
        self.cache_argument = cache_argument(self._decoder)
        self._tappings: dict[tuple[int, ...], Tapping] = {}
        self.packs, self.packing = True, Packing()
        """Whether decoding on a CPU may keep a second copy of its weights, laid out for the kernels (packed.py)."""
        self._left_out: set[str] | None = None
        """Fields of the config that should change the projection and do not, once that was looked up."""

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where token ids go in and features come out; layers may lie elsewhere."""
        return place_of(self._embedding)

    @property
    def dtype(self) -> torch.dtype:
        dtype = next(iter(self._embedding.parameters())).dtype
        return dtype if dtype.is_floating_point else self.inner.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection, V (a padded vocabulary counts with its padding)."""
        return rows_of(self._projection)

    @property
    def unmasked(self) -> bool:
        """Whether the beginning of a text goes into a cache without any mask: a kernel that knows what is causal."""
        return self.config._attn_implementation == "sdpa" and all(
            reach == EVERYTHING for reach in self._reaches.values()
        )

    @property
    def max_positions(self) -> int:
        """The longest text the model was made for, in tokens (a large number if the config does not say)."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    @property
    def batches(self) -> bool:
        """Whether rows of a batch may have any lengths; not where rotary factors change at a position (longrope)."""
        return self._turn is None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end-of-sequence ids of the generation config, else of the tokenizer."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        if ids is None:
            ids = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @property
    def no_tokenizer(self) -> str:
        """Why there is none, or what gives one, for a message."""
        return self.untold or "Backbone(model, tokenizer)"

    @property
    def output_weight(self) -> Tensor:
        """(V, H) weight of the output projection; the embedding's own where they are tied. A copy where it is
        quantised, offloaded or on another device than the features."""
        return matrix_of(self._projection).to(self.device)

    @property
    def output_bias(self) -> Tensor | None:
        """(V,) bias of the output projection; None where it has none."""
        bias: Tensor | None = getattr(self._projection, "bias", None)
        return None if bias is None else bias.to(self.device)

    @property
    def decoder(self) -> nn.Module:
        """The model without its output projection."""
        return self._decoder

    @property
    def layers(self) -> nn.ModuleList:
        """Its decoder layers."""
        return self._layers

    @property
    def borrowed(self) -> tuple[nn.Module, ...]:
        """What heads read outside a forward, and so has to be whole in every process: embedding, norm, projection."""
        return self._embedding, self._norm, self._projection

    def fingerprint(self, through: torch.dtype = torch.bfloat16) -> str:
        """16 hex digits of the weights: a sample of each parameter, as bf16, whatever dtype they were loaded in.

        fp16 alone leaves its mark, since it rounds otherwise; with `through` it is as if they were loaded in that.
        """
        return self.hash or fingerprint(named_weights(self.inner), through)

    @property
    def rounded(self) -> bool:
        """Whether they may be stored in numbers that these weights do not tell any more: fp16 on request."""
        return self.dtype == torch.float16 != self.stored

    # -- running it ----------------------------------------------------------------------------------------------

    def forward(
        self,
        ids: Tensor,
        *,
        cache: Cache | None = None,
        ancestors: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Features:
        """One forward over (B, T) token ids.

        With a cache, the tokens are written behind each row's committed ones and stay pending: say with `cache.commit`
        which of them are to be kept. Without one, rows are whole texts, padded on the right if at all (padding is seen
        by no true token).

        Args:
            ids: (B, T) token ids.
            ancestors: (T, T) or (B, T, T) bool: the tokens are nodes of a tree, each seeing its ancestors and itself.
                With more columns than tokens, (T, P): the pending tokens of earlier forwards stay, and come first.
                None: a text, each token seeing those before it.
            taps: numbers of the hidden states to keep.

        Returns:
            Features over the T positions.
        """
        if cache is not None and self._turn is not None:
            begun = self._past_turn(ids, ancestors, cache)
            if begun:
                whole, tree = behind(begun, ids, ancestors)
                cache.restart()
                cache.remember(ids)
                features = self._forward(whole, cache, tree, taps)
                cache.settle(len(begun))
                return features[:, len(begun) :]
            if ancestors is None or ancestors.shape[-1] == ids.shape[1]:
                cache.forget()
            cache.remember(ids)
        return self._forward(ids, cache, ancestors, taps)

    def _forward(self, ids: Tensor, cache: Cache | None, ancestors: Tensor | None, taps: Sequence[int]) -> Features:
        rows, width = ids.shape
        masks, places = None, torch.arange(width, device=ids.device).repeat(rows, 1)
        columns = width if ancestors is None else ancestors.shape[-1]
        # whole texts are left to the model: its own causal mask is none at all where a fused kernel knows the form
        begins = cache is not None and self.unmasked and cache.end == 0
        if ancestors is not None or (cache is not None and not begins):
            lengths = [0] * rows if cache is None else cache.lengths
            tree = causal(width, ids.device) if ancestors is None else ancestors
            masks, places = self.masks(lengths, tree), positions(lengths, tree)
        arguments: dict[str, Any] = {"attention_mask": masks, "use_cache": cache is not None}
        if cache is not None:
            if columns == width:
                cache.forget()
            assert cache.pending + width == columns, f"{cache.pending} pending tokens, {columns} columns"
            cache.open(width)
            arguments[self.cache_argument] = cache
        other = None if masks is None else self.substitute
        with self.tapping(taps) as tapping, attending(self.config, other), self.packing.quick():
            output = self._decoder(input_ids=ids, position_ids=places, **arguments)
        return Features(output.last_hidden_state.to(ids.device), tapping.taken(ids.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) hidden states after the final norm to (..., V) logits, with the model's own scales and soft cap."""
        if self._left_out is None:
            self._compare_logits()
        return self.finish(self._projected(hidden)).to(hidden.device)

    def finish(self, logits: Tensor) -> Tensor:
        """What the model does to its projection: scales and soft cap (elementwise, so a slice may be given)."""
        said = [name for name in _FINISH if getattr(self.config, name, None) is not None]
        if said and self._left_out is None:
            self._compare_logits()
        for name in said:
            if name not in (self._left_out or ()):
                logits = _FINISH[name](logits, getattr(self.config, name))
        return logits

    def embed(self, ids: Tensor) -> Tensor:
        """(...) token ids to (..., H) input embeddings, the model's own scale included."""
        embedded = self._embedding(ids)
        assert isinstance(embedded, Tensor)
        return embedded.to(ids.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm on (..., H)."""
        normed = self._norm(hidden)
        assert isinstance(normed, Tensor)
        return normed.to(hidden.device)

    def pack(self) -> None:
        """Lay out the weights, if that may be: forwards without gradients are quicker. Again: follow their changes."""
        wanted = self.packs and self.device.type == "cpu"
        self.packing.follow(itertools.chain(self._decoder.modules(), [self._projection]) if wanted else [])

    def new_cache(self, rows: int = 1, capacity: int = 256) -> Cache:
        """An empty cache for this model."""
        return Cache(rows, capacity)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a str is one user turn, a list of messages a chat, both through the chat template.

        Raises:
            UserError: there is no tokenizer or template for it, or an id lies outside the vocabulary.
        """
        if isinstance(prompt, Tensor):
            prompt = prompt.flatten().tolist()
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return self._checked_ids(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.tokenizer is None:
            raise UserError(f"texts and chats need a tokenizer: {self.no_tokenizer}")
        return chat.encode(self.tokenizer, messages, add_generation_prompt=True)  # type: ignore[arg-type]

    def together(self, length: int) -> int:
        """How many drafts deep a tree below the last of `length` tokens may go.

        Where rotary factors change at some position (longrope), one forward stands wholly before it or behind it: the
        model takes the factors of its last position for all.
        """
        return 1 << 30 if self._turn is None or length > self._turn else self._turn - length

    def _past_turn(self, ids: Tensor, ancestors: Tensor | None, cache: Cache) -> list[int]:
        """The text so far, if it has to be computed anew with the other factors, as `generate` of these models does."""
        assert self._turn is not None
        tree = causal(ids.shape[1], ids.device) if ancestors is None else ancestors
        short = [length for length in cache.lengths if 0 < length <= self._turn]
        if not self._recomputes or not short or int(positions(cache.lengths, tree).max()) < self._turn:
            return []
        if cache.rows > 1:
            raise UserError(
                f"{self.name}: changes its rotary factors at position {self._turn}, so texts that come to it are "
                "decoded one at a time, not as rows of one batch"
            )
        assert cache.texts is not None
        return cache.texts[0]

    # -- calling it ----------------------------------------------------------------------------------------------

    def masks(self, lengths: Sequence[int], ancestors: Tensor, slots: int = 0) -> Tensor | dict[str, Tensor]:
        """Who sees whom, as the decoder takes it; over at least so many slots, of which nobody sees the last ones."""
        masks = {
            kind: widened(attention_mask(lengths, ancestors, self.dtype, reach=reach), slots)
            for kind, reach in self._reaches.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def tapping(self, taps: Sequence[int]) -> Tapping:
        """What keeps these hidden states of a forward; the same one each time."""
        stream = getattr(self.config, "altup_active_idx", 0)
        states = [run_by_texts(self.config, k) for k in taps]
        return self._tappings.setdefault(tuple(taps), Tapping(self._layers, states, stream))

    def _projected(self, hidden: Tensor) -> Tensor:
        weight = getattr(self._projection, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            hidden = hidden.to(weight.dtype)
        with self.packing.quick():
            projected = self._projection(hidden)
        assert isinstance(projected, Tensor)
        return projected

    @torch.no_grad()
    def _compare_logits(self) -> None:
        """Once: the projection of the last hidden state, and what the config says of it, has to be what the model calls
        logits. Not every model does all that its config says (AyaVision leaves out the scale of its text model).
        """
        said = [name for name in _FINISH if getattr(self.config, name, None) is not None]
        ids = torch.arange(1, 4, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        projected, gaps = self._projected(self.forward(ids).last[0]), list[float]()
        for out in (set(one) for count in range(len(said) + 1) for one in itertools.combinations(said, count)):
            self._left_out = out
            gaps.append((self.finish(projected).float().to(expected.device) - expected).abs().max().item())
            if gaps[-1] <= 0.05 * expected.abs().max().item() + 1e-3 or math.isnan(gaps[-1]):
                return  # where they are no numbers, guards name the row
        self._left_out = None
        raise UserError(
            f"{self.name}: its logits are not the output projection of its last hidden state (largest difference "
            f"{gaps[0]:.3g}); {type(self.model).__name__} does something between them that is not known here"
        )

    def _checked_ids(self, ids: Sequence[Any]) -> list[int]:
        for place, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"token id {token} at position {place} lies outside the vocabulary of {self.vocab_size}"
                )
        if not ids:
            raise UserError("the prompt is empty: at least one token is needed")
        return list(ids)
