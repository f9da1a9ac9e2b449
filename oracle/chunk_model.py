"""Authority on where a chunkwise kernel rounds: what of a PrecisionSpec its model takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from oracle.chunk_steps import BLOCK


@dataclass(frozen=True)
class ChunkModel:
    """Where a chunkwise kernel rounds.

    `operand`: the large products; `intra`: k.k and q.k; `pairs`: their gradients' products, as `intra` unless named;
    `merge`: block merges of the inverse; `stored_inverse`: R in memory; `state`: the carried state; `kept`: states and
    their gradients in memory, from where the gradients of the gates between chunks come, and `kept_product` the
    products of the two; `scaled_key`: beta k, where it is formed for the gradients of earlier keys in factored rows;
    `diagonal`: 'pair' (each exponent a difference of cumulative gates), 'halving' (each the sum over its own range,
    which a reset elsewhere cannot spoil) or 'anchor' (two factors around the block's first row); `apart`: i = j outside
    the anchored tile, and factors that are exact where decays are; `inverse`: 'substitution' or 'neumann' (a
    half-precision series). `form`: 'wy', with v_new = u - w S as above, or 'residual', which inverts I + A_kk b and
    applies it to x = v - (k 2^G) S, [v_new / b | intra-chunk o] = [R | A_qk b R] x: b is among the keys instead.
    'solved' is that with y = R x stored, and A_qk b y. 'stored' keeps every step in `operand`: `oracle.stored_steps`.
    `segment`: tokens of pieces whose states come from a chain, see NOTE [Pieces].
    """

    chunk: int = 64
    operand: str = "bf16"
    intra: str = "tf32"
    pairs: str | None = None
    merge: str = "tf32"
    stored_inverse: str = "bf16"
    state: str = "fp32"
    kept: str = "fp32"
    kept_product: str = "fp64"
    scaled_key: str = "fp64"
    diagonal: str = "pair"
    apart: bool = False
    inverse: str = "substitution"
    form: str = "wy"
    segment: int | None = None

    @classmethod
    def of(
        cls,
        formats: Mapping[str, str],
        chunk: int | None,
        diagonal: str | None,
        inverse: str | None,
        form: str | None = None,
        segment: int | None = None,
    ) -> "ChunkModel":
        """The model of a PrecisionSpec, its formats resolved; diagonal 'anchor_apart' is 'anchor' with `apart`.

        ValueError for a chunk that is no multiple of 16, or an algorithm that has no model here.
        """
        chunk = 64 if chunk is None else chunk
        if chunk < BLOCK or chunk % BLOCK:
            raise ValueError(f"chunk is {chunk}, must be a positive multiple of {BLOCK}")
        if diagonal not in (None, "pair", "halving", "anchor", "anchor_apart"):
            raise ValueError(f"diagonal is {diagonal!r}, must be 'pair', 'halving', 'anchor' or 'anchor_apart'")
        if inverse not in (None, "substitution", "neumann"):
            raise ValueError(f"inverse is {inverse!r}, must be 'substitution' or 'neumann'")
        if form not in (None, "wy", "residual", "solved", "stored"):
            raise ValueError(f"form is {form!r}, must be 'wy', 'residual', 'solved' or 'stored'")
        if form == "stored" and chunk != BLOCK:
            raise ValueError(f"chunk is {chunk}, must be {BLOCK} with the form 'stored'")
        if segment is not None and (segment < chunk or segment % chunk):
            raise ValueError(f"segment is {segment}, must be a positive multiple of the chunk of {chunk}")
        stages = ("operand", "intra", "pairs", "merge", "stored_inverse", "state", "kept", "kept_product", "scaled_key")
        named = {name: formats[name] for name in stages if name in formats}
        return cls(
            chunk=chunk,
            diagonal="anchor" if diagonal == "anchor_apart" else diagonal or "pair",
            apart=diagonal == "anchor_apart",
            inverse=inverse or "substitution",
            form=form or "wy",
            segment=segment,
            **named,
        )
