"""The spec table: one row per kind of KV cache group. The one file that a model integrator reads.

A model is never named here. A row says how the groups of one vLLM `KVCacheSpec` class are kept and what a resume at
token p needs of them:

* `CHAIN`: blocks, each standing for the prefix that it ends; a resume needs the blocks from `reach(p)` to p.
* `SNAPSHOT`: a recurrent state; a resume at p needs the state after exactly p tokens.
* `NONE`: nothing that a later request could use; the group is left alone and has no vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucmcache.errors import UnsupportedModelError

Tokens = NDArray[np.int64]


class Kind(Enum):
    """How a group's content is kept."""

    CHAIN = "chain"
    SNAPSHOT = "snapshot"
    NONE = "none"


class RankRule(Enum):
    """What the ranks of one pipeline stage hold of a unit."""

    INTERSECTION = "intersection"  # each rank its own piece: all are needed
    UNION = "union"  # each rank the same bytes: they are kept once, and any rank's copy serves


@dataclass(frozen=True, slots=True)
class SpecRow:
    """How the groups of one spec class are treated.

    `reach` maps resume positions p (int64 array, tokens) and the spec's figures to the first token whose block is
    needed. `figures` names the spec's attributes that `reach` reads.
    """

    spec_class: str
    kind: Kind
    why: str
    figures: tuple[str, ...] = ()
    reach: Callable[[Tokens, Mapping[str, int]], Tokens] | None = None
    rank_rule: RankRule = RankRule.INTERSECTION


def _all_of_it(p: Tokens, _: Mapping[str, int]) -> Tokens:
    return np.zeros_like(p)


def _window(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    # vLLM frees what the next token cannot see: SlidingWindowManager.get_num_skipped_tokens.
    return np.maximum(p - figures["sliding_window"] + 1 - figures["extra_retained_tokens"], 0)


def _chunk(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    # ChunkedLocalAttentionManager.get_num_skipped_tokens: attention starts anew at each chunk.
    size = figures["attention_chunk_size"]
    return p // size * size


SPEC_TABLE: dict[str, SpecRow] = {
    row.spec_class: row
    for row in (
        SpecRow("FullAttentionSpec", Kind.CHAIN, "Every token attends to every earlier one.", reach=_all_of_it),
        SpecRow(
            "MLAAttentionSpec",
            Kind.CHAIN,
            "Full attention over one latent vector per token, which every rank of a stage has whole.",
            reach=_all_of_it,
            rank_rule=RankRule.UNION,
        ),
        SpecRow(
            "SlidingWindowSpec",
            Kind.CHAIN,
            "A token attends to the window before it, so a resume needs only the blocks that the window touches.",
            ("sliding_window", "extra_retained_tokens"),
            _window,
        ),
        SpecRow(
            "ChunkedLocalAttentionSpec",
            Kind.CHAIN,
            "A token attends inside its own chunk, so a resume needs only that chunk's blocks.",
            ("attention_chunk_size",),
            _chunk,
        ),
        SpecRow(
            "MambaSpec",
            Kind.SNAPSHOT,
            "Mamba, GDN, KDA and short convolutions fold the whole prefix into one state.",
        ),
        SpecRow(
            "CircularBufferSpec",
            Kind.NONE,
            "Scratch for the token group that is still being compressed; empty on every block boundary.",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class BoundRow:
    """One KV cache group of the running engine, bound to its row. Computed once at start, read-only after."""

    group: int
    spec: SpecRow
    block_tokens: int
    figures: Mapping[str, int]
    seed: bytes  # 16 bytes that name the group's content, whatever its index
    lookahead_blocks: int = 0  # a drafter's KV also depends on the token after: its last block needs a successor

    @property
    def kind(self) -> Kind:
        return self.spec.kind

    @property
    def name(self) -> str:
        """How the row is named in `Hit.limited_by`, logs and errors."""
        return f"{self.group}:{self.spec.spec_class}"

    @property
    def is_whole(self) -> bool:
        """Whether a resume needs the group's blocks from the first token on, wherever it is."""
        far = np.array([self.block_tokens, self.block_tokens << 40])
        return not self.first_needed(far).any()

    def first_needed(self, p: Tokens) -> Tokens:
        """First token, for each resume position, whose block is needed."""
        return self.spec.reach(p, self.figures) if self.spec.reach is not None else p


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the engine says of one KV cache group, without its types."""

    group: int
    spec_class: str
    block_tokens: int
    spec: object  # the engine's own spec; only the attributes that a row names are read
    content: str  # canonical text of all that shapes the group's bytes, layer names included
    cacheable: bool = True
    draft: bool = False


def bind(groups: Iterable[GroupFacts], table: Mapping[str, SpecRow] | None = None) -> tuple[BoundRow, ...]:
    """Bind every group to its row.

    Raises UnsupportedModelError, once for all unknown groups, with the rows to add. Matching is by exact class name: a
    subclass may lay its bytes out or free its blocks differently, and must say so in a row of its own.
    """
    table = SPEC_TABLE if table is None else table
    rows: list[BoundRow] = []
    unknown: list[str] = []
    for facts in groups:
        row = table.get(facts.spec_class)
        if row is None and facts.cacheable:
            unknown.append(
                f"  group {facts.group} ({facts.spec_class}, {facts.block_tokens} tokens a block); add: "
                f'SpecRow("{facts.spec_class}", Kind.<CHAIN, SNAPSHOT or NONE>, "<why>", reach=<...>)'
            )
            continue
        if row is None or not facts.cacheable:
            row = SpecRow(facts.spec_class, Kind.NONE, "The engine itself does not keep this group for later requests.")
        rows.append(
            BoundRow(
                facts.group,
                row,
                facts.block_tokens,
                {name: int(getattr(facts.spec, name, None) or 0) for name in row.figures},
                xxhash.xxh3_128_digest(f"{row.kind.value}\0{facts.block_tokens}\0{facts.content}".encode()),
                1 if facts.draft and row.kind is Kind.CHAIN else 0,
            )
        )
    if unknown:
        raise UnsupportedModelError(
            "no row of ucmcache's spec table (ucmcache.coordinator.spec.SPEC_TABLE) covers these KV cache groups:\n"
            + "\n".join(unknown)
        )
    return tuple(rows)
