"""X-Hybrid-96 (S1 8.1): a model of every kind of layer, as ten rows of a spec table and as an engine.

96 layers: 16 latent attention (MLA), 16 compressed attention (CSA, 16 tokens a state, fp8 with scales), 24 sliding
window, 20 Mamba2, 8 Kimi delta attention (KDA) with a state after every token, 8 cross attention, 4 sparse indexers
(DSA), which choose among the latents. Indexers share the latents' blocks, so they are layers of the same group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from tests.sim.engine import Group
from ucmcache.coordinator.binding import BoundRow, GroupFacts, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import AccessUnit, Kind, RankRule, SpecRow, Tokens
from ucmcache.keys import BlockKey, SnapshotKey
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

TENSOR_RANKS, STAGES, LAYERS = 8, 2, 96
HASH_TOKENS = 64


def _whole(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    return np.zeros_like(p)


def _window(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    return np.maximum(p - figures["window_tokens"] + 1, 0)


def _follower(name: str, source: str, why: str) -> SpecRow:
    return SpecRow(name, Kind.NONE, why, access_unit=AccessUnit.FOLLOWER, source=source)


TABLE: dict[str, SpecRow] = {
    row.spec_class: row
    for row in (
        SpecRow("XMla", Kind.CHAIN, "Latents of all tokens.", reach=_whole, rank_rule=RankRule.UNION),
        SpecRow("XCsa", Kind.CHAIN, "One state for 16 tokens.", reach=_whole, rank_rule=RankRule.UNION),
        SpecRow(
            "XSwa",
            Kind.CHAIN,
            "What the window touches.",
            ("window_tokens",),
            _window,
            access_unit=AccessUnit.WINDOW,
        ),
        SpecRow("XMamba2", Kind.SNAPSHOT, "One state for the whole prefix.", access_unit=AccessUnit.ROW),
        SpecRow("XKda", Kind.SNAPSHOT, "The same, and it could be kept after any token.", access_unit=AccessUnit.ROW),
        SpecRow("XCross", Kind.NONE, "Of the encoder's input, which each request brings along."),
        SpecRow("XOpenGroup", Kind.NONE, "Tokens that are still being compressed; none at a block's end."),
        _follower("XDsaIndexer", "XMla", "In the blocks of the latents that it chooses from."),
        _follower("XCsaScales", "XCsa", "Scales of the fp8 values, in the same pages."),
        _follower("XSwaScales", "XSwa", "Scales of the fp8 values, in the same pages."),
    )
}

# (class, tokens a block, layers of its own)
GROUPS: tuple[tuple[str, int, int], ...] = (
    ("XMla", 128, 16),
    ("XCsa", 128, 16),
    ("XSwa", 128, 24),
    ("XMamba2", 64, 20),
    ("XKda", 1, 8),
    ("XCross", 128, 8),
    ("XOpenGroup", 20, 0),
    ("XDsaIndexer", 128, 4),
    ("XCsaScales", 128, 0),
    ("XSwaScales", 128, 0),
)

# The same model as vLLM's scheduler can run it, in small: the same 96 layers in the same kinds.
ENGINE_GROUPS = (
    Group("latent", 16, layers=20),  # MLA and the indexers in its blocks
    Group("latent", 16, layers=16),  # CSA
    Group("window", 16, 40, layers=24),
    Group("state", 16, layers=20),
    Group("state", 16, layers=8),
    Group("ring", 16, layers=8),  # what is of one request only
)


def facts(window_tokens: int = 1 << 20) -> list[GroupFacts]:
    """What an engine would say of the ten groups."""
    spec = SimpleNamespace(window_tokens=window_tokens)
    return [
        GroupFacts(group, name, tokens, spec, content=f"{name} {layers}")
        for group, (name, tokens, layers) in enumerate(GROUPS)
    ]


class XHybrid:
    """The bound table over stores with room for `tokens`; what is kept is named by class and position."""

    def __init__(self, tokens: int = 1 << 14, window_tokens: int = 1 << 20, interval_tokens: int | None = 1024) -> None:
        self.rows: dict[str, BoundRow] = {row.spec.spec_class: row for row in bind(facts(window_tokens), TABLE)}
        seeds = {row.group: row.seed for row in self.rows.values()}
        chains = [ArenaPlan(1, tokens // 128, (self.rows[name].group,)) for name in ("XMla", "XCsa", "XSwa")]
        states = [ArenaPlan(1, 64, (self.rows[name].group,)) for name in ("XMamba2", "XKda")]
        self.blocks = BlockStore(chains, seeds, b"x-hybrid-96".ljust(16))
        self.states = SnapshotStore(states, seeds, b"x-hybrid-96".ljust(16))
        self.coordinator = Coordinator(tuple(self.rows.values()), self.blocks, self.states, interval_tokens)

    def keep_chain(self, name: str, prompt: Prompt, tokens: int) -> None:
        """Blocks of a chain up to a token: the whole ones."""
        row = self.rows[name]
        size = row.block_tokens
        for end in range(size, tokens + 1, size):
            key = BlockKey(row.group, prompt.prefix(end), end, prompt.prefix(end - size))
            if self.blocks.slot(key) is None:
                for slot in self.blocks.reserve([key]) or ():
                    self.blocks.commit(row.group, slot)

    def keep_states(self, name: str, prompt: Prompt, positions: Sequence[int]) -> None:
        """States of a recurrent kind at these positions."""
        row = self.rows[name]
        for position in positions:
            key = SnapshotKey(row.group, prompt.prefix(position), position)
            for slot in self.states.reserve([key]) or ():
                self.states.commit(row.group, slot)


def prompt_of(tokens: int, text: str = "a", unlike_from: int | None = None) -> Prompt:
    """A prompt with one hash per 64 tokens; from `unlike_from` on it goes another way than others of the same text."""
    cut = tokens if unlike_from is None else unlike_from
    hashes = [
        f"{text}{end}{'' if end <= cut else f'!{cut}'}".encode() for end in range(HASH_TOKENS, tokens + 1, HASH_TOKENS)
    ]
    return Prompt(tokens, hashes, HASH_TOKENS)
