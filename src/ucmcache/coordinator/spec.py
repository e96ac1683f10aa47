"""The spec table: one row per kind of KV cache group. The one file that a model integrator reads.

A model is never named here. A row says how the groups of one vLLM `KVCacheSpec` class are kept and what a resume at
token p needs of them:

* `CHAIN`: blocks, each standing for the prefix that it ends; a resume needs the blocks from `reach(p)` to p.
* `SNAPSHOT`: a recurrent state; a resume at p needs the state after exactly p tokens.
* `NONE`: nothing that a later request could use; the group is left alone and has no vote.

Layers that read another layer's blocks (kv-sharing aliases) have neither a spec nor a group, so they need no row. Rows
from other packages come by `register`; docs/integrators.md walks through one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points

import numpy as np
from numpy.typing import NDArray

from ucmcache.errors import ConfigError

Tokens = NDArray[np.int64]
Reach = Callable[[Tokens, Mapping[str, int]], Tokens]

ENTRY_POINTS = "ucmcache.spec_rows"


class Kind(Enum):
    """How a group's content is kept."""

    CHAIN = "chain"
    SNAPSHOT = "snapshot"
    NONE = "none"


class RankRule(Enum):
    """What the ranks of one pipeline stage hold of a unit."""

    INTERSECTION = "intersection"  # each rank its own piece: all are needed
    UNION = "union"  # each rank the same bytes: they are kept once, and any rank's copy serves


class AccessUnit(Enum):
    """What of a group is moved as one (S1 7.3). All layers of a group at one block make one record."""

    LAYER = "layer"  # a block of each layer
    ROW = "row"  # all that the layers hold of one position
    WINDOW = "window"  # a block of each layer, of the blocks that a window touches
    FOLLOWER = "follower"  # no bytes of its own: they are another's


class Retention(Enum):
    """What of a group is kept."""

    EVERY_BLOCK = "every full block"
    BY_TRIGGER = "where a trigger asks for it"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class SpecRow:
    """How the groups of one spec class are treated.

    `reach` maps resume positions p (int64 array, tokens) and the spec's figures to the first token whose block is
    needed. `figures` names the spec's integer attributes that `reach` reads. `source` names the spec class whose bytes
    a follower shares. Raises ConfigError for a row that contradicts itself.
    """

    spec_class: str
    kind: Kind
    why: str
    figures: tuple[str, ...] = ()
    reach: Reach | None = None
    rank_rule: RankRule = RankRule.INTERSECTION
    access_unit: AccessUnit = AccessUnit.LAYER
    source: str | None = None

    def __post_init__(self) -> None:
        follows = self.access_unit is AccessUnit.FOLLOWER
        wrong = {
            "kind must be a Kind, such as Kind.CHAIN": not isinstance(self.kind, Kind),
            "rank_rule must be a RankRule, such as RankRule.UNION": not isinstance(self.rank_rule, RankRule),
            "access_unit must be an AccessUnit, such as AccessUnit.ROW": not isinstance(self.access_unit, AccessUnit),
            'figures must be a tuple of names, such as ("sliding_window",)': not isinstance(self.figures, tuple),
            "reach must be a function": self.reach is not None and not callable(self.reach),
            "spec_class must be the name of a class": not self.spec_class.isidentifier(),
            "why must say in a sentence what the row rests on": not self.why.strip(),
            "a CHAIN row needs reach": self.kind is Kind.CHAIN and self.reach is None,
            "only a CHAIN row has reach": self.kind is not Kind.CHAIN and self.reach is not None,
            "figures are what reach reads, and there is no reach": bool(self.figures) and self.reach is None,
            "a WINDOW unit needs the figures of its window": self.access_unit is AccessUnit.WINDOW and not self.figures,
            "a SNAPSHOT row moves a ROW or a LAYER": self.kind is Kind.SNAPSHOT
            and self.access_unit not in (AccessUnit.ROW, AccessUnit.LAYER),
            "a FOLLOWER names its source": follows and not self.source,
            "only a FOLLOWER has a source": bool(self.source) and not follows,
            "a FOLLOWER keeps nothing of its own, so its kind is NONE": follows and self.kind is not Kind.NONE,
            "a FOLLOWER cannot be its own source": follows and self.source == self.spec_class,
        }
        for rule, broken in wrong.items():
            if broken:
                raise ConfigError(f"the row for {self.spec_class!r} contradicts itself: {rule} — correct the row")

    @property
    def votes(self) -> bool:
        """Whether a resume position needs the group's consent."""
        return self.kind is not Kind.NONE

    @property
    def retention(self) -> Retention:
        """What of the group is kept."""
        return {
            Kind.CHAIN: Retention.EVERY_BLOCK,
            Kind.SNAPSHOT: Retention.BY_TRIGGER,
            Kind.NONE: Retention.NOTHING,
        }[self.kind]


def _all_of_it(p: Tokens, _: Mapping[str, int]) -> Tokens:
    return np.zeros_like(p)


