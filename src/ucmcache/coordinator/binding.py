"""Binding: every KV cache group of the running engine to its row of the spec table, once at start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import xxhash

from ucmcache.coordinator.spec import REFUSALS, SPEC_TABLE, Kind, RankRule, SpecRow, Tokens
from ucmcache.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class BoundRow:
    """One KV cache group of the running engine, bound to its row. Computed once at start, read-only after."""

    group: int
    spec: SpecRow
    block_tokens: int
    figures: Mapping[str, int]
    seed: bytes  # 16 bytes that name the group's content, whatever its index
    lookahead_blocks: int = 0  # a drafter's KV also depends on the token after: its last block needs a successor
    rank_rule: RankRule = RankRule.INTERSECTION
    tp_shards: int | None = None  # distinct pieces over the ranks of a stage, where the engine says so

    def ranks_alike(self, stage_ranks: int) -> int:
        """How many neighbouring ranks of a stage hold the same bytes."""
        shards = 1 if self.rank_rule is RankRule.UNION else self.tp_shards
        return stage_ranks // shards if shards and stage_ranks % shards == 0 else 1

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
    others: frozenset[str] = frozenset()  # further classes among its layers, where they differ
    tp_shards: int | None = None  # distinct pieces over tensor-parallel ranks, where the engine says so
    refusal: str = ""  # why a group cannot be kept whatever its class is


def bind(groups: Iterable[GroupFacts], table: Mapping[str, SpecRow] | None = None) -> tuple[BoundRow, ...]:
    """Bind every group to its row.

    Raises UnsupportedModelError, once for all groups that cannot be kept, with the reason or the row to add. Matching
    is by exact class name: a subclass may lay its bytes out or free its blocks differently, and must say so in a row of
    its own.
    """
    table = SPEC_TABLE if table is None else table
    groups = tuple(groups)
    wrong = [f"  group {facts.group} ({facts.spec_class}{_problem(facts, groups, table)}" for facts in groups]
    wrong = [line for line, facts in zip(wrong, groups, strict=True) if _problem(facts, groups, table)]
    if wrong:
        raise UnsupportedModelError(
            "ucmcache's spec table (ucmcache.coordinator.spec.SPEC_TABLE) cannot keep these KV cache groups:\n"
            + "\n".join(wrong)
        )
    return tuple(_bound(facts, table) for facts in groups)


def _problem(facts: GroupFacts, groups: Sequence[GroupFacts], table: Mapping[str, SpecRow]) -> str:
    """What is wrong with a group, to follow its class name; empty if nothing is."""
    reason = facts.refusal or REFUSALS.get(facts.spec_class, "")
    if reason:
        return f"): {reason}"
    for name in sorted(facts.others & REFUSALS.keys()):
        return f", with layers of {name}): {REFUSALS[name]}"
    row = table.get(facts.spec_class)
    if not facts.cacheable:
        return ""
    if row is None:
        return (
            f", {facts.block_tokens} tokens a block); add: "
            f'SpecRow("{facts.spec_class}", Kind.<CHAIN, SNAPSHOT or NONE>, "<why>", reach=<...>)'
        )
    unlike = [name for name in sorted(facts.others) if name not in table or not _kept_alike(table[name], row)]
    if unlike:
        return (
            f", with layers of {', '.join(unlike)}): a group is kept as one, and no row keeps these as that for "
            f"{facts.spec_class} does (kind, figures, reach); register one, or serve the model without ucmcache"
        )
    shown = {name: getattr(facts.spec, name, "nothing of that name") for name in row.figures}
    wrong = {name: value for name, value in shown.items() if not (value is None or isinstance(value, Integral))}
    if wrong:
        said = ", ".join(f"{name} (the spec has {value!r})" for name, value in wrong.items())
        return f"): its row reads {said}; accepted are integer attributes of the spec; correct the row's figures"
    if row.source is not None and row.source not in {other.spec_class for other in groups}:
        return f"): its row follows {row.source}, of which this model has no group; give it a row of its own"
    return _wrong_reach(facts, row)


def _kept_alike(one: SpecRow, other: SpecRow) -> bool:
    return (one.kind, one.figures, one.reach) == (other.kind, other.figures, other.reach)


def _wrong_reach(facts: GroupFacts, row: SpecRow) -> str:
    if row.reach is None:
        return ""
    # The ends of the first blocks, positions beyond any window, and then such as only sessions resume at.
    ends = np.array([*range(64), *(1 << power for power in range(6, 33))], dtype=np.int64) * facts.block_tokens
    for p in (ends, np.union1d(ends, ends + 1)):
        if wrong := _wrong_at(facts, row, row.reach, p):
            return wrong
    return ""


def _wrong_at(facts: GroupFacts, row: SpecRow, reach: Callable[[Tokens, Mapping[str, int]], Tokens], p: Tokens) -> str:
    try:
        first = reach(p, _figures(facts, row))
    except Exception as error:  # another package's code
        return (
            f"): its row's reach fails ({type(error).__name__}: {error}); correct reach, or the figures that it reads"
        )
    tokens = isinstance(first, np.ndarray) and first.shape == p.shape and first.dtype.kind == "i"
    if tokens and not ((first < 0).any() or (first > p).any() or (np.diff(first) < 0).any()):
        return ""
    at = int(np.argmax((first < 0) | (first > p) | (np.diff(first, append=first[-1]) < 0))) if tokens else 0
    given = first[at : at + 2].tolist() if tokens else f"a {type(first).__name__}{getattr(first, 'shape', '')}"
    return (
        f"): its row's reach gives {given} for positions {p[at : at + 2].tolist()}; accepted is an integer array with, "
        "for each position, a token from 0 to the position, never less for a later position; correct reach"
    )


def _figures(facts: GroupFacts, row: SpecRow) -> dict[str, int]:
    return {name: int(getattr(facts.spec, name) or 0) for name in row.figures}


def _bound(facts: GroupFacts, table: Mapping[str, SpecRow]) -> BoundRow:
    row = table.get(facts.spec_class)
    if row is None or not facts.cacheable:
        row = SpecRow(facts.spec_class, Kind.NONE, "The engine itself does not keep this group for later requests.")
    # A group may mix classes of one size; it is alike on all ranks only if all of them are.
    rules = {row.rank_rule, *(table[name].rank_rule for name in facts.others if name in table)}
    return BoundRow(
        facts.group,
        row,
        facts.block_tokens,
        _figures(facts, row),
        xxhash.xxh3_128_digest(f"{row.kind.value}\0{facts.block_tokens}\0{facts.content}".encode()),
        1 if facts.draft and row.kind is Kind.CHAIN else 0,
        RankRule.UNION if rules == {RankRule.UNION} and facts.tp_shards in (None, 1) else RankRule.INTERSECTION,
        facts.tp_shards,
    )