def _window(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    # vLLM frees what the next token cannot see: SlidingWindowManager.get_num_skipped_tokens.
    return np.maximum(p - figures["sliding_window"] + 1 - figures["extra_retained_tokens"], 0)


def _chunk(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    # ChunkedLocalAttentionManager.get_num_skipped_tokens: attention starts anew at each chunk.
    size = figures["attention_chunk_size"]
    return p // size * size


_WINDOW_FIGURES = ("sliding_window", "extra_retained_tokens")

SPEC_TABLE: dict[str, SpecRow] = {
    row.spec_class: row
    for row in (
        SpecRow("FullAttentionSpec", Kind.CHAIN, "Every token attends to every earlier one.", reach=_all_of_it),
        SpecRow(
            "MLAAttentionSpec",
            Kind.CHAIN,
            "Full attention over one latent vector per token, or per group of tokens where it is compressed; a full "
            "block holds whole groups. Sparse models' indexers are such layers, too. Every rank of a stage has all of "
            "it.",
            reach=_all_of_it,
            rank_rule=RankRule.UNION,
        ),
        SpecRow(
            "SlidingWindowSpec",
            Kind.CHAIN,
            "A token attends to the window before it, so a resume needs only the blocks that the window touches.",
            _WINDOW_FIGURES,
            _window,
            access_unit=AccessUnit.WINDOW,
        ),
        SpecRow(
            "SlidingWindowMLASpec",
            Kind.CHAIN,
            "A window over latent vectors, or over what a compressor still reads; every rank of a stage has all of it. "
            "Where the engine replays the window itself, it says that the group is not to be kept.",
            _WINDOW_FIGURES,
            _window,
            RankRule.UNION,
            AccessUnit.WINDOW,
        ),
        SpecRow(
            "ChunkedLocalAttentionSpec",
            Kind.CHAIN,
            "A token attends inside its own chunk, so a resume needs only that chunk's blocks.",
            ("attention_chunk_size",),
            _chunk,
            access_unit=AccessUnit.WINDOW,
        ),
        SpecRow(
            "MambaSpec",
            Kind.SNAPSHOT,
            "Mamba, GDN, KDA and short convolutions fold the whole prefix into one state.",
            access_unit=AccessUnit.ROW,
        ),
        SpecRow(
            "CircularBufferSpec",
            Kind.NONE,
            "Scratch for the token group that is still being compressed; empty on every block boundary.",
        ),
    )
}

HOST_POOL = (
    "the engine keeps its blocks in a host pool of its own (HiSparse), with block numbers of its own; turn HiSparse "
    "off, or ucmcache"
)

# Classes that no row can keep right: why, and what to do.
REFUSALS: dict[str, str] = {
    "CrossAttentionSpec": "what a decoder computes depends on the encoder's input, which the engine's hashes of its "
    "tokens do not tell; serve encoder-decoder models without ucmcache",
    "EncoderOnlyAttentionSpec": "its layers attend to later tokens, so a prefix does not determine what follows it; "
    "serve such models without ucmcache",
    "SinkFullAttentionSpec": "its sink tokens lie in the pool's first blocks, which vLLM 0.32 also gives to requests, "
    "so what is computed for a prefix does not depend on the prefix alone; serve such models without ucmcache",
    "RSWASpec": "what a token attends to depends on where the prompt of its request ended, which the engine's hashes "
    "do not tell; serve such models without ucmcache",
    "HiddenStateCacheSpec": "another connector reads these layers for every token of a request, and tokens that were "
    "resumed past would have none; extract hidden states without ucmcache",
    "HiSparseHotSpec": HOST_POOL,
    "HiSparseResidentSpec": HOST_POOL,
}


def register(row: SpecRow) -> None:
    """Add a row to the table, before an engine starts; the same row again changes nothing.

    Raises ConfigError for a second row of one class, for a class that is refused, and for a follower whose source has
    no row or keeps nothing.
    """
    known = SPEC_TABLE.get(row.spec_class)
    if known == row:
        return
    if known is not None:
        raise ConfigError(
            f"there is a row for {row.spec_class} already ({known.kind.name}: {known.why}); one row per class is "
            "accepted — remove one, or give your spec a class of its own"
        )
    if row.spec_class in REFUSALS:
        raise ConfigError(
            f"a row for {row.spec_class} is not accepted: {REFUSALS[row.spec_class]}; if your spec differs, give it a "
            "class of its own"
        )
    kept = [name for name, other in SPEC_TABLE.items() if other.votes]
    if row.source is not None and row.source not in kept:
        what = "which keeps nothing" if row.source in SPEC_TABLE else "of which there is no row"
        raise ConfigError(
            f"the row for {row.spec_class} follows {row.source}, {what}; accepted are {', '.join(kept)} — register the "
            "source first"
        )
    SPEC_TABLE[row.spec_class] = row


_loaded: set[str] = set()


def load_rows(modules: Sequence[str]) -> None:
    """Let other packages register their rows: those of the entry-point group, then the named modules; each once.

    An entry point names a module, or a function in one, which is then called. Raises ConfigError for what cannot be
    imported or registers a row that is not accepted.
    """
    for point in entry_points(group=ENTRY_POINTS):
        if point.value not in _loaded:
            what = f'the entry point "{point.name} = {point.value}" of {ENTRY_POINTS}'
            _load(what, point.load, call=":" in point.value)
            _loaded.add(point.value)
    for module in modules:
        if module not in _loaded:
            _load(f'spec_modules names "{module}", which', lambda module=module: importlib.import_module(module))  # type: ignore[misc]
            _loaded.add(module)


def _load(what: str, load: Callable[[], object], call: bool = False) -> None:
    before = dict(SPEC_TABLE)
    try:
        found = load()
        if call and not callable(found):
            raise TypeError(f"it names a {type(found).__name__}, not a function")
        if call:
            found()  # type: ignore[operator]
    except ConfigError as error:
        _restore(before)
        raise ConfigError(f"{what} registers a row that is not accepted: {error}") from error
    except Exception as error:
        _restore(before)
        raise ConfigError(
            f"{what} cannot be imported ({type(error).__name__}: {error}); accepted are modules that this process can "
            "import, and functions in them — install the package where the engine runs, or take the name out"
        ) from error


def _restore(before: Mapping[str, SpecRow]) -> None:
    # A module that failed is imported anew the next time, and its first rows would be duplicates of themselves.
    SPEC_TABLE.clear()
    SPEC_TABLE.update(before)
